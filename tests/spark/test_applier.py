"""Tasks apply a plan while it is being made: calls, failures and progress, without a Spark job."""

import asyncio
from collections.abc import Iterable, Iterator

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from spark_batch.passes.applier import BATCHES_AHEAD_MAX, applier
from spark_batch.passes.calls import COLUMNS
from spark_batch.passes.failures import Failures, collect_failures
from tests.support.exchange_client import append, apply_topic
from tests.support.storage_client import RunningStorage
from tidemark.api.storage.v1.retention_pb2 import GetPassProgressRequest
from tidemark.clock import ManualClock

QUEUES = 10
MISSING = 7
"""A partition that no service holds."""


@pytest.fixture
def failures(spark: SparkSession) -> Failures:
    return collect_failures(spark.sparkContext)


async def old_messages(storage: RunningStorage, clock: ManualClock) -> list[pa.RecordBatch]:
    """A message in each of some queues of both partitions; a batch of the plan for each queue."""
    topic = await storage.create_topic("old", retention_enabled=True, retention_seconds=1)
    batches = []
    async with storage.exchange(0) as first, storage.exchange(1) as second:
        await apply_topic(second, topic)
        for number in range(QUEUES):
            for partition, exchange in enumerate((first, second)):
                queue = await exchange.ask(append(f"old/{number}", b"x"))
                batches.append(planned(partition, f"old/{number}", queue.queue_id))
    await clock.advance_ms(1000)
    return batches


def planned(partition: int, lmq_name: str, queue_id: int) -> pa.RecordBatch:
    row = {
        "partition": partition,
        "topic": "old",
        "retention_type": "expired",
        "age_ms": 0,
        "lmq_name": lmq_name,
        "queue_id": queue_id,
        "group": "",
        "fairness_key": "",
        "first_offset": 0,
        "messages": 1,
        "before_ms": 1,
    }
    return pa.RecordBatch.from_pylist([{name: row[name] for name in COLUMNS}])


async def run(
    storage: RunningStorage, batches: Iterable[pa.RecordBatch], batch_size: int, failures: Failures
) -> list[dict[str, object]]:
    """The report of a task."""
    addresses = dict.fromkeys((0, 1, MISSING), storage.address)
    apply = applier(addresses, "the-pass", batch_size, failures)

    def work() -> list[dict[str, object]]:
        return [row for batch in apply(batches) for row in batch.to_pylist()]

    return await asyncio.to_thread(work)


async def rows(storage: RunningStorage) -> tuple[int, int]:
    request = GetPassProgressRequest(pass_id="the-pass")
    found = await storage.retention.GetPassProgress(request)
    return found.planned_rows, found.rows


async def test_a_call_carries_rows_of_several_partitions_and_batches(
    storage: RunningStorage, clock: ManualClock, failures: Failures
) -> None:
    """R7, R11: as many as the batch size allows; all rows are reported, and count as applied."""
    batches = await old_messages(storage, clock)

    (report,) = await run(storage, batches, 8, failures)

    assert (report["removed"], report["stale"], report["calls"]) == (2 * QUEUES, 0, 3)
    assert failures.value == {}
    assert await rows(storage) == (2 * QUEUES, 2 * QUEUES)


async def test_rows_are_planned_ahead_of_the_calls(
    storage: RunningStorage, clock: ManualClock, failures: Failures
) -> None:
    """R11: the first call reports a plan that is complete, so that a bar shows what is left."""
    batches = await old_messages(storage, clock)
    known: list[tuple[int, int]] = []
    loop = asyncio.get_running_loop()

    def plan() -> Iterator[pa.RecordBatch]:
        """A plan whose end is made only once storage has applied its beginning."""
        yield from batches[:-1]
        while not known or not known[-1][1]:
            known.append(asyncio.run_coroutine_threadsafe(rows(storage), loop).result())
        yield batches[-1]

    assert len(batches) < BATCHES_AHEAD_MAX
    (report,) = await run(storage, plan(), 1, failures)

    assert report["removed"] == 2 * QUEUES
    assert known[-1][0] > known[-1][1]


async def test_a_partition_that_refuses_does_not_stop_the_others_of_its_call(
    storage: RunningStorage, clock: ManualClock, failures: Failures
) -> None:
    """R9: it is reported with its error, and gets no more calls."""
    batches = await old_messages(storage, clock)
    elsewhere = [planned(MISSING, f"old/{number}", 1) for number in range(QUEUES)]
    mixed = [batch for pair in zip(elsewhere, batches, strict=False) for batch in pair]

    (report,) = await run(storage, mixed, 2, failures)

    assert report["removed"] == QUEUES
    assert list(failures.value) == [MISSING]
    assert "PARTITION_NOT_FOUND" in failures.value[MISSING]
    assert (await rows(storage))[1] == QUEUES


async def test_a_plan_that_fails_ends_the_task_with_its_error(
    storage: RunningStorage, clock: ManualClock, failures: Failures
) -> None:
    """R9: what was planned before is applied or left; the task fails, and Spark reports it."""
    batches = await old_messages(storage, clock)

    def plan() -> Iterator[pa.RecordBatch]:
        yield from batches
        raise EOFError("the socket of Spark is closed")

    with pytest.raises(EOFError, match="the socket of Spark is closed"):
        await run(storage, plan(), 1, failures)
