"""Killed in the middle of a pass: nothing is lost, and the next pass does what is left (R9)."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from spark_batch.passes.jobs import Jobs
from spark_batch.passes.outcome import JobName
from spark_batch.planner.spark_passes import REPORT_MS, SparkPasses
from tests.spark.conftest import LOOPBACK
from tests.support.exchange_client import append, reserve
from tests.support.storage_client import RunningStorage, StorageClient, storage_process
from tidemark.api.storage.v1.retention_pb2 import ListRetentionHistoryRequest
from tidemark.clock import ManualClock, SystemClock
from tidemark.errors import DeadlineExceeded, TidemarkError
from tidemark.local.service_process import ServiceProcess
from tidemark.rpc import open_channel
from tidemark.settings import RetentionSettings

QUEUES = 40
RUNS = 8
"""In a queue: a pass that makes a call for each lasts for seconds, and can be caught at it."""

HOUR_MS = 3_600_000
DUE = QUEUES * RUNS * 2
POLL_MS = 10


@asynccontextmanager
async def process_with_old_messages(tmp_path: Path) -> AsyncIterator[ServiceProcess]:
    """Storage in a process of its own; messages of two topics are an hour old, one is kept."""
    clock = ManualClock(SystemClock().wall_ms() - HOUR_MS)
    filled = RunningStorage(tmp_path / "data", clock)
    await filled.start()
    await filled.create_topic("old", retention_enabled=True, retention_seconds=60)
    await filled.create_topic("kept", retention_enabled=True, retention_seconds=86_400)
    async with filled.exchange() as exchange:
        for _ in range(RUNS):
            await exchange.ask_all(*(append(f"old/{n}", b"1", b"2") for n in range(QUEUES)))
        await exchange.ask_all(append("kept", b"x"), append("old/held", b"x"))
        await exchange.ask(reserve("old/held", visibility_ms=12 * HOUR_MS))
    await filled.stop()
    process = storage_process(
        tmp_path / "data", tmp_path / "storage.log", partitions="1", storage_disk_free_bytes_min="0"
    )
    await process.start()
    await process.wait_healthy()
    try:
        yield process
    finally:
        await process.kill()


async def removed(address: str) -> int:
    """Messages that the history has counted."""
    async with open_channel(address) as channel:
        return await _removed(StorageClient(channel))


async def _removed(storage: StorageClient) -> int:
    request = ListRetentionHistoryRequest(page_size=1000)
    answer = await storage.retention.ListRetentionHistory(request)
    return sum(row.messages for row in answer.rows)


async def newest_pass(address: str) -> str:
    """The pass that has removed something last."""
    async with open_channel(address) as channel:
        request = ListRetentionHistoryRequest(page_size=1)
        answer = await StorageClient(channel).retention.ListRetentionHistory(request)
        return str(answer.rows[0].pass_id)


async def until_some_are_removed(address: str, passing: "asyncio.Future[Any]") -> None:
    async with open_channel(address) as channel:
        while not await _removed(StorageClient(channel)):
            assert not passing.done(), "the pass ended before it could be killed"
            await SystemClock().sleep_ms(POLL_MS)


async def check_that_only_due_messages_left(address: str) -> None:
    async with open_channel(address) as channel:
        client = StorageClient(channel)
        for number in range(QUEUES):
            assert (await client.queue(f"old/{number}")).queue.messages == 0
        assert (await client.queue("old/held")).queue.messages == 1
        assert (await client.queue("kept")).queue.messages == 1
    assert await removed(address) == DUE


def jobs(spark: SparkSession, address: str) -> Jobs:
    """One call per run, so that there is a middle."""
    settings = RetentionSettings(storage_addresses=(address,), retention_batch_size=1)
    return Jobs(spark, settings, SystemClock())


async def test_storage_killed_in_the_middle_of_apply_loses_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    """R9, R6: history adds up to exactly what was due, over both passes."""
    async with process_with_old_messages(tmp_path) as process:
        job = jobs(spark, process.address)
        passing = asyncio.create_task(asyncio.to_thread(job.retention))
        await until_some_are_removed(process.address, passing)

        await process.kill()
        broken = await passing
        await process.start()
        await process.wait_healthy()
        before = await removed(process.address)
        done = await asyncio.to_thread(job.retention)

        assert 0 < before < DUE
        assert "UNAVAILABLE" in broken.failed[0]
        assert done.counts["expired"] == DUE - before
        await check_that_only_due_messages_left(process.address)


async def test_a_pass_that_takes_too_long_is_ended_and_loses_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    """R9, R11: its progress is reported, its Spark jobs are interrupted, the next does the rest."""
    async with process_with_old_messages(tmp_path) as process:
        settings = RetentionSettings(storage_addresses=(process.address,), retention_batch_size=1)
        clock = ManualClock()
        passes = SparkPasses(settings, clock)
        await passes.start()  # it uses the session that exists
        reported: asyncio.Queue[tuple[int, ...]] = asyncio.Queue()

        def report(*progress: int) -> None:
            reported.put_nowait(progress)

        passing = asyncio.ensure_future(passes.run(JobName.RETENTION, False, report))
        await until_some_are_removed(process.address, passing)

        await clock.advance_ms(REPORT_MS)
        async with asyncio.timeout(60):
            tasks, done, planned, applied = await reported.get()
        pass_id = await newest_pass(process.address)
        await clock.advance_ms(settings.pass_timeout_ms)
        with pytest.raises(DeadlineExceeded, match="took longer than 3600000 ms"):
            await passing
        status = spark.sparkContext.statusTracker()
        ended = [status.getJobInfo(each) for each in status.getJobIdsForGroup(pass_id)]
        await passes.run(JobName.RETENTION, False)

        assert [job.status for job in ended if job is not None] == ["FAILED"]
        assert 0 <= done < tasks
        assert 0 < applied < planned  # while their task is running
        assert not passes.lost.is_set()
        await check_that_only_due_messages_left(process.address)


async def test_a_driver_killed_in_the_middle_of_apply_loses_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    """R9: kill -9 of the process that runs the pass, then the same pass again."""
    async with process_with_old_messages(tmp_path) as process:
        environment = {
            **os.environ,  # noqa: TID251 - handed on, not read
            "TIDEMARK_STORAGE_ADDRESSES": process.address,
            "TIDEMARK_SPARK_MASTER": "local[1]",
            "TIDEMARK_SPARK_OPTIONS": LOOPBACK,
            "TIDEMARK_RETENTION_BATCH_SIZE": "1",
        }
        command = (sys.executable, "-m", "spark_batch", "run", "retention")

        killed = await asyncio.create_subprocess_exec(*command, env=environment)
        ended = asyncio.ensure_future(killed.wait())
        await until_some_are_removed(process.address, ended)
        killed.kill()
        await ended
        await asyncio.to_thread(jobs(spark, process.address).retention)

        await check_that_only_due_messages_left(process.address)


async def test_two_passes_at_once_do_no_harm(spark: SparkSession, tmp_path: Path) -> None:
    """R9: each message is removed, and counted, by one of them."""
    async with process_with_old_messages(tmp_path) as process:
        job = jobs(spark, process.address)

        both = await asyncio.gather(*(asyncio.to_thread(job.retention) for _ in range(2)))

        assert sum(each.counts["expired"] for each in both) == DUE
        await check_that_only_due_messages_left(process.address)


async def test_a_pass_without_storage_says_so_and_changes_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    """R9."""
    async with process_with_old_messages(tmp_path) as process:
        await process.kill()

        with pytest.raises(TidemarkError) as failed:
            await asyncio.to_thread(jobs(spark, process.address).retention)

        await process.start()
        await process.wait_healthy()
        assert failed.value.reason == "UNAVAILABLE"
        assert await removed(process.address) == 0
