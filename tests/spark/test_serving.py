"""Spark in processes of its own: the scheduler that serves, and passes on a standalone cluster."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyspark

from tests.spark.conftest import JAVA_OPTIONS, LOOPBACK
from tests.support.cli_process import Cli, Finished
from tests.support.exchange_client import append
from tests.support.processes import child_of, until_listening
from tests.support.retention_process import retention_process
from tests.support.storage_client import RunningStorage
from tests.support.up_process import UpProcess, ended
from tidemark.api.lifecycle.v1 import jobs_pb2
from tidemark.api.lifecycle.v1.jobs_pb2_grpc import JobServiceStub
from tidemark.api.storage.v1.retention_pb2 import HoldScheduleRequest
from tidemark.clock import ManualClock, SystemClock
from tidemark.local.java import find_java_home
from tidemark.local.ports import free_ports
from tidemark.local.service_process import ServiceProcess
from tidemark.rpc import open_channel

AGE_MS = 1_800_000  # a clock that jumps by more than an hour would be suspicious
START_MS = 500_000
POLL_MS = 50


@asynccontextmanager
async def storage_with_old_messages(tmp_path: Path) -> AsyncIterator[RunningStorage]:
    """Three messages are half an hour old, by the clock of the machine."""
    clock = ManualClock(SystemClock().wall_ms() - AGE_MS)
    storage = RunningStorage(tmp_path / "data", clock)
    await storage.start()
    try:
        await storage.create_topic("old", retention_enabled=True, retention_seconds=60)
        await storage.create_topic("slow", max_wait_time_seconds=60)
        async with storage.exchange() as exchange:
            await exchange.ask_all(append("old", b"1", b"2", b"3"), append("slow", b"1"))
        clock.set_wall_ms(SystemClock().wall_ms())
        yield storage
    finally:
        await storage.stop()


def serving(storage: RunningStorage, log_file: Path) -> ServiceProcess:
    return retention_process(
        storage.address, log_file, spark_master="local[1]", spark_options=LOOPBACK
    )


async def jobs_of(process: ServiceProcess) -> dict[str, Any]:
    async with open_channel(process.address) as channel:
        stub: Any = JobServiceStub(channel)
        listed = await stub.ListJobs(jobs_pb2.ListJobsRequest())
    return {jobs_pb2.JobName.Name(job.name): job for job in listed.jobs}


async def until_log_says(process: ServiceProcess, text: str) -> str:
    """The log, once it contains a text; asks the service in between, which keeps it honest."""
    assert process.log_file is not None
    while text not in (log := process.log_file.read_text()):
        assert process.running, log
        await jobs_of(process)
        await SystemClock().sleep_ms(POLL_MS)
    return log


def commands(process: ServiceProcess, storage: RunningStorage) -> list[Finished]:
    """The output of `tidemark retention` about a scheduler."""
    cli = Cli(
        {
            "TIDEMARK_JOBS_ADDRESS": process.address,
            "TIDEMARK_STORAGE_ADDRESSES": storage.address,
        }
    )
    return [
        cli.ok("retention", *arguments)
        for arguments in (
            ("status", "--json"),
            ("dry-run", "--json"),
            ("run", "--job", "eviction"),
            ("history", "--json"),
        )
    ]


async def test_the_scheduler_stops_in_time_while_spark_is_starting(tmp_path: Path) -> None:
    """S5, P4: what starts Spark is not waited for, and leaves with the scheduler."""
    async with storage_with_old_messages(tmp_path) as storage:
        process = serving(storage, tmp_path / "retention.log")
        await process.start()
        try:
            await process.wait_healthy(START_MS)
            while (planner := planner_of(process)) is None:
                assert process.running
                await SystemClock().sleep_ms(POLL_MS)
            starting = os.pidfd_open(planner)
            code = await process.stop(60_000)
            async with asyncio.timeout(60):
                await ended(starting)
        finally:
            if process.running:
                await process.kill()
        probe = HoldScheduleRequest(holder="probe", hold_ms=0)
        after = await storage.retention.HoldSchedule(probe)

    log = (tmp_path / "retention.log").read_text()
    assert "Spark runs" not in log
    assert code == 0, log
    assert after.holder == ""


def planner_of(process: ServiceProcess) -> int | None:
    return child_of(process.pid, b"spark_batch.planner")


async def test_the_scheduler_serves_runs_its_jobs_and_a_standby_takes_over(tmp_path: Path) -> None:
    """R8, R11, S5, P4: a lost Java costs its process, and a pass with nothing due needs none."""
    async with storage_with_old_messages(tmp_path) as storage:
        first = serving(storage, tmp_path / "first.log")
        second = serving(storage, tmp_path / "second.log")
        await first.start()
        try:
            await first.wait_healthy(START_MS)
            log = await until_log_says(first, "EvictionService: Evicted 1 messages")
            log = await until_log_says(first, "RetentionService: Cleaned up")
            listed = await jobs_of(first)
            planner = planner_of(first)
            assert planner is not None
            java = child_of(planner, b"java")
            assert java is not None
            lost = os.pidfd_open(planner)
            os.kill(java, signal.SIGKILL)
            async with asyncio.timeout(60):
                await ended(lost)
            shown = await asyncio.to_thread(commands, first, storage)
            left = planner_of(first)
            await second.start()
            await second.wait_healthy(START_MS)
            await until_log_says(second, "standing_by")
            standing = await jobs_of(second)
            stopped = [await first.stop(60_000)]
            await until_log_says(second, "RetentionService: Cleaned up")
            without_work = planner_of(second)
            stopped.append(await second.stop(60_000))
        finally:
            for each in (first, second):
                if each.running:
                    await each.kill()

    assert "expired_messages=3 completed_messages=0 inactive_partitions=0 old_metrics=0" in log
    for line in (
        "RetentionService started retention_interval=300000 retention_batch_size=1000 "
        "retention_pass_limit=0 partition_cleanup_days=7 metrics_retention_days=90",
        "EvictionService started eviction_interval=60000 eviction_batch_size=1000 "
        "eviction_pass_limit=0",
    ):
        assert line in log
    order = [log.index(f"{name}Service started") for name in ("Metrics", "Retention", "Eviction")]
    assert order == sorted(order)
    status, dry, passed, history = shown
    assert [(job["name"], job["last_error"]) for job in status.json] == [
        ("metrics", ""),
        ("retention", ""),
        ("eviction", ""),
    ]
    assert {"topic": "old", "rule": "expired", "due": 0, "why_not": "too young"} in dry.json[
        "findings"
    ]
    assert "Finished pass eviction-" in passed.err + passed.out
    removed = {(row["lmq_name"], row["type"], row["messages"]) for row in history.json_lines}
    assert removed == {("old", "expired", 3), ("slow", "max_wait_time_eviction", 1)}
    retention = listed["JOB_NAME_RETENTION"]
    assert retention.last_counts["expired"] == 3
    assert retention.last_error == ""
    assert {job.state for job in standing.values()} == {jobs_pb2.JOB_STATE_STANDING_BY}
    assert "Spark is lost: its Java ended" in (tmp_path / "first.log").read_text()
    assert "Cleaned up expired_messages=0" in (tmp_path / "second.log").read_text()
    assert (left, without_work) == (None, None)
    assert stopped == [0, 0]


async def test_a_local_cluster_serves_before_retention_joins(tmp_path: Path) -> None:
    """S6, R11: the services do not wait for Spark, nor for what installs it."""
    setup = "echo installed"

    async with UpProcess(tmp_path / "data", "--retention", f"--retention-setup={setup}") as up:
        await up.ready()
        await up.line_with("retention: installed")
        await up.line_with("retention is ready")
        status = await asyncio.to_thread(
            Cli({"TIDEMARK_JOBS_ADDRESS": up.address("retention")}).ok,
            *("retention", "status", "--json"),
        )
        up.process.terminate()

        assert await up.exit_code() == 0
    assert [job["name"] for job in status.json] == ["metrics", "retention", "eviction"]


async def test_the_same_job_runs_on_a_standalone_cluster(tmp_path: Path) -> None:
    """R10: a master and a worker from the installed distribution, on loopback."""
    master_port, web_port = free_ports("127.0.0.1", 2)
    master = f"spark://127.0.0.1:{master_port}"
    environment = {
        **os.environ,  # noqa: TID251 - handed on, not read
        "JAVA_HOME": str(find_java_home("")),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_DAEMON_JAVA_OPTS": JAVA_OPTIONS,
    }
    spark_class = Path(pyspark.__file__).parent / "bin" / "spark-class"
    deploy = "org.apache.spark.deploy"
    commands = (
        (f"{deploy}.master.Master", "--host", "127.0.0.1", "--port", str(master_port)),
        (f"{deploy}.worker.Worker", "--cores", "1", "--memory", "1g", "--webui-port", "0"),
    )
    arguments = (
        [*commands[0], "--webui-port", str(web_port)],
        [*commands[1], "--host", "127.0.0.1", "-d", str(tmp_path / "work"), master],
    )
    async with storage_with_old_messages(tmp_path) as storage:
        with (tmp_path / "spark.log").open("w") as log:
            running = []
            try:
                for command in arguments:
                    started = await asyncio.create_subprocess_exec(
                        spark_class, *command, env=environment, stdout=log, stderr=log, cwd=tmp_path
                    )
                    running.append(started)
                    # A worker that comes too early tries again after many seconds.
                    await until_listening(running[0], master_port)
                job = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "spark_batch", "run", "retention"),
                    env={
                        **environment,
                        "TIDEMARK_STORAGE_ADDRESSES": storage.address,
                        "TIDEMARK_SPARK_MASTER": master,
                        "TIDEMARK_SPARK_OPTIONS": LOOPBACK,
                    },
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
                shown, complaints = await job.communicate()
            finally:
                for each in running:
                    each.kill()
                    await each.wait()
        left = (await storage.queue("old")).queue.messages

    assert job.returncode == 0, complaints.decode() + (tmp_path / "spark.log").read_text()
    assert "expired" in shown.decode()
    assert left == 0
