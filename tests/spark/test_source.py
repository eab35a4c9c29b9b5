"""The data source: storage's tables as Spark reads them."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from spark_batch.source import TABLES, TidemarkReader
from spark_batch.storage_client import PartitionAddress
from tests.spark.conftest import StartStorage
from tests.support.storage_client import RunningStorage, append, operation, reserve, settle
from tidemark.api.storage.v1.exchange_pb2 import Purge
from tidemark.api.storage.v1.retention_pb2 import MetricRow, RecordMetricsRequest
from tidemark.clock import ManualClock

Read = Callable[..., DataFrame]


@pytest.fixture
def read(spark: SparkSession, storage: RunningStorage) -> Read:
    def frame(table: str, **options: str) -> DataFrame:
        chosen = {"storage": storage.address, "table": table, **options}
        return spark.read.format("tidemark").options(**chosen).load()

    return frame


async def rows(frame: DataFrame) -> list[dict[str, Any]]:
    """The rows, while storage in this process goes on serving."""
    return [row.asDict() for row in await asyncio.to_thread(frame.collect)]


async def test_every_table_has_the_columns_that_storage_gives(
    storage: RunningStorage, read: Read
) -> None:
    """R6, R12, R13: a row of each, from every partition."""
    await storage.create_topic("jobs")
    async with storage.exchange(0) as exchange:
        await exchange.ask(append("jobs", b"one"))
        (taken,) = (await exchange.ask(reserve("jobs"))).slices
        await exchange.ask(settle(taken.receipt))
        await exchange.ask(append("jobs", b"two", b"three"))
        await exchange.ask(append("jobs/gone", b"four"))
        await exchange.ask(operation(purge=Purge(lmq_name="jobs/gone")))
    figure = MetricRow(instance="i", name="n", samples=1, min=1, max=1, mean=1, last=1)
    await storage.retention.RecordMetrics(RecordMetricsRequest(rows=[figure]))

    found = {table: await rows(read(table)) for table in TABLES}

    (run,) = found["runs"]
    assert (run["topic"], run["messages"], run["groups"], run["held"]) == ("jobs", 2, 1, False)
    (group,) = found["groups"]
    assert (group["group"], group["unsettled"]) == ("default", 2)
    assert {queue["lmq_name"]: queue["messages"] for queue in found["queues"]} == {
        "jobs": 2,
        "jobs/gone": 0,
    }
    (removed,) = found["history"]
    assert (removed["lmq_name"], removed["retention_type"]) == ("jobs/gone", "purge")
    (consumed,) = found["messages_consumed"]
    assert (consumed["start"], consumed["end"]) == (0, 1)
    (measured,) = found["system_metrics"]
    assert (measured["instance"], measured["mean"]) == ("i", 1.0)


async def test_conditions_on_topic_and_time_are_answered_by_storage(
    storage: RunningStorage, read: Read, clock: ManualClock
) -> None:
    for topic in ("a", "b"):
        await storage.create_topic(topic)
    async with storage.exchange(0) as exchange:
        await exchange.ask_all(append("a", b"1"), append("b", b"1"))
        await clock.advance_ms(1)
        second_ms = clock.wall_ms()
        await exchange.ask_all(append("a", b"2"), append("b", b"2"))
    runs = read("runs", columns="topic,first_offset,publish_time")

    moment = F.timestamp_millis(F.lit(second_ms))
    older = runs.where((F.col("topic") == "a") & (F.col("publish_time") < moment))
    newer = runs.where(F.col("topic").isin("a", "b") & (F.col("publish_time") >= moment))

    assert runs.columns == ["topic", "first_offset", "publish_time"]
    assert [(row["topic"], row["first_offset"]) for row in await rows(older)] == [("a", 0)]
    assert {(row["topic"], row["first_offset"]) for row in await rows(newer)} == {
        ("a", 1),
        ("b", 1),
    }


async def test_each_partition_is_read_by_a_task_of_its_own(storage: RunningStorage) -> None:
    reader = TidemarkReader(storage.address, "queues", ["topic"])

    partitions = await asyncio.to_thread(reader.partitions)

    assert [each.value for each in partitions] == [
        PartitionAddress(0, storage.address),
        PartitionAddress(1, storage.address),
    ]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"table": "nonsense"}, "is one of runs, groups"),
        ({"table": "runs", "columns": "partition,nonsense"}, "has no columns"),
        ({"table": "runs", "storage": ""}, '"storage" is missing'),
    ],
)
async def test_options_that_cannot_be_are_refused(
    spark: SparkSession, storage: RunningStorage, options: dict[str, str], why: str
) -> None:
    """S3."""
    chosen = {"storage": storage.address, **options}

    with pytest.raises(AnalysisException, match=why):
        await asyncio.to_thread(
            lambda: spark.read.format("tidemark").options(**chosen).load().collect()
        )


async def test_a_partition_that_nobody_holds_is_an_error_not_an_empty_table(
    spark: SparkSession, start_storage: StartStorage
) -> None:
    """R9: a pass must not take absence for age."""
    gone = await start_storage(partitions=1)
    address = gone.address
    await gone.stop()
    frame = spark.read.format("tidemark").options(storage=address, table="runs").load()

    with pytest.raises(Exception, match="UNAVAILABLE"):
        await asyncio.to_thread(frame.collect)
