"""The sweeper of one partition: leases the right to sweep, reads, plans, has the plan carried out.

It knows no other partition, so that a slow or broken one delays nobody else (L1). Whatever fails is
reported, shown in the status and tried again; a sweeper never dies of it.
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

from lifecycle_svc import due_reader as phase_one
from lifecycle_svc.due_reader import FROM_THE_START, Reading, Tokens
from lifecycle_svc.holders import Owners
from lifecycle_svc.outbox_relay import Courier
from lifecycle_svc.planner import BROKER_DRIVEN, FactKind, Plan, plan
from lifecycle_svc.timetable import Timetable
from tidemark.api.storage.v1.action_pb2 import (
    ACTION_OUTCOME_DONE,
    ACTION_OUTCOME_REFUSED,
    ACTION_OUTCOME_STALE,
    Action,
    ActionOutcome,
)
from tidemark.api.storage.v1.storage_pb2 import LeaseSweepRequest, ReportSweepRequest
from tidemark.api.storage.v1.storage_pb2_grpc import StorageServiceStub
from tidemark.clock import Clock
from tidemark.errors import TidemarkError, Unavailable
from tidemark.rpc.channel_pool import ChannelPool
from tidemark.settings import LifecycleSettings
from tidemark.telemetry import counter, leave_trace, seconds, span, tracer

LEFT_OVER_MS = 1_000
"""When to look again at what was due but could not be dealt with, such as what is still held."""

T = TypeVar("T")

_log = logging.getLogger(__name__)
_tracer = tracer(__name__)
_duration = seconds("tidemark.lifecycle.sweep.duration", "From the first read to the last act")
_lateness = seconds("tidemark.lifecycle.sweep.lateness", "From when it was due to its begin")
_faults = counter(
    "tidemark.lifecycle.sweep.faults",
    "Sweeps that failed, by phase",
    zeros=[{"phase": phase} for phase in ("lease", "read", "act")],
)
_actions = counter(
    "tidemark.lifecycle.actions", "Actions that were asked for, by kind and outcome", zeros=()
)


class SweeperState(Enum):
    """What a sweeper does. Closed; the words are on the wire."""

    WAITING = "WAITING"
    READING = "READING"
    ACTING = "ACTING"
    BACKING_OFF = "BACKING_OFF"
    STANDING_BY = "STANDING_BY"


@dataclass(slots=True)
class Sweep:
    """What one complete sweep found and did."""

    begin_ms: int
    duration_ms: int = 0
    found: int = 0
    done: int = 0
    stale: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class Replica:
    """This lifecycle process, as storage knows it."""

    sweeper_id: str
    address: str


class Sweeper:
    """Sweeps one partition. `run` does so until cancelled; `run_once` is one turn of it."""

    def __init__(
        self,
        partition: int,
        replica: Replica,
        storage_address: str,
        channels: ChannelPool,
        owners: Owners,
        settings: LifecycleSettings,
        clock: Clock,
    ) -> None:
        self.partition = partition
        self.state = SweeperState.WAITING
        self.last: Sweep | None = None
        self.last_error = ""
        self.attempted = asyncio.Event()
        """Set after the first sweep, however it ended, or once another replica sweeps."""
        self._replica = replica
        self._storage_address = storage_address
        self._channels = channels
        self._owners = owners
        self._settings = settings
        self._clock = clock
        self._courier = Courier(partition, owners, clock)
        self._timetable = Timetable(
            clock.monotonic_ms(),
            interval_ms_min=settings.sweep_interval_ms_min,
            interval_ms_max=settings.sweep_interval_ms_max,
        )
        self._leased_until_ms = 0
        self._renew_ms = 0
        self._reported = False
        self._held_until_ms = 0
        self._woken = asyncio.Event()

    @property
    def failures(self) -> int:
        return self._timetable.failures

    @property
    def next_in_ms(self) -> int:
        return max(0, self._timetable.next_ms - self._clock.monotonic_ms())

    def opened(self) -> None:
        """The partition was opened: it serves once it has been read (L4)."""
        self._reported = False
        self._timetable.opened(self._clock.monotonic_ms())
        self._renew_ms = 0  # whoever opened it knows of no lease
        self._woken.set()

    def wake(self, in_ms: int) -> None:
        """Something is due earlier than this sweeper may expect."""
        self._timetable.due(self._clock.monotonic_ms() + in_ms)
        self._woken.set()

    # --- turns ---------------------------------------------------------------------------------

    async def run(self) -> None:
        leave_trace()  # that of the announcement: every sweep is a trace of its own
        while True:
            wait_ms = await self.run_once()
            with suppress(TimeoutError):
                await self._clock.wait_for(self._woken.wait(), wait_ms)

    async def run_once(self) -> int:
        """Renew the lease and sweep, if it is time for either; how long to wait for the next."""
        self._woken.clear()
        pause_ms = self._timetable.not_before_ms - self._clock.monotonic_ms()
        if pause_ms > 0:
            return pause_ms
        try:
            if not await self._hold_lease():
                self.state = SweeperState.STANDING_BY
                self.attempted.set()
                return max(1, self._renew_ms - self._clock.monotonic_ms())
            if self._clock.monotonic_ms() >= self._timetable.next_ms:
                await self._sweep()
            elif self.state is SweeperState.STANDING_BY:
                self.state = SweeperState.WAITING
        except Exception as error:  # a sweeper goes on whatever happens
            self._failed("lease", error)
            return self.next_in_ms
        now_ms = self._clock.monotonic_ms()
        return max(0, min(self._timetable.next_ms, self._renew_ms) - now_ms)

    async def stop(self) -> None:
        """Give the lease up, so that another replica need not wait for its end."""
        self._leased_until_ms = 0
        with suppress(TidemarkError):
            await self._lease(0)

    async def _sweep(self) -> None:
        late_ms = self._timetable.begins(self._clock.monotonic_ms())
        _lateness.record(late_ms / 1000)
        sweep = Sweep(self._clock.wall_ms())
        begin_ns = self._clock.monotonic_ns()
        phase = "read"
        with span(_tracer, "sweep", attributes={"tidemark.partition": self.partition}) as traced:
            try:
                reading = await self._read(self._first_tokens())
                if not self._reported:
                    await self._report(succeeded=True)
                    self._reported = True
                while True:
                    phase = "act"
                    await self._act(reading, sweep)
                    tokens = phase_one.after(reading)
                    if not tokens or not await self._hold_lease():
                        break
                    phase = "read"
                    reading = await self._read(tokens)
            except Exception as error:
                if phase == "read":
                    self._reported = False
                    await self._report(succeeded=False, detail=_describe(error))
                self._failed(phase, error)
                return
            finally:
                self.attempted.set()
            traced.set_attribute("tidemark.sweep.found", sweep.found)
            traced.set_attribute("tidemark.sweep.done", sweep.done)
        took_ns = self._clock.monotonic_ns() - begin_ns
        _duration.record(took_ns / 1e9)
        sweep.duration_ms = took_ns // 1_000_000
        self.last, self.last_error, self.state = sweep, "", SweeperState.WAITING
        self._timetable.ended()
        if reading.next_tokens:  # more than a page is urgent
            self._timetable.due(self._clock.monotonic_ms())

    # --- phase one -----------------------------------------------------------------------------

    def _first_tokens(self) -> Tokens:
        """Everything; but messages that are held past their time to live are looked at rarely."""
        if self._clock.monotonic_ms() >= self._held_until_ms:
            return FROM_THE_START
        self._timetable.due(self._held_until_ms)
        return {k: token for k, token in FROM_THE_START.items() if k != FactKind.DEAD_DEADLINES}

    async def _read(self, tokens: Tokens) -> Reading:
        self.state = SweeperState.READING
        reading = await self._answer(
            phase_one.read(await self._storage(), self.partition, tokens, self._courier.blocked())
        )
        self._owners.driven_by(self.partition, reading.owner_address)
        now_ms = self._clock.monotonic_ms()
        for kind, in_ms in reading.next_due_in_ms.items():
            if not (reading.owner_address and kind in BROKER_DRIVEN):
                self._timetable.due(now_ms + in_ms)
        return reading

    async def _report(self, *, succeeded: bool, detail: str = "") -> None:
        report = ReportSweepRequest(partition=self.partition, succeeded=succeeded, detail=detail)
        try:
            await self._answer((await self._storage()).ReportSweep(report))
        except TidemarkError:
            if succeeded:
                raise
            # What kept the partition from being read may keep it from being told, too.

    # --- phase two -----------------------------------------------------------------------------

    async def _act(self, reading: Reading, sweep: Sweep) -> None:
        self.state = SweeperState.ACTING
        planned = plan(reading.facts, reading.now_ms, driven=bool(reading.owner_address))
        sweep.found += len(planned.actions) + len(planned.transfers)
        await self._act_on(planned, sweep)
        if planned.transfers:
            carried = await self._courier.carry(planned.transfers)
            sweep.done += carried.cleared
            sweep.refused += carried.waiting
        retry_ms = self._courier.next_retry_ms()
        if retry_ms is not None:
            self._timetable.due(retry_ms)

    async def _act_on(self, planned: Plan[Action], sweep: Sweep) -> None:
        if not planned.actions:
            return
        results = await self._owners.act(self.partition, planned.actions)
        outcomes = Counter(each.outcome for each in results)
        sweep.done += outcomes[ACTION_OUTCOME_DONE]
        sweep.stale += outcomes[ACTION_OUTCOME_STALE]
        sweep.refused += outcomes[ACTION_OUTCOME_REFUSED]
        self._count(planned.actions, [each.outcome for each in results])
        if outcomes[ACTION_OUTCOME_STALE] or outcomes[ACTION_OUTCOME_REFUSED]:
            self._held_until_ms = self._clock.monotonic_ms() + LEFT_OVER_MS
            self._timetable.due(self._held_until_ms)

    def _count(
        self, actions: Sequence[Action], outcomes: Sequence[ActionOutcome.ValueType]
    ) -> None:
        kinds = [str(each.WhichOneof("kind")) for each in actions]
        for (kind, outcome), count in Counter(zip(kinds, outcomes, strict=True)).items():
            name = ActionOutcome.Name(outcome).removeprefix("ACTION_OUTCOME_")
            _actions.add(count, {"kind": kind, "outcome": name})

    # --- the lease -----------------------------------------------------------------------------

    async def _hold_lease(self) -> bool:
        """Whether this replica may sweep, asking again when a third of the lease is over."""
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._renew_ms and now_ms < self._leased_until_ms:
            return True
        lease_ms = self._settings.sweep_lease_ms
        granted = await self._lease(lease_ms)
        if granted and now_ms >= self._leased_until_ms:
            # What another replica was told meanwhile, and what it reported, is not known here.
            self._reported = False
            self._timetable.due(now_ms)
        self._leased_until_ms = now_ms + lease_ms if granted else 0
        self._renew_ms = now_ms + lease_ms // 3
        return granted

    async def _lease(self, lease_ms: int) -> bool:
        asked = LeaseSweepRequest(
            partition=self.partition,
            sweeper_id=self._replica.sweeper_id,
            address=self._replica.address,
            lease_ms=lease_ms,
        )
        return (await self._answer((await self._storage()).LeaseSweep(asked))).granted

    # --- faults --------------------------------------------------------------------------------

    async def _storage(self) -> StorageServiceStub:
        """Asked for at every call: the pool may have closed a channel that was not used."""
        return StorageServiceStub(await self._channels.to(self._storage_address))

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
