"""Fixtures: a broker with its storage, over real gRPC and a real RocksDB in `tmp_path`."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.support.gated_storage import GatedLink, GatedStorage, gated_storage
from tests.support.local_broker import LocalBroker, local_broker, until
from tidemark.clock import Clock, ManualClock

StartBroker: TypeAlias = Callable[..., Awaitable[LocalBroker]]
Gated: TypeAlias = tuple[LocalBroker, GatedStorage]
"""A broker, and the gates between it and its storage."""
StartGated: TypeAlias = Callable[..., Awaitable[Gated]]


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
async def start_gated(start: StartBroker) -> AsyncIterator[StartGated]:
    """Starts a broker behind gates."""
    async with AsyncExitStack() as stack:

        async def start_gated(partitions: int, **settings: Any) -> Gated:
            local = await start(partitions=partitions, **settings)
            await local.stop_broker()
            proxy = gated_storage(local.storage_server.address, partitions)
            gates = await stack.enter_async_context(proxy)
            await local.start_broker(gates.address)
            stack.push_async_callback(local.stop_broker)
            return local, gates

        yield start_gated


@pytest.fixture
async def gated(start_gated: StartGated) -> Gated:
    """One partition, and its gates."""
    return await start_gated(1)


async def break_and_hold(link: GatedLink, clock: ManualClock) -> None:
    """Break a link; the broker claims again and reports, but does not get further than that."""
    link.requests.close()
    await link.break_now()
    held = asyncio.create_task(link.requests.until_held())

    async def is_held() -> bool:
        await clock.advance_ms(10)
        return held.done()

    await until(is_held)
