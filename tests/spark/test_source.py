"""The data source: storage's tables as Spark reads them in a session with default configuration."""

import asyncio
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name
from pyspark.testing import assertDataFrameEqual

from pyspark_tidemark.reader import TidemarkReader
from pyspark_tidemark.storage import PartitionAddress
from pyspark_tidemark.tables import TABLES
from storage_svc.engines.engine import Table
from tests.spark.conftest import LOOPBACK
from tests.support.counted_reads import count_reads
from tests.support.documented_query import RETENTION_MD, documented_query
from tests.support.exchange_client import ExchangeClient, append, operation, reserve, settle
from tests.support.storage_client import RunningStorage
from tests.support.storage_fixtures import StartStorage
from tidemark.api.broker.v1.topic_pb2 import CONSUMPTION_RECORDS_ON
from tidemark.api.storage.v1.exchange_pb2 import SETTLE_ACTION_RELEASE, Purge
from tidemark.api.storage.v1.retention_pb2 import MetricRow, RecordMetricsRequest
from tidemark.clock import ManualClock
from tidemark.local.java import find_java_home

Read = Callable[..., DataFrame]

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture
def read(spark: SparkSession, storage: RunningStorage) -> Read:
    def frame(table: str, **options: str) -> DataFrame:
        chosen = {"storage": storage.address, "table": table, **options}
        return spark.read.format("tidemark").options(**chosen).load()

    return frame


@pytest.fixture
def pushdown(spark: SparkSession) -> Iterator[None]:
    """Spark pushes the conditions of queries to data sources; it does not by default."""
    spark.conf.set(PUSHDOWN, "true")
    yield
    spark.conf.unset(PUSHDOWN)


async def rows(frame: DataFrame) -> list[dict[str, Any]]:
    """The rows, while storage in this process goes on serving."""
    return [row.asDict() for row in await asyncio.to_thread(frame.collect)]


async def test_every_table_has_the_columns_that_storage_gives(
    storage: RunningStorage, read: Read
) -> None:
    """R6, R12, R13, P1: a row of each, from every partition."""
    await storage.create_topic("jobs", consumption_records=CONSUMPTION_RECORDS_ON)
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


async def test_the_documented_queries_answer_lag_and_waiting_time(
    spark: SparkSession, storage: RunningStorage, read: Read, clock: ManualClock
) -> None:
    """R13, P1: as they stand in the documentation."""
    queries = dict(re.findall(r"```sql\n-- (\w+)\n(.*?)```", RETENTION_MD.read_text(), re.S))
    await storage.create_topic("jobs", consumption_records=CONSUMPTION_RECORDS_ON)
    async with storage.exchange(0) as exchange:
        for _ in range(3):
            await exchange.ask(append("jobs/a", b"one", b"two"))
            await clock.advance_ms(1_000)
        first, second = (await exchange.ask(reserve("jobs/a", 4))).slices
        await clock.advance_ms(100)
        release = settle(second.receipt, SETTLE_ACTION_RELEASE)
        await exchange.ask_all(settle(first.receipt), release)
        await clock.advance_ms(400)
        (again,) = (await exchange.ask(reserve("jobs/a", 2))).slices
        assert again.first_offset == second.first_offset
        await exchange.ask(settle(again.receipt))
        await clock.advance_ms(4_500)
    for table in ("runs", "groups", "messages_consumed"):
        read(table).createOrReplaceTempView(table)

    found = {name: await rows(spark.sql(query)) for name, query in queries.items()}

    assert found == {
        "lag": [
            {
                "topic": "jobs",
                "lmq_name": "jobs/a",
                "group": "default",
                "unsettled": 2,
                "oldest_ms": 6_000,
            }
        ],
        "wait_time": [
            {
                "topic": "jobs",
                "group": "default",
                "messages": 4,
                "wait_p50_ms": 2_500.0,
                "wait_p99_ms": 3_000.0,
                "work_p50_ms": 300.0,
                "work_p99_ms": 500.0,
            }
        ],
    }


async def fill(storage: RunningStorage, clock: ManualClock) -> int:
    """Two runs in each of three queues of two topics; returns the time of the second ones."""
    for topic in ("a", "b"):
        await storage.create_topic(topic)
    async with storage.exchange(0) as exchange:
        await append_to_all(exchange)
        await clock.advance_ms(1)
        await append_to_all(exchange)
    return clock.wall_ms()


async def append_to_all(exchange: ExchangeClient) -> None:
    await exchange.ask_all(*(append(name, b"1") for name in ("a", "a/x", "b")))


async def test_conditions_are_met_with_and_without_pushed_filters(
    storage: RunningStorage, read: Read, clock: ManualClock, spark: SparkSession
) -> None:
    """P1: by default Spark evaluates the conditions itself."""
    second_ms = await fill(storage, clock)
    moment = F.timestamp_millis(F.lit(second_ms))
    runs = read("runs", columns="topic,lmq_name,first_offset,publish_time")
    older = runs.where((F.col("topic") == "a") & (F.col("publish_time") < moment))
    named = runs.where(
        F.col("lmq_name").startswith("a/")
        & F.col("topic").isin("a", "b")
        & (F.col("publish_time") >= moment)
    )
    expected = [
        (older, [("a", 0), ("a/x", 0)]),
        (named, [("a/x", 1)]),
    ]

    def check() -> None:
        for enabled in ("false", "true"):
            spark.conf.set(PUSHDOWN, enabled)
            for frame, wanted in expected:
                found = frame.select("lmq_name", "first_offset")
                assertDataFrameEqual(
                    found, [Row(lmq_name=name, first_offset=at) for name, at in wanted]
                )

    try:
        await asyncio.to_thread(check)
    finally:
        spark.conf.unset(PUSHDOWN)
    assert runs.columns == ["topic", "lmq_name", "first_offset", "publish_time"]


async def test_options_narrow_at_storage_in_a_default_session(
    storage: RunningStorage, read: Read, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P1, P2: one queue costs one queue, without any configuration."""
    await fill(storage, clock)
    reads = count_reads(monkeypatch)

    found = await rows(read("runs", queue="a/x", partition="0", columns="lmq_name,first_offset"))

    assert sorted(row["first_offset"] for row in found) == [0, 1]
    assert (reads[Table.CATALOG], reads[Table.RUN_HEADERS]) == (1, 2)


async def test_conditions_of_a_query_narrow_at_storage_where_spark_pushes_them(
    storage: RunningStorage,
    read: Read,
    clock: ManualClock,
    pushdown: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """P2: `lmq_name = '...'` does not read every queue."""
    await fill(storage, clock)
    reads = count_reads(monkeypatch)

    found = await rows(read("runs").where("lmq_name = 'a/x' AND partition = 0"))

    assert sorted(row["first_offset"] for row in found) == [0, 1]
    assert (reads[Table.CATALOG], reads[Table.RUN_HEADERS]) == (1, 2)
    assert await rows(read("runs").where("partition = 7")) == []


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
        ({"table": "runs", "partition": "0,7"}, r'"partition": there is no \[7\], only 0 to 1'),
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


async def test_streams_and_writes_are_refused_by_name(
    spark: SparkSession, storage: RunningStorage, tmp_path: Path
) -> None:
    """S3."""
    options = {"storage": storage.address, "table": "runs"}

    def stream() -> None:
        frame = spark.readStream.format("tidemark").options(**options).load()
        started = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path))
        started.start().awaitTermination()

    def write() -> None:
        # Writes find a data source by the active session of their thread, which this sets.
        frame = spark.createDataFrame([(1,)], "n int")
        frame.write.format("tidemark").options(**options).mode("append").save()

    with pytest.raises(Exception, match="does not support readStream yet") as streamed:
        await asyncio.to_thread(stream)
    with pytest.raises(Exception, match="does not support write yet"):
        await asyncio.to_thread(write)
    assert "UnboundLocalError" not in str(streamed.value)


async def test_a_partition_that_no_storage_holds_is_an_error_not_an_empty_table(
    spark: SparkSession, start_storage: StartStorage
) -> None:
    """R9: a pass must not take absence for age."""
    gone = await start_storage(partitions=1)
    address = gone.address
    await gone.stop()
    frame = spark.read.format("tidemark").options(storage=address, table="runs").load()

    with pytest.raises(Exception, match="UNAVAILABLE"):
        await asyncio.to_thread(frame.collect)


async def test_the_documented_query_runs_by_spark_submit_whose_configuration_is_respected(
    storage: RunningStorage, tmp_path: Path
) -> None:
    """P1: the snippet as it is, then a session for the jobs with the master and settings given."""
    await storage.create_topic("jobs")
    async with storage.exchange(0) as exchange:
        await exchange.ask(append("jobs/a", b"1", b"2"))
    program = tmp_path / "query.py"
    program.write_text(
        documented_query(storage.address)
        + f"""
print("the snippet has run with", spark.conf.get("{PUSHDOWN}"))
spark.stop()

from spark_batch.session import start_session
from tidemark.settings import RetentionSettings

for attempt in ("started", "existing"):
    spark = start_session(RetentionSettings(spark_master="local[7]"))
    context = spark.sparkContext
    print(attempt, context.master, context.appName, spark.conf.get("spark.sql.shuffle.partitions"))
    spark.conf.set("spark.sql.shuffle.partitions", "78")
"""
    )
    conf = [f"--conf={each}" for each in LOOPBACK.split(",")]
    submit = await asyncio.create_subprocess_exec(
        str(Path(pyspark.__file__).parent / "bin" / "spark-submit"),
        *("--master", "local[1]", "--name", "mine"),
        *("--conf", "spark.sql.shuffle.partitions=77", *conf, str(program)),
        env={
            **os.environ,  # noqa: TID251 - handed on, not read
            "JAVA_HOME": str(find_java_home("")),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,
        },
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    shown, complaints = await submit.communicate()

    assert submit.returncode == 0, complaints.decode()
    lines = shown.decode().splitlines()
    assert "| jobs|            2|" in lines
    assert lines[-3:] == [
        "the snippet has run with false",
        "started local[1] mine 77",
        "existing local[1] mine 78",
    ]
