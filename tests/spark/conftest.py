"""A real local Spark, once per test run, and storage services for it to read."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from spark_batch.passes.jobs import Jobs
from spark_batch.passes.outcome import Pass
from spark_batch.session import start_session
from tests.support.storage_client import RunningStorage
from tests.support.storage_fixtures import StartStorage
from tidemark.clock import ManualClock
from tidemark.settings import RetentionSettings

RunPass = Callable[..., Awaitable[Pass]]

JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""A Java that lives for seconds spends half of them on optimizing itself otherwise."""

LOOPBACK = (
    "spark.driver.host=127.0.0.1,spark.driver.bindAddress=127.0.0.1,"
    "spark.ui.showConsoleProgress=false,"
    f"spark.driver.extraJavaOptions={JAVA_OPTIONS},"
    f"spark.executor.extraJavaOptions={JAVA_OPTIONS},"
    # Its workers connect within 15 s otherwise, which a busy machine may not manage.
    "spark.python.authenticate.socketTimeout=120s"
)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    started = start_session(RetentionSettings(spark_master="local[2]", spark_options=LOOPBACK))
    yield started
    started.stop()


@pytest.fixture
async def storage(start_storage: StartStorage) -> RunningStorage:
    """Two partitions and a manual clock."""
    return await start_storage(partitions=2)


@pytest.fixture
def jobs(spark: SparkSession, storage: RunningStorage, clock: ManualClock) -> Callable[..., Jobs]:
    """The jobs of that storage, with settings of RetentionSettings."""

    def make(**settings: Any) -> Jobs:
        chosen = RetentionSettings(storage_addresses=(storage.address,), **settings)
        return Jobs(spark, chosen, clock)

    return make


@pytest.fixture
def retention(jobs: Callable[..., Jobs]) -> RunPass:
    """Runs one retention pass while storage, in this process, goes on serving."""

    async def run(dry_run: bool = False, **settings: Any) -> Pass:
        return await asyncio.to_thread(jobs(**settings).retention, dry_run)

    return run


@pytest.fixture
def eviction(jobs: Callable[..., Jobs]) -> RunPass:
    async def run(dry_run: bool = False, **settings: Any) -> Pass:
        return await asyncio.to_thread(jobs(**settings).eviction, dry_run)

    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test of a run waits for Spark to start, and a busy machine makes that long."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(600))
