"""The scheduler over a real storage: blocked, standing by, and jobs on their intervals (R11)."""

import asyncio
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from spark_batch.api.job_service import JobService
from spark_batch.app import Stored
from spark_batch.passes.outcome import JobName, Phase, Progress, Report
from spark_batch.planner.process import BACKOFF_MS, SparkNotStarted
from spark_batch.scheduler import (
    ASK_AGAIN_MS,
    HOLD_MS,
    RENEW_MS,
    Job,
    JobState,
    Scheduler,
)
from spark_batch.storage_client import find_partitions
from tests.support.cli_process import Cli
from tests.support.storage_client import RunningStorage
from tests.support.storage_fixtures import StartStorage
from tidemark.api.lifecycle.v1 import jobs_pb2
from tidemark.api.lifecycle.v1.jobs_pb2_grpc import (
    JobServiceStub,
    add_JobServiceServicer_to_server,
)
from tidemark.api.storage.v1.retention_pb2 import HoldScheduleRequest
from tidemark.clock import ManualClock
from tidemark.errors import InvalidArgument, JobRunning, Unavailable
from tidemark.rpc import RpcServer, open_channel

INTERVAL_MS = 60_000


class Around:
    """Storage as it is, without Spark: passes of these tests need none."""

    def __init__(self, storage: RunningStorage, holder: str) -> None:
        self._storage = storage
        self._holder = holder
        self._answered = asyncio.Event()

    async def check(self) -> None:
        await asyncio.to_thread(find_partitions, self._storage.address)

    async def hold(self, hold_ms: int) -> tuple[bool, str]:
        request = HoldScheduleRequest(holder=self._holder, hold_ms=hold_ms)
        answer = await self._storage.retention.HoldSchedule(request)
        self._answered.set()
        return answer.held, answer.holder

    async def renewed(self, clock: ManualClock) -> None:
        """Move time to the next renewal of the lease, and wait until storage has it."""
        self._answered.clear()
        await clock.advance_ms(RENEW_MS)
        await self._answered.wait()


@dataclass
class Passes:
    """Passes that began, and a gate that holds them up."""

    began: list[str] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None
    failed: dict[int, str] = field(default_factory=dict)

    def run(self, name: str) -> Callable[[bool, Report], Any]:
        async def run(dry_run: bool, report: Report) -> Stored:
            report(Progress(Phase.RUNNING, tasks=4, tasks_done=1))
            self.began.append(f"{name} dry" if dry_run else name)
            await self.gate.wait()
            if self.error is not None:
                raise self.error
            return Stored(f"{name}-{len(self.began)}", {"expired": 3}, failed=self.failed)

        return run


def make(storage: RunningStorage, clock: ManualClock, passes: Passes, holder: str) -> Scheduler:
    return around(Around(storage, holder), clock, passes)


def around(host: Around, clock: ManualClock, passes: Passes) -> Scheduler:
    jobs = [Job(name, INTERVAL_MS, f"{name} started", passes.run(name)) for name in JobName]
    return Scheduler(jobs, host, clock)


@asynccontextmanager
async def running(scheduler: Scheduler) -> AsyncIterator[None]:
    task = asyncio.create_task(scheduler.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def all_are(scheduler: Scheduler, state: JobState) -> Callable[[], bool]:
    return lambda: all(job.state is state for job in scheduler.jobs.values())


@pytest.fixture
async def passes() -> Passes:
    return Passes()


async def test_jobs_start_in_their_order_and_repeat_from_the_end_of_the_last_pass(
    storage: RunningStorage, clock: ManualClock, passes: Passes
) -> None:
    """R11, R7: a job that takes long does not overlap itself."""
    scheduler = make(storage, clock, passes, "a")
    async with running(scheduler):
        await scheduler.until(all_are(scheduler, JobState.RUNNING))
        await clock.advance_ms(2 * INTERVAL_MS)
        first = list(passes.began)
        passes.gate.set()
        await scheduler.until(all_are(scheduler, JobState.WAITING))
        await clock.advance_ms(INTERVAL_MS - 1)
        before = list(passes.began)
        await clock.advance_ms(1)
        await scheduler.until(lambda: len(passes.began) == 6)

    assert first == before == ["metrics", "retention", "eviction"]
    assert sorted(passes.began[3:]) == ["eviction", "metrics", "retention"]
    job = scheduler.jobs[JobName.RETENTION]
    assert job.last_counts == {"expired": 3}


async def test_nothing_runs_until_storage_is_reachable_and_the_status_says_why(
    start_storage: StartStorage, clock: ManualClock, passes: Passes
) -> None:
    """R11."""
    storage = await start_storage(partitions=1)
    await storage.stop()
    scheduler = make(storage, clock, passes, "a")
    async with running(scheduler):
        await scheduler.until(lambda: bool(scheduler.jobs[JobName.METRICS].last_error))
        why = scheduler.jobs[JobName.RETENTION].last_error
        with pytest.raises(Unavailable, match="blocked"):
            await scheduler.run_now(JobName.RETENTION, dry_run=False)
        blocked = list(passes.began)

        await storage.start()
        await clock.advance_ms(ASK_AGAIN_MS)
        await scheduler.until(all_are(scheduler, JobState.RUNNING))

    assert why.startswith("storage: ")
    assert blocked == []
    assert scheduler.jobs[JobName.RETENTION].last_error == ""


async def test_a_second_scheduler_stands_by_and_takes_over_when_the_first_ends(
    storage: RunningStorage, clock: ManualClock, passes: Passes
) -> None:
    """R11: at once after an orderly end, after the hold has run out otherwise."""
    first, second = (make(storage, clock, passes, name) for name in "ab")
    passes.gate.set()
    async with AsyncExitStack() as schedulers:
        ends = await schedulers.enter_async_context(AsyncExitStack())
        await ends.enter_async_context(running(first))
        await first.until(all_are(first, JobState.WAITING))
        await schedulers.enter_async_context(running(second))
        await second.until(all_are(second, JobState.STANDING_BY))
        why = second.jobs[JobName.EVICTION].last_error
        asleep = clock.sleepers
        for _ in range(HOLD_MS // RENEW_MS + 1):
            await clock.advance_ms(RENEW_MS)
            await clock.until_sleepers(asleep)  # the hold is renewed
        still = all_are(second, JobState.STANDING_BY)()
        await ends.aclose()
        await clock.advance_ms(ASK_AGAIN_MS)
        await second.until(all_are(second, JobState.WAITING))

    assert why == "scheduler a runs the jobs"
    assert still


async def test_a_pass_that_fails_is_told_of_and_the_next_one_runs_anyway(
    storage: RunningStorage, clock: ManualClock, passes: Passes
) -> None:
    """R9, R11."""
    scheduler = make(storage, clock, passes, "a")
    passes.gate.set()
    passes.error = Unavailable("storage went away")
    async with running(scheduler):
        job = scheduler.jobs[JobName.EVICTION]
        await scheduler.until(lambda: job.last_error != "" and not job.busy)
        told = job.last_error
        passes.error = None
        await clock.advance_ms(INTERVAL_MS)
        await scheduler.until(lambda: bool(job.last_pass_id))

    assert told == "storage went away"
    assert job.last_error == ""


async def test_a_scheduler_whose_spark_does_not_start_leaves_the_jobs_to_a_standby(
    storage: RunningStorage, clock: ManualClock, passes: Passes
) -> None:
    """P4, R11: the status shows the fault, and the scheduler tries again after its backoff."""
    healthy = Passes()
    healthy.gate.set()
    passes.gate.set()
    passes.error = SparkNotStarted("no Java", retry_after_ms=BACKOFF_MS)
    standby = Around(storage, "b")
    first, second = make(storage, clock, passes, "a"), around(standby, clock, healthy)
    async with running(first):
        await first.until(lambda: first.jobs[JobName.RETENTION].last_error == "no Java")
        await clock.advance_ms(RENEW_MS)
        await first.until(all_are(first, JobState.BLOCKED))
        with pytest.raises(Unavailable, match="no Java"):
            await first.run_now(JobName.RETENTION, dry_run=False)
        async with running(second):
            await second.until(lambda: bool(healthy.began))
            for _ in range(BACKOFF_MS // RENEW_MS - 1):
                await standby.renewed(clock)  # or its lease would run out on the way
            await clock.advance_ms(RENEW_MS - 1)
            waiting = all_are(first, JobState.BLOCKED)()
            await clock.advance_ms(1)
            await first.until(all_are(first, JobState.STANDING_BY))

    assert waiting
    assert healthy.began[:3] == ["metrics", "retention", "eviction"]


async def test_the_progress_of_a_pass_and_its_failed_partitions_are_in_the_status(
    storage: RunningStorage, clock: ManualClock, passes: Passes
) -> None:
    """R11: of passes and of dry runs."""
    scheduler = make(storage, clock, passes, "a")
    service = JobService(scheduler, clock)

    async def retention() -> jobs_pb2.JobStatus:
        listed = await service.ListJobs(jobs_pb2.ListJobsRequest(), cast("Any", None))
        return listed.jobs[1]

    passes.failed = {3: "UNAVAILABLE: gone"}
    async with running(scheduler):
        await scheduler.until(all_are(scheduler, JobState.RUNNING))
        await clock.advance_ms(2_000)
        during = (await retention()).progress
        passes.gate.set()
        await scheduler.until(all_are(scheduler, JobState.WAITING))
        after = await retention()
        passes.gate.clear()
        dry = asyncio.ensure_future(scheduler.run_now(JobName.RETENTION, dry_run=True))
        await clock.sleep_ms(0)
        during_dry = (await retention()).progress
        passes.gate.set()
        await dry
        after_dry = await retention()

    assert (during.phase, during.tasks, during.tasks_done) == (jobs_pb2.PASS_PHASE_RUNNING, 4, 1)
    assert during.running_for_ms == 2_000
    assert not after.HasField("progress")
    assert dict(after.failed_partitions) == {3: "UNAVAILABLE: gone"}
    assert after.last_error == "partition 3: UNAVAILABLE: gone"
    assert during_dry.phase == jobs_pb2.PASS_PHASE_RUNNING
    assert not after_dry.HasField("progress")


async def test_the_command_shows_the_progress_of_a_pass_and_its_failed_partitions(
    storage: RunningStorage, clock: ManualClock, passes: Passes
) -> None:
    """R11: as plain lines where there is no terminal; it exits with 1 if partitions failed."""
    scheduler = make(storage, clock, passes, "a")
    server = RpcServer("127.0.0.1:0", clock=clock, unary_deadline_ms=None)
    server.add(add_JobServiceServicer_to_server, JobService(scheduler, clock))
    await server.start()
    cli = Cli({"TIDEMARK_JOBS_ADDRESS": server.address})
    passes.gate.set()
    async with running(scheduler):
        await scheduler.until(all_are(scheduler, JobState.WAITING))
        passes.gate.clear()
        passes.failed = {3: "UNAVAILABLE: gone"}
        shown = await asyncio.create_subprocess_exec(
            *cli.command("retention", "run", "--job", "eviction"), stderr=PIPE, stdout=PIPE
        )
        assert shown.stderr is not None
        async with asyncio.timeout(60):
            line = await shown.stderr.readline()
        status = await asyncio.to_thread(cli.ok, "retention", "status")
        passes.gate.set()
        async with asyncio.timeout(60):
            _, rest = await shown.communicate()
    await server.stop(0)

    assert line.decode().startswith("eviction: 1 of 4 tasks done, after ")
    assert "RUNNING (1 of 4 tasks done)" in status.out
    assert "Partition 3 failed: UNAVAILABLE: gone" in rest.decode()
    assert shown.returncode == 1


async def test_status_and_passes_on_demand_are_answered_over_grpc(
    storage: RunningStorage, clock: ManualClock, passes: Passes
) -> None:
    """R11, S1."""
    scheduler = make(storage, clock, passes, "a")
    server = RpcServer("127.0.0.1:0", clock=clock)
    server.add(add_JobServiceServicer_to_server, JobService(scheduler, clock))
    await server.start()
    async with running(scheduler), open_channel(server.address) as channel:
        stub: Any = JobServiceStub(channel)
        await scheduler.until(all_are(scheduler, JobState.RUNNING))
        request = jobs_pb2.RunJobRequest(name=jobs_pb2.JOB_NAME_RETENTION)
        with pytest.raises(JobRunning):
            await stub.RunJob(request)
        with pytest.raises(InvalidArgument):
            await stub.RunJob(jobs_pb2.RunJobRequest())
        passes.gate.set()
        await scheduler.until(all_are(scheduler, JobState.WAITING))
        await clock.advance_ms(1_000)

        listed = list((await stub.ListJobs(jobs_pb2.ListJobsRequest())).jobs)
        dry = await stub.RunJob(
            jobs_pb2.RunJobRequest(name=jobs_pb2.JOB_NAME_EVICTION, dry_run=True)
        )
    await server.stop(0)

    assert [job.name for job in listed] == [
        jobs_pb2.JOB_NAME_METRICS,
        jobs_pb2.JOB_NAME_RETENTION,
        jobs_pb2.JOB_NAME_EVICTION,
    ]
    assert {job.state for job in listed} == {jobs_pb2.JOB_STATE_WAITING}
    assert dict(listed[1].last_counts) == {"expired": 3}
    assert listed[1].next_in_ms == INTERVAL_MS - 1_000
    assert listed[1].last_pass_time.ToMilliseconds() == clock.wall_ms() - 1_000
    assert passes.began[-1] == "eviction dry"
    assert dry.pass_id
