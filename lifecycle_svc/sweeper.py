"""The sweeper of one partition: takes the sweep lease, reads due work, plans and delegates it.

A sweeper uses no other partition, so a slow or broken partition delays no other (L1). Every failure
is reported, shown in the status and retried; it never ends the sweeper.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from lifecycle_svc.due_reader import (
    FROM_THE_START,
    DuePage,
    PageTokens,
    read_due,
    tokens_after,
)
from lifecycle_svc.holders import Holders
from lifecycle_svc.outbox_relay import OutboxRelay
from lifecycle_svc.planner import BROKER_DRIVEN, FactKind, plan
from lifecycle_svc.timetable import Timetable
from tidemark.api.storage.v1.action_pb2 import (
    ACTION_OUTCOME_DONE,
    ACTION_OUTCOME_REFUSED,
    ACTION_OUTCOME_STALE,
    Action,
    ActionOutcome,
)
from tidemark.api.storage.v1.storage_pb2 import (
    LeaseSweepRequest,
    LeaseSweepResponse,
    ReportSweepRequest,
    ScanPartitionRequest,
    ScanPartitionResponse,
)
from tidemark.api.storage.v1.storage_pb2_grpc import StorageServiceStub
from tidemark.clock import Clock
from tidemark.errors import ClientError, TidemarkError, Unavailable
from tidemark.rpc.channel_pool import ChannelPool
from tidemark.rpc.statuses import from_status
from tidemark.settings import LifecycleSettings
from tidemark.telemetry import LateSpan, counter, leave_trace, seconds, tracer

LEFTOVER_RETRY_MS = 1_000
"""Delay before retrying due work that could not be done, such as messages still reserved."""

T = TypeVar("T")

_log = logging.getLogger(__name__)
_tracer = tracer(__name__)
_duration = seconds("tidemark.lifecycle.sweep.duration", "From the first read to the last action")
_lateness = seconds("tidemark.lifecycle.sweep.lateness", "From due time to start")
_faults = counter(
    "tidemark.lifecycle.sweep.faults",
    "Failed sweeps by phase",
    zeros=[{"phase": phase} for phase in ("lease", "read", "act")],
)
_actions = counter("tidemark.lifecycle.actions", "Delegated actions by kind and outcome", zeros=())


class SweeperState(Enum):
    """The state of a sweeper. Closed: the values are part of the wire format."""

    WAITING = "WAITING"
    READING = "READING"
    ACTING = "ACTING"
    BACKING_OFF = "BACKING_OFF"
    STANDING_BY = "STANDING_BY"


@dataclass(slots=True)
class Sweep:
    """The result of one complete sweep."""

    begin_ms: int
    duration_ms: int = 0
    found: int = 0
    done: int = 0
    stale: int = 0
    refused: int = 0
    refusal: str = ""
    """Why the first of those was refused."""


@dataclass(frozen=True, slots=True)
class Replica:
    """The identity of this lifecycle process towards storage."""

    sweeper_id: str
    address: str


class Sweeper:
    """Sweeps one partition: `run` until cancelled, `run_once` for one turn."""

    def __init__(
        self,
        partition: int,
        replica: Replica,
        storage_address: str,
        channels: ChannelPool,
        holders: Holders,
        settings: LifecycleSettings,
        clock: Clock,
    ) -> None:
        self.partition = partition
        self.state = SweeperState.WAITING
        self.last: Sweep | None = None
        self.last_error = ""
        self.attempted = asyncio.Event()
        """Set after the first sweep, successful or not, once another replica has the lease, or once
        another sweeper has replaced this one."""
        self._replica = replica
        self._storage_address = storage_address
        self._channels = channels
        self._holders = holders
        self._settings = settings
        self._clock = clock
        self._outbox_relay = OutboxRelay(partition, self._scan_outbox, holders, clock)
        self._timetable = Timetable(
            clock.monotonic_ms(),
            interval_ms_min=settings.sweep_interval_ms_min,
            interval_ms_max=settings.sweep_interval_ms_max,
        )
        self._leased_until_ms = 0
        self._renew_ms = 0
        self._reported = False
        self._leftovers_at_ms = 0
        self._woken = asyncio.Event()

    @property
    def error(self) -> str:
        """The last error of a sweep or, after a successful one, of the outbox relay."""
        return self.last_error or self._outbox_relay.last_error

    @property
    def failures(self) -> int:
        return self._timetable.failures

    @property
    def next_in_ms(self) -> int:
        return max(0, self._timetable.next_ms - self._clock.monotonic_ms())

    def opened(self) -> None:
        """The partition was opened: it serves once phase one has read it (L4)."""
        self._reported = False
        self._timetable.opened(self._clock.monotonic_ms())
        self._renew_ms = 0  # the storage process that opened it has no lease of ours
        self._outbox_relay.stop()  # and the sweep that follows ends the pauses of its tasks
        self._woken.set()

    def wake(self, in_ms: int) -> None:
        """Work became due earlier than this sweeper may expect."""
        self._timetable.due(self._clock.monotonic_ms() + in_ms)
        self._woken.set()

    # --- turns ---------------------------------------------------------------------------------

    async def run(self) -> None:
        leave_trace()  # of the announcement: every sweep is its own trace
        try:
            while True:
                wait_ms = await self.run_once()
                with suppress(TimeoutError):
                    await self._clock.wait_for(self._woken.wait(), wait_ms)
        finally:
            self._outbox_relay.stop()

    async def run_once(self) -> int:
        """Renew the lease and sweep, if either is due; returns the wait until the next turn."""
        self._woken.clear()
        pause_ms = self._timetable.not_before_ms - self._clock.monotonic_ms()
        if pause_ms > 0:
            return pause_ms
        try:
            if not await self._hold_lease():
                self._outbox_relay.stop()
                self.state = SweeperState.STANDING_BY
                self.attempted.set()
                return max(1, self._renew_ms - self._clock.monotonic_ms())
            if self._clock.monotonic_ms() >= self._timetable.next_ms:
                await self._sweep()
            elif self.state is SweeperState.STANDING_BY:
                self.state = SweeperState.WAITING
        except Exception as error:  # nothing may end a sweeper
            self._failed("lease", error)
            return self.next_in_ms
        now_ms = self._clock.monotonic_ms()
        return max(0, min(self._timetable.next_ms, self._renew_ms) - now_ms)

    async def stop(self) -> None:
        """Give up the lease, so that another replica need not wait for it to expire."""
        self._leased_until_ms = 0
        await asyncio.gather(*self._outbox_relay.stop(), return_exceptions=True)
        with suppress(TidemarkError):
            await self._lease(0)

    async def _sweep(self) -> None:
        late_ms = self._timetable.begins(self._clock.monotonic_ms())
        _lateness.record(late_ms / 1000)
        sweep = Sweep(self._clock.wall_ms())
        begin_ns = self._clock.monotonic_ns()
        phase = "read"
        with LateSpan(_tracer, "sweep", {"tidemark.partition": self.partition}) as traced:
            try:
                page = await self._read(self._first_tokens())
                if not self._reported:
                    await self._report(succeeded=True)
                while True:
                    phase = "act"
                    await self._act(page, sweep, traced)
                    tokens = tokens_after(page)
                    if not tokens or not await self._hold_lease():
                        break
                    phase = "read"
                    page = await self._read(tokens)
            except Exception as error:
                traced.failed(error)
                # A mistake in this request is no fault of the partition.
                if phase == "read" and not isinstance(error, ClientError):
                    await self._report_failure(error)
                self._failed(phase, error)
                return
            finally:
                self.attempted.set()
            traced.set_attribute("tidemark.sweep.found", sweep.found)
            traced.set_attribute("tidemark.sweep.done", sweep.done)
        took_ns = self._clock.monotonic_ns() - begin_ns
        _duration.record(took_ns / 1e9)
        sweep.duration_ms = took_ns // 1_000_000
        self.last, self.last_error, self.state = sweep, sweep.refusal, SweeperState.WAITING
        self._timetable.ended()
        if page.next_tokens:  # more than one page of urgent work
            self._timetable.due(self._clock.monotonic_ms())

    # --- phase one -----------------------------------------------------------------------------

    def _first_tokens(self) -> PageTokens:
        """All kinds, except that messages reserved past their time to live are retried rarely."""
        if self._clock.monotonic_ms() >= self._leftovers_at_ms:
            return FROM_THE_START
        self._timetable.due(self._leftovers_at_ms)
        return {k: token for k, token in FROM_THE_START.items() if k != FactKind.DEAD_DEADLINES}

    async def _read(self, tokens: PageTokens) -> DuePage:
        self.state = SweeperState.READING
        page = await self._answer(read_due(await self._storage(), self.partition, tokens))
        self._holders.set_broker(self.partition, page.broker_address)
        self._outbox_relay.wake(page.outbox_partitions)
        now_ms = self._clock.monotonic_ms()
        for kind, in_ms in page.next_due_in_ms.items():
            if not (page.broker_address and kind in BROKER_DRIVEN):
                self._timetable.due(now_ms + in_ms)
        return page

    async def _report(self, *, succeeded: bool, detail: str = "") -> None:
        """Report phase one; only the report of the holder of the lease counts (L11)."""
        if not await self._hold_lease():  # the read may have taken longer than the lease
            return
        report = ReportSweepRequest(
            partition=self.partition,
            succeeded=succeeded,
            detail=detail,
            sweeper_id=self._replica.sweeper_id,
        )
        response = await self._answer((await self._storage()).ReportSweep(report))
        if response.counted:
            self._reported = succeeded
        else:  # storage was restarted, and its lease is no longer ours
            self._leased_until_ms = self._renew_ms = 0

    async def _report_failure(self, error: Exception) -> None:
        self._reported = False
        with suppress(TidemarkError):  # for the same reason as the read, perhaps
            await self._report(succeeded=False, detail=_describe(error))

    # --- phase two -----------------------------------------------------------------------------

    async def _act(self, page: DuePage, sweep: Sweep, traced: LateSpan) -> None:
        self.state = SweeperState.ACTING
        actions = plan(page.facts, page.now_ms, has_broker=bool(page.broker_address))
        if not actions:
            return
        traced.begin()
        sweep.found += len(actions)
        results = await self._holders.delegate(self.partition, actions)
        outcomes = Counter(each.outcome for each in results)
        sweep.done += outcomes[ACTION_OUTCOME_DONE]
        sweep.stale += outcomes[ACTION_OUTCOME_STALE]
        sweep.refused += outcomes[ACTION_OUTCOME_REFUSED]
        for result in results:
            if result.outcome == ACTION_OUTCOME_REFUSED and not sweep.refusal:
                sweep.refusal = _describe(from_status(result.error))
        self._count(actions, [each.outcome for each in results])
        if outcomes[ACTION_OUTCOME_STALE] or outcomes[ACTION_OUTCOME_REFUSED]:
            self._leftovers_at_ms = self._clock.monotonic_ms() + LEFTOVER_RETRY_MS
            self._timetable.due(self._leftovers_at_ms)

    def _count(
        self, actions: Sequence[Action], outcomes: Sequence[ActionOutcome.ValueType]
    ) -> None:
        kinds = [str(each.WhichOneof("kind")) for each in actions]
        for (kind, outcome), count in Counter(zip(kinds, outcomes, strict=True)).items():
            name = ActionOutcome.Name(outcome).removeprefix("ACTION_OUTCOME_")
            _actions.add(count, {"kind": kind, "outcome": name})

    # --- the lease -----------------------------------------------------------------------------

    async def _hold_lease(self) -> bool:
        """Whether this replica holds the lease; renews it after a third of its duration."""
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._renew_ms and now_ms < self._leased_until_ms:
            return True
        lease_ms = self._settings.sweep_lease_ms
        answer = await self._lease(lease_ms)
        if answer.granted and (answer.awaits_report or now_ms >= self._leased_until_ms):
            # Storage was restarted, perhaps without announcing it here, or another replica held the
            # lease: its wake-ups and reports are not known.
            self._reported = False
            self._timetable.due(now_ms)
        self._leased_until_ms = now_ms + lease_ms if answer.granted else 0
        self._renew_ms = now_ms + lease_ms // 3
        return answer.granted

    async def _lease(self, lease_ms: int) -> LeaseSweepResponse:
        request = LeaseSweepRequest(
            partition=self.partition,
            sweeper_id=self._replica.sweeper_id,
            address=self._replica.address,
            lease_ms=lease_ms,
        )
        return await self._answer((await self._storage()).LeaseSweep(request))

    # --- faults --------------------------------------------------------------------------------

    async def _storage(self) -> StorageServiceStub:
        """Taken from the pool for every call, because the pool closes unused channels."""
        return StorageServiceStub(await self._channels.to(self._storage_address))

    async def _scan_outbox(self, request: ScanPartitionRequest) -> ScanPartitionResponse:
        return await self._answer((await self._storage()).ScanPartition(request))

    async def _answer(self, call: Awaitable[T]) -> T:
        try:
            return await self._clock.wait_for(call, self._settings.sweep_timeout_ms)
        except TimeoutError:
            raise Unavailable(
                f"storage did not answer in {self._settings.sweep_timeout_ms} ms"
            ) from None

    def _failed(self, phase: str, error: Exception) -> None:
        self.state = SweeperState.BACKING_OFF
        self.last_error = _describe(error)
        self._timetable.failed(self._clock.monotonic_ms(), random.random())
        _faults.add(1, {"phase": phase})
        _log.warning(
            "a sweep failed",
            extra={
                "partition": self.partition,
                "phase": phase,
                "why": self.last_error,
                "failures": self.failures,
            },
            exc_info=None if isinstance(error, TidemarkError) else error,
        )


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__
