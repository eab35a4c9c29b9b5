"""Fixtures: a broker with its storage, over real gRPC and a real RocksDB in `tmp_path`."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.rpc.broker.local_broker import LocalBroker, local_broker
from tidemark.clock import Clock, ManualClock

StartBroker: TypeAlias = Callable[..., Awaitable[LocalBroker]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[StartBroker]:
    """Starts a broker with settings of its own; it has the topic `orders`."""
    async with AsyncExitStack() as stack:

        async def start(clock: Clock | None = None, **settings: Any) -> LocalBroker:
            topic = settings.pop("topic", {})
            local = await stack.enter_async_context(local_broker(tmp_path, clock, **settings))
            await local.create_topic(**topic)
            return local

        yield start


@pytest.fixture
async def local(start: StartBroker) -> LocalBroker:
    """Two partitions, the default settings, the time of the machine."""
    return await start()


@pytest.fixture
async def clock() -> ManualClock:
    """Time that stands still until the test moves it."""
    return ManualClock()
