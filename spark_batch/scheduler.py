"""The scheduler: runs metrics, retention and eviction, each on its interval (R11).

No job runs until storage is reachable, its format is supported, and no other scheduler holds the
lease; until then the scheduler logs why and retries. The next pass of a job is timed from the end
of the last, so a job never overlaps itself.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

from spark_batch.passes.findings import Finding, describe_failures
from spark_batch.passes.outcome import JobName, Progress, Report
from spark_batch.planner.process import SparkNotStarted
from tidemark.clock import Clock
from tidemark.errors import JobRunning, TidemarkError, Unavailable
from tidemark.telemetry import counter, seconds

ASK_AGAIN_MS: Final = 5_000
HOLD_MS: Final = 30_000
RENEW_MS: Final = 10_000

_log = logging.getLogger(__name__)


class JobState(StrEnum):
    """The state of a job."""

    BLOCKED = "blocked"
    STANDING_BY = "standing_by"
    WAITING = "waiting"
    RUNNING = "running"


class Outcome(Protocol):
    """The outcome of a pass, as the scheduler sees it."""

    @property
    def pass_id(self) -> str: ...
    @property
    def findings(self) -> tuple[Finding, ...]: ...
    @property
    def counts(self) -> Mapping[str, int]: ...
    @property
    def failed(self) -> Mapping[int, str]: ...


Run = Callable[[bool, Report], Awaitable[Outcome]]
"""Runs a pass and reports its progress; with True, a dry run that changes nothing."""


_passes = counter(
    "tidemark.retention.passes",
    "Passes by job and outcome",
    zeros=[
        {"job_name": job.value, "outcome": outcome}
        for job in JobName
        for outcome in ("done", "failed")
    ],
)
_durations = seconds("tidemark.retention.pass.duration", "Duration of passes by job")


@dataclass(slots=True)
class Job:
    """One job and its state."""

    name: JobName
    interval_ms: int
    started_line: str
    run: Run
    state: JobState = JobState.BLOCKED
    last_pass_ms: int = 0
    last_duration_ms: int = 0
    last_counts: Mapping[str, int] = field(default_factory=dict)
    last_error: str = ""
    last_pass_id: str = ""
    last_failed: Mapping[int, str] = field(default_factory=dict)
    """Partitions that the last pass could not read or clean, each with its error."""
    next_at_ms: int = 0
    busy: bool = False
    progress: Progress | None = None
    began_ms: int = 0


class SchedulerHost(Protocol):
    """The environment that the scheduler needs before a job can run."""

    async def check(self) -> None:
        """Raises a TidemarkError while storage is unreachable or has an unsupported format."""
        ...

    async def hold(self, hold_ms: int) -> tuple[bool, str]:
        """Take or renew the scheduler lease; returns whether it is held, and by which scheduler."""
        ...


class Scheduler:
    """Runs the jobs of one process; `jobs` has their state."""

    def __init__(self, jobs: list[Job], host: SchedulerHost, clock: Clock) -> None:
        self.jobs = {job.name: job for job in jobs}
        self._host = host
        self._clock = clock
        self._changed = asyncio.Event()
        self._not_started: SparkNotStarted | None = None

    async def run(self) -> None:
        """Run jobs until cancelled, then give up the lease."""
        try:
            while True:
                if await self._may_run():
                    await self._run_jobs()
                    await self._give_way()
                else:
                    await self._clock.sleep_ms(ASK_AGAIN_MS)
        finally:
            with suppress(TidemarkError):
                await self._host.hold(0)

    async def run_now(self, name: JobName, dry_run: bool) -> Outcome:
        """Run one pass now. Raises JobRunning, or the error of the pass."""
        job = self.jobs[name]
        if job.state is JobState.BLOCKED:
            raise Unavailable(f"the {name} job is blocked: {job.last_error or 'starting'}")
        if job.busy:
            raise JobRunning(f"a {name} pass is running", job=name.value)
        if dry_run:
            return await self._dry_run(job)
        # The pass continues if the caller goes away.
        return await asyncio.shield(asyncio.ensure_future(self._pass(job)))

    async def _dry_run(self, job: Job) -> Outcome:
        """Run a dry run; its progress is shown unless a pass runs beside it."""
        began_ms = self._clock.monotonic_ms()

        def report(progress: Progress) -> None:
            if not job.busy:
                job.progress, job.began_ms = progress, began_ms

        try:
            return await job.run(True, report)
        finally:
            if not job.busy:
                job.progress = None

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once the condition holds; it is checked whenever a job changes."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    # --- whether jobs may run ------------------------------------------------------------------

    async def _may_run(self) -> bool:
        try:
            await self._host.check()
            held, holder = await self._host.hold(HOLD_MS)
            if not held:
                self._set_all(JobState.STANDING_BY, f"scheduler {holder} runs the jobs")
                return False
        except TidemarkError as error:
            why = f"storage: {error.detail}"
        else:
            return True
        if any(job.last_error != why for job in self.jobs.values()):
            _log.warning("the jobs are blocked: %s", why)
        self._set_all(JobState.BLOCKED, why)
        return False

    def _set_all(self, state: JobState, why: str = "") -> None:
        for job in self.jobs.values():
            if job.state is not state:
                _log.info("%s job: %s", job.name, state, extra={"why": why})
            job.state = state
            job.last_error = why
        self._notify()

    # --- running jobs --------------------------------------------------------------------------

    async def _run_jobs(self) -> None:
        """Run every job on its interval until the lease is lost."""
        tasks = []
        for job in self.jobs.values():
            _log.info(job.started_line)
            job.state, job.last_error = JobState.WAITING, ""
            tasks.append(asyncio.create_task(self._repeat(job)))
        try:
            await self._keep_lease()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_lease(self) -> None:
        """Return once the lease is lost, or Spark does not start."""
        while self._not_started is None:
            await self._clock.sleep_ms(RENEW_MS)
            try:
                held, holder = await self._host.hold(HOLD_MS)
            except TidemarkError as error:
                _log.warning("the scheduler lease was not renewed", extra={"why": error.detail})
                return
            if not held:
                _log.warning("scheduler %s has taken over", holder)
                return

    async def _give_way(self) -> None:
        """Leave the jobs to a standby, which may be able to start Spark, and try again later."""
        error, self._not_started = self._not_started, None
        if error is None:
            return
        with suppress(TidemarkError):
            await self._host.hold(0)
        self._set_all(JobState.BLOCKED, error.detail)
        await self._clock.sleep_ms(error.retry_after_ms or ASK_AGAIN_MS)

    async def _repeat(self, job: Job) -> None:
        while True:
            with suppress(Exception):  # in the status and in the log
                await asyncio.shield(asyncio.ensure_future(self._pass(job)))
            await self._clock.sleep_ms(job.interval_ms)

    async def _pass(self, job: Job) -> Outcome:
        if job.busy:
            raise JobRunning(f"a {job.name} pass is running", job=job.name.value)
        before, job.state, job.busy = job.state, JobState.RUNNING, True
        job.last_pass_ms = self._clock.wall_ms()
        began_ms = job.began_ms = self._clock.monotonic_ms()
        self._notify()
        outcome = "failed"

        def report(progress: Progress) -> None:
            job.progress = progress
            self._notify()

        try:
            done = await job.run(False, report)
            # Failures of single partitions are reported, and the others are cleaned.
            job.last_error = describe_failures(done.failed)
            job.last_pass_id, job.last_counts = done.pass_id, done.counts
            job.last_failed = done.failed
            outcome = "failed" if done.failed else "done"
            return done
        except Exception as error:
            job.last_error = error.detail if isinstance(error, TidemarkError) else str(error)
            if isinstance(error, SparkNotStarted):
                self._not_started = error
            _log.exception("a %s pass failed; the next one does the rest", job.name)
            raise
        finally:
            now_ms = self._clock.monotonic_ms()
            job.last_duration_ms = now_ms - began_ms
            _passes.add(1, {"job_name": job.name.value, "outcome": outcome})
            _durations.record(job.last_duration_ms / 1000, {"job_name": job.name.value})
            job.next_at_ms = now_ms + job.interval_ms
            if job.state is JobState.RUNNING:
                job.state = before
            job.busy, job.progress = False, None
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
