"""The host of the jobs: storage as the scheduler sees it, and the passes that run.

A pass first asks storage whether anything is due. Usually nothing is, and the pass ends without
Spark; otherwise the planner runs it.

The lease is in the memory of one storage node: of those that answer, the holder of the lowest
partition. Schedulers that do not see the same nodes may hold two leases for a while, which does no
harm; a node that is away does not end retention (C1).
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

from spark_batch.passes.outcome import JobName, Pass, Phase, Progress, Report
from spark_batch.passes.without_work import pass_without_work
from spark_batch.planner.process import PlannerProcess
from spark_batch.storage_client import find_nodes
from spark_batch.threads import in_thread
from tidemark.api.storage.v1.retention_pb2 import HoldScheduleRequest
from tidemark.api.storage.v1.retention_pb2_grpc import RetentionServiceStub
from tidemark.clock import Clock
from tidemark.errors import TidemarkError
from tidemark.rpc.channel_pool import ChannelPool
from tidemark.settings import RetentionSettings
from tidemark.system_metrics.aggregates import Aggregate
from tidemark.system_metrics.sampler import recorder

_HOLD_TIMEOUT_S: Final = 5.0
"""Bounded, so that the scheduler can stop while storage does not answer."""


class JobHost:
    """Storage and the planner, as the scheduler uses them."""

    def __init__(
        self,
        settings: RetentionSettings,
        channels: ChannelPool,
        holder: str,
        planner: PlannerProcess,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._channels = channels
        self._holder = holder
        self._planner = planner
        self._clock = clock

    async def check(self) -> None:
        await self._nodes()

    async def hold(self, hold_ms: int) -> tuple[bool, str]:
        request = HoldScheduleRequest(holder=self._holder, hold_ms=hold_ms)
        answer = await self._ask_a_node(
            lambda stub: stub.HoldSchedule(request, timeout=_HOLD_TIMEOUT_S)
        )
        return answer.held, answer.holder

    async def record(self, aggregates: Sequence[Aggregate]) -> None:
        """Store figures of this process."""
        await self._ask_a_node(lambda stub: recorder(stub, self._holder)(aggregates))

    async def _nodes(self) -> list[str]:
        return await in_thread(partial(find_nodes, self._settings.storage_addresses))

    async def _ask_a_node(self, call: Callable[[Any], Awaitable[Any]]) -> Any:
        """The answer of the first node that answers; the error of the first if none does."""
        failure: TidemarkError | None = None
        for address in await self._nodes():
            stub: Any = RetentionServiceStub(await self._channels.to(address))
            try:
                return await call(stub)
            except TidemarkError as error:
                failure = failure or error
        assert failure is not None, "at least one node is asked"
        raise failure

    async def run(self, job: JobName, dry_run: bool, report: Report) -> Pass:
        """Run a pass of retention or eviction, and report its progress."""
        report(Progress(Phase.ASKING))
        ask = partial(pass_without_work, self._settings, job, dry_run, self._clock)
        done = await in_thread(ask)
        return done or await self._planner.run(job, dry_run, report)
