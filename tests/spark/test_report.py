"""The report: counted by Spark, complete in one file."""

import asyncio
import re
from pathlib import Path

from pyspark.sql import SparkSession

from spark_batch.report import Counted, removed, write_report
from tests.support.exchange_client import append, operation
from tests.support.storage_client import RunningStorage
from tidemark.api.storage.v1.exchange_pb2 import Purge
from tidemark.clock import ManualClock


async def test_the_page_shows_ages_removals_activity_and_the_largest_queues(
    storage: RunningStorage, clock: ManualClock, spark: SparkSession, tmp_path: Path
) -> None:
    for topic in ("orders", "mail"):
        await storage.create_topic(topic)
    async with storage.exchange(0) as exchange:
        await exchange.ask(append("mail/<b>", b"1", b"2", b"3"))
        await exchange.ask(append("mail/gone", b"1"))
        await exchange.ask(operation(purge=Purge(lmq_name="mail/gone")))
        await clock.advance_ms(601_000)
        await exchange.ask(append("orders", b"1"))
    page = tmp_path / "report.html"

    await asyncio.to_thread(write_report, spark, storage.address, page, clock)

    text = page.read_text()
    for shown in (
        "&lt; 1 min, orders: 1 messages",
        "&lt; 1 h, mail: 3 messages",
        "purge: 1 messages",
        "mail, idle: 2 queues",
        "orders, active: 1 queues",
        "mail/&lt;b&gt;: 3 messages",
    ):
        assert shown in text
    assert "<b>3</b>queues" in text
    assert "<b>4</b>messages" in text
    assert not re.search(r"https?://|<script|<link|@import", text)


async def test_the_page_takes_few_spark_jobs(
    storage: RunningStorage, clock: ManualClock, spark: SparkSession, tmp_path: Path
) -> None:
    """R10: each job costs a second on a cold Spark, whatever it reads."""
    await storage.create_topic("orders")
    async with storage.exchange(0) as exchange:
        await exchange.ask(append("orders", b"1"))

    def report() -> int:
        spark.sparkContext.setJobGroup("report", "counted by this test")
        write_report(spark, storage.address, tmp_path / "report.html", clock)
        return len(spark.sparkContext.statusTracker().getJobIdsForGroup("report"))

    jobs = await asyncio.to_thread(report)

    assert jobs <= 3


def test_days_of_two_years_are_in_the_order_of_time() -> None:
    counted = [
        Counted("removed", day, "expired", 1, messages, 0)
        for day, messages in (("27-01-01", 2), ("26-12-31", 1), ("26-01-01", 3))
    ]

    assert list(removed(counted)) == ["26-01-01", "26-12-31", "27-01-01"]
