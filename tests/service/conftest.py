"""A real storage service for tests that speak to it over gRPC."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from storage_svc.engines.rocksdb import RocksEngines
from tests.support.engine_choice import ENGINE
from tests.support.exchange_client import ExchangeClient
from tests.support.faulty_engine import FaultyEngines
from tests.support.storage_client import RunningStorage
from tests.support.storage_fixtures import StartStorage


@pytest.fixture
async def storage(start_storage: StartStorage) -> RunningStorage:
    """One partition, a manual clock, and the shared topic `jobs`."""
    started = await start_storage()
    await started.create_topic("jobs")
    return started


@pytest.fixture
async def exchange(storage: RunningStorage) -> AsyncIterator[ExchangeClient]:
    """The exchange of the broker that owns the partition."""
    async with storage.exchange() as bound:
        yield bound


@pytest.fixture
def faulty_disks(monkeypatch: pytest.MonkeyPatch) -> list[FaultyEngines]:
    """The disks of every storage started from now on: they wait or fail on demand."""
    if ENGINE:
        pytest.skip("a test of RocksDB: its disk is made to fail")
    disks: list[FaultyEngines] = []

    def faulty(*args: Any, **options: Any) -> FaultyEngines:
        disks.append(FaultyEngines(RocksEngines(*args, **options)))
        return disks[-1]

    monkeypatch.setattr("storage_svc.app.RocksEngines", faulty)
    return disks
