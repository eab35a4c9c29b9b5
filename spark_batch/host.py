"""The host of the jobs: storage as the scheduler sees it, and the passes that run.

A pass first asks storage whether anything is due. Usually nothing is, and the pass ends without
Spark; otherwise the planner runs it.
"""

from functools import partial
from typing import Any, Final

from spark_batch.passes.outcome import JobName, Pass, Phase, Progress, Report
from spark_batch.passes.without_work import pass_without_work
from spark_batch.planner.process import PlannerProcess
from spark_batch.storage_client import find_partitions
from spark_batch.threads import in_thread
from tidemark.api.storage.v1.retention_pb2 import HoldScheduleRequest
from tidemark.clock import Clock
from tidemark.settings import RetentionSettings

_HOLD_TIMEOUT_S: Final = 5.0
"""Bounded, so that the scheduler can stop while storage does not answer."""


class JobHost:
    """Storage and the planner, as the scheduler uses them."""

    def __init__(
        self,
        settings: RetentionSettings,
        retention: Any,
        holder: str,
        planner: PlannerProcess,
        clock: Clock,
    ) -> None:
        """`retention` is a stub of RetentionService of storage."""
        self._settings = settings
        self._retention = retention
        self._holder = holder
        self._planner = planner
        self._clock = clock

    async def check(self) -> None:
        await in_thread(partial(find_partitions, ",".join(self._settings.storage_addresses)))

    async def hold(self, hold_ms: int) -> tuple[bool, str]:
        request = HoldScheduleRequest(holder=self._holder, hold_ms=hold_ms)
        answer = await self._retention.HoldSchedule(request, timeout=_HOLD_TIMEOUT_S)
        return answer.held, answer.holder

    async def run(self, job: JobName, dry_run: bool, report: Report) -> Pass:
        """Run a pass of retention or eviction, and report its progress."""
        report(Progress(Phase.ASKING))
        ask = partial(pass_without_work, self._settings, job, dry_run, self._clock)
        done = await in_thread(ask)
        return done or await self._planner.run(job, dry_run, report)
