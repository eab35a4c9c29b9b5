"""Fixtures: a broker whose cleanup runs when the test asks for it, on storage behind gates."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.gated_storage import GatedLink, GatedStorage, gated_storage
from tests.support.idle_broker import (
    PARTITIONS,
    QUEUE_PARTITION,
    IdleBroker,
    RestartableStorage,
    idle_broker,
)
from tidemark.clock import ManualClock

StartBroker = Callable[..., Any]


@pytest.fixture
def storage_clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def stored(tmp_path: Path, storage_clock: ManualClock) -> AsyncIterator[RestartableStorage]:
    service = RestartableStorage(tmp_path, storage_clock)
    await service.start()
    yield service
    await service.stop()


@pytest.fixture
async def gates(stored: RestartableStorage) -> AsyncIterator[GatedStorage]:
    async with gated_storage(stored.address, PARTITIONS) as gates:
        yield gates


@pytest.fixture
def link(gates: GatedStorage) -> GatedLink:
    """The way to the partition of `QUEUE`."""
    return gates.links[QUEUE_PARTITION]


@pytest.fixture
async def start_broker(gates: GatedStorage) -> AsyncIterator[StartBroker]:
    """Starts a broker that has claimed its partitions; a second one fences the first."""
    async with AsyncExitStack() as running:

        async def start(**settings: Any) -> IdleBroker:
            return await running.enter_async_context(idle_broker(gates, **settings))

        yield start


@pytest.fixture
async def broker(start_broker: StartBroker) -> IdleBroker:
    """A broker that knows the topic."""
    started: IdleBroker = await start_broker()
    await started.create_topic()
    return started
