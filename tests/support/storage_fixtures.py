"""Fixtures of all tests with a storage service in their process. `tests/conftest.py` loads them."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.support.storage_client import RunningStorage
from tidemark.clock import ManualClock

StartStorage: TypeAlias = Callable[..., Awaitable[RunningStorage]]


@pytest.fixture
async def clock() -> ManualClock:
    """Time that stands still until the test moves it."""
    return ManualClock()


@pytest.fixture
async def start_storage(tmp_path: Path, clock: ManualClock) -> AsyncIterator[StartStorage]:
    """Starts a storage service with the given settings; stopped after the test."""
    async with AsyncExitStack() as running:

        async def start(**settings: Any) -> RunningStorage:
            directory = settings.pop("data_dir", tmp_path / "data")
            started = RunningStorage(directory, clock, **settings)
            running.push_async_callback(started.stop)
            await started.start()
            return started

        yield start
