"""Fixtures: a broker whose partitions are swept, under a clock that the test moves."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.support.swept_broker import SweptBroker, swept_broker
from tidemark.clock import ManualClock

StartSwept: TypeAlias = Callable[..., Awaitable[SweptBroker]]


@pytest.fixture
async def start(tmp_path: Path, clock: ManualClock) -> AsyncIterator[StartSwept]:
    async with AsyncExitStack() as stack:

        async def start(**settings: Any) -> SweptBroker:
            return await stack.enter_async_context(swept_broker(tmp_path, clock, **settings))

        yield start


@pytest.fixture
async def swept(start: StartSwept) -> SweptBroker:
    """One partition, default settings, the topic `orders`."""
    started = await start()
    await started.create_topic()
    return started
