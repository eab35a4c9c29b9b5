"""A partition: its life from opening to closing, its health, its clock and its faults.

Submits operations to its writer and runs it. A commit that fails has an unknown outcome: it is
answered with that, never with success; all memory is dropped and the engine is opened again. A
partition that another node has taken over stays closed: opening it would take it back, which only
an assignment decides (`placement/assigned.py`). One that has lost confirmed commits serves nothing
until an operator confirms that.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from random import random
from typing import TypeVar

from storage_svc.engines.engine import (
    REFUSALS,
    Engine,
    EngineDataLost,
    EngineFenced,
    Engines,
    Identity,
    Reader,
    Table,
)
from storage_svc.lifecycle.lifecycle_watch import NEVER_SILENT, LifecycleWatch, SilencePolicy
from storage_svc.operations.erase import Erased, EraseRows
from storage_svc.operations.loading import RunHousekeeping
from storage_svc.operations.operation import Operation
from storage_svc.operations.partition_time import StampTime
from storage_svc.partition.age_marks import AgeMarks
from storage_svc.partition.broker_hold import BrokerHold
from storage_svc.partition.clock import PartitionTime
from storage_svc.partition.commit import CommitContext
from storage_svc.partition.commit_figures import CommitFigures
from storage_svc.partition.commit_loop import CommitLoop
from storage_svc.partition.commit_numbers import Loss, LossWitnessed
from storage_svc.partition.deadlines import Deadlines
from storage_svc.partition.disk_watch import DiskWatch
from storage_svc.partition.due_indexes import DueIndexes
from storage_svc.partition.exchange_events import ConnectedExchanges, ExchangeEvents, HandedOut
from storage_svc.partition.frames import EMBEDDED, SHARED, Awaited, Frame, Requester
from storage_svc.partition.health import FaultReason, Health
from storage_svc.partition.losses import Losses, Witness, no_witness
from storage_svc.partition.state import PartitionState, open_state
from storage_svc.partition.writer import Writer, check_broker_epoch
from storage_svc.turns import CommonTurns
from tidemark.clock import Clock
from tidemark.errors import (
    CommitOutcomeUnknown,
    DataCorrupt,
    InvalidArgument,
    PartitionFaulty,
    ShuttingDown,
    TidemarkError,
)
from tidemark.telemetry import counter, current_traceparent

HOUSEKEEPING_MS = 1000
_REOPEN_MS_MIN = 100
_REOPEN_MS_MAX = 10_000

R = TypeVar("R")

_log = logging.getLogger(__name__)
_clock_jumps = counter(
    "tidemark.storage.clock_jumps", description="Jumps of the clock that suspended deletions"
)


class Partition:
    """One partition with its single writer. Start it with `open`, end it with `close`."""

    def __init__(
        self,
        engines: Engines,
        identity: Identity,
        clock: Clock,
        *,
        await_sweep: bool = False,
        disk_free_bytes_min: int = 0,
        silence: SilencePolicy = NEVER_SILENT,
        chance: Callable[[], float] = random,
        on_taken_over: Callable[[], None] = lambda: None,
        witness: Witness = no_witness,
        loss_confirmed: bool = False,
        turns: CommonTurns | None = None,
        figures: CommitFigures | None = None,
    ) -> None:
        """`on_taken_over` is called once another node has opened the partition. `loss_confirmed` if
        it is to replace a partition whose data is lost. Partitions of one node share `turns` and
        `figures`."""
        self.identity = identity
        self.number = identity.partition
        self.health = Health()
        self.lifecycle = LifecycleWatch(self.number, silence, clock.monotonic_ms())
        self.disk = DiskWatch(self.number, disk_free_bytes_min)
        self.overdue_ms = 0
        """How long the earliest deadline was past at the last housekeeping."""
        self._engines = engines
        self._clock = clock
        self._chance = chance
        self._on_taken_over = on_taken_over
        self._await_sweep = await_sweep
        self._exchanges = ConnectedExchanges()
        self._writer = Writer(
            self.number, clock, self._exchanges, self.lifecycle, figures or CommitFigures()
        )
        self._commits = CommitLoop(
            self._writer,
            turns or CommonTurns(),
            new_commit=self._new_commit,
            recover=self._recover,
            committed=self._continue_erasing,
        )
        self._state: PartitionState | None = None
        self._deadlines = Deadlines()
        """Those of the state, also while a fault is being recovered from."""
        self._time = PartitionTime(0, clock.wall_ms(), clock.monotonic_ms())
        self._hold = BrokerHold()
        self._losses = Losses(self.number, witness, confirmed=loss_confirmed)
        self._stopping = asyncio.Event()
        self.has_left = False
        """Whether it was closed because another storage node is to hold it."""
        self._tasks: list[asyncio.Task[None]] = []
        self._watch: asyncio.Task[None] | None = None
        self._erasing: asyncio.Future[list[Erased | TidemarkError]] | None = None

    # --- life ----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Open the engine and start the writer. Raises only what a setting is to blame for; any
        other fault is reported while the partition tries again."""
        try:
            await self._load()
        except REFUSALS:
            raise
        except LossWitnessed as error:
            self._lost(error)
        except Exception as error:
            self._not_opened(error)
        if self._await_sweep:
            self.health.add(FaultReason.AWAITING_SWEEP, "", self.now_ms())
        self._tasks = [
            asyncio.create_task(self._write()),
            asyncio.create_task(self._keep_running_housekeeping()),
        ]

    async def leave(self) -> None:
        """Close it because another node is to hold it: brokers look for it there."""
        await self.close()
        self.has_left = True
        self._exchanges.health_changed()

    async def close(self) -> None:
        """Finish what was submitted, then release the engine."""
        self._stopping.set()
        self._losses.give_up(ShuttingDown("the storage service is stopping"))
        self._commits.stop()
        if self._tasks:
            writing, housekeeping = self._tasks
            housekeeping.cancel()
            await asyncio.gather(writing, housekeeping, return_exceptions=True)
        state, self._state = self._state, None
        if state is not None:
            await self._close_state(state)

    # --- operations ----------------------------------------------------------------------------

    def submit(
        self,
        operations: Sequence[Operation[R]],
        broker_epoch: int | None = None,
    ) -> asyncio.Future[list[R | TidemarkError]]:
        """Queue operations for the next commit; their results come in the same order."""
        caller = current_traceparent()
        callers = [caller] * len(operations) if caller else ()
        awaited = Awaited[R](len(operations))
        self.submit_for(awaited, operations, callers, broker_epoch)
        return awaited.results

    def submit_for(
        self,
        requester: Requester[R],
        operations: Sequence[Operation[R]],
        callers: Sequence[str],
        broker_epoch: int | None,
    ) -> None:
        """The same for a requester that takes results as they come, without a future; `callers` are
        the trace contexts of operations, none if no operation is traced."""
        if self._stopping.is_set():
            requester.fail(ShuttingDown(f"partition {self.number} is being closed"))
        elif self._state is None:
            requester.fail(self._faulty())
        else:
            self._commits.submit(operations, callers, broker_epoch, requester)

    async def call(self, operation: Operation[R], broker_epoch: int | None = None) -> R:
        """One operation; raises its error."""
        (result,) = await self.submit([operation], broker_epoch=broker_epoch)
        if isinstance(result, TidemarkError):
            raise result
        return result

    @property
    def commits(self) -> int:
        """Commits that were written since the process started."""
        return self._writer.commits

    @property
    def last_commit(self) -> int:
        """The highest number of a commit that this process has seen durable: what it answers is in
        that commit or in an earlier one."""
        return self._writer.last_commit

    def reader(self) -> Reader:
        return self.state.engine.reader()

    async def verify(self) -> None:
        """Before an answer that was read beside the writer: this node still holds the partition,
        and its store has lost nothing. Raises why not. Free where the data is in this process.

        Through the writer, so that readers share a trip to the store, with each other and with
        commits.
        """
        if self.state.engine.storage_epoch:
            await self.submit([])

    @asynccontextmanager
    async def verified(self) -> AsyncIterator[None]:
        """Verify what the block has read, or its refusal: that is an answer as well."""
        try:
            yield
        except TidemarkError:
            await self.verify()
            raise
        await self.verify()

    # --- state ---------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """False between a fault and the reopening that clears it."""
        return self._state is not None

    @property
    def state(self) -> PartitionState:
        """What the partition keeps in memory; raises PartitionFaulty while it is not open."""
        if self._state is None:
            raise self._faulty()
        return self._state

    def now_ms(self) -> int:
        return self._time.now_ms(self._clock.wall_ms(), self._clock.monotonic_ms())

    @property
    def deletions_suspended(self) -> bool:
        """Whether nothing is deleted until an operator confirms the time."""
        self.now_ms()  # notices a jump
        return self._time.suspicious

    async def confirm_time(self, *, to_wall_clock: bool = False) -> None:
        """An operator confirms the time after a jump: deletions are allowed again.

        With `to_wall_clock`, time first returns to the wall clock, which was corrected; it goes
        back then, and stored times stay as they are.
        """
        state, monotonic_ms = self.state, self._clock.monotonic_ms()
        if to_wall_clock:
            self._time = PartitionTime(0, self._clock.wall_ms(), monotonic_ms)
            # Their marks lie in a time that is to come again.
            state.due, state.ages = DueIndexes(), AgeMarks()
        self._time.confirm()
        await self.call(StampTime())
        self._check_time(state)
        self._exchanges.health_changed()
        for table in (Table.TTL, Table.BURIED):  # sweeps passed over them until now
            self.lifecycle.wakeups.scan_begins(table)
            self.lifecycle.due(table, self.now_ms())

    async def confirm_loss(self) -> Loss:
        """An operator confirms that commits are lost (DATA_LOST): serve what is left."""
        if not self._tasks:
            raise InvalidArgument(
                f"the data of partition {self.number} is not on this node: bring its volume back, "
                "or start the node once with TIDEMARK_STORAGE_CREATE_LOST=true",
                field="partition",
            )
        return await self._losses.confirm()

    @property
    def next_deadline_ms(self) -> int | None:
        """When the next reservation or delay ends; None if there is none."""
        return self._deadlines.earliest_ms()

    @property
    def reservations(self) -> int:
        """Deadlines that are running, nack delays included."""
        return self._deadlines.total

    # --- brokers -------------------------------------------------------------------------------

    def check_epoch(self, broker_epoch: int) -> None:
        """Raise Fenced for a broker that does not hold the partition, or no longer does."""
        check_broker_epoch(self.state, broker_epoch)

    @property
    def has_connected_broker(self) -> bool:
        """Whether the broker that holds the partition is connected, and expires what is due."""
        state = self._state
        return state is not None and self._exchanges.includes(state.counters.broker_epoch)

    def connect(
        self,
        broker_epoch: int,
        changed: Callable[[], None],
        handed_out: HandedOut = lambda _: None,
    ) -> ExchangeEvents:
        """The events for the exchange of a broker, until `disconnect`."""
        return self._exchanges.connect(broker_epoch, changed, handed_out)

    def disconnect(self, events: ExchangeEvents) -> None:
        self._exchanges.disconnect(events)
        if self._state is not None and not self.has_connected_broker:
            self._state.broker_gone()
            # From now on only sweeps expire reservations (V1).
            self.lifecycle.broker_disconnected(Table.DEADLINES, self._deadlines.earliest_ms())

    # --- sweeps --------------------------------------------------------------------------------

    def sweep_ended(self, sweeper_id: str, succeeded: bool, detail: str) -> bool:
        """Phase one of a sweep has ended (L4); returns whether the report counts.

        The outcome of a sweeper that no longer holds the lease is out of date, and no later report
        of it would correct the health (L11).
        """
        if not self.lifecycle.lease.is_held_by(sweeper_id, self._clock.monotonic_ms()):
            _log.info("a report is ignored", extra={"partition": self.number, "by": sweeper_id})
            return False
        before = self.health.faults
        if succeeded:
            self.health.clear(FaultReason.AWAITING_SWEEP, FaultReason.SWEEP_FAILED)
        else:
            self.health.add(FaultReason.SWEEP_FAILED, detail, self.now_ms())
        if self.health.faults != before:
            self._exchanges.health_changed()
        return True

    @property
    def awaits_sweep(self) -> bool:
        return self.health.has(FaultReason.AWAITING_SWEEP)

    @property
    def awaits_report(self) -> bool:
        """Whether a sweep that succeeds makes the partition serve, or clears one of its faults."""
        return self.awaits_sweep or self.health.has(FaultReason.SWEEP_FAILED)

    # --- commits -------------------------------------------------------------------------------

    async def _write(self) -> None:
        if self._state is None:
            await self._reopen()
        self._continue_erasing()
        await self._commits.run()

    def _continue_erasing(self) -> None:
        """Have the next commit erase more of what was removed, beside what others ask of it."""
        waits = self._erasing is not None and not self._erasing.done()
        if waits or self._state is None or self._stopping.is_set():
            return
        if self._state.erasures.first() is None:
            return
        self._erasing = self.submit([EraseRows()])
        self._erasing.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _new_commit(self) -> CommitContext:
        now_ms, counters = self.now_ms(), self.state.counters
        # Stored with every commit: a restart must not end the suspension.
        counters.suspended_ms = (counters.suspended_ms or now_ms) if self._time.suspicious else 0
        return CommitContext(
            self.state,
            self.number,
            self.identity.partitions,
            now_ms,
            disk_full=self.disk.full,
            publishes_refused=self.health.refusal(self.number),
            deletions_refused=self._time_refusal(),
            chance=self._chance,
        )

    def _time_refusal(self) -> TidemarkError | None:
        if not self._time.suspicious:
            return None
        return PartitionFaulty(
            f"the clock of partition {self.number} jumped ahead: nothing is deleted until its "
            "time is confirmed",
            partition=str(self.number),
        )

    # --- faults --------------------------------------------------------------------------------

    async def _recover(self, frames: Sequence[Frame], error: Exception) -> None:
        """Fail everything that waits for an answer, drop all memory and reopen the engine."""
        _log.error("a commit failed", extra={"partition": self.number}, exc_info=error)
        reason = FaultReason.COMMIT_FAILED
        answer: TidemarkError = CommitOutcomeUnknown(f"a commit of partition {self.number} failed")
        if isinstance(error, DataCorrupt):
            reason = FaultReason.DATA_CORRUPT
            answer = error
        elif isinstance(error, EngineFenced):
            reason = FaultReason.TAKEN_OVER
            answer = PartitionFaulty(f"another storage node has taken partition {self.number}")
        elif isinstance(error, EngineDataLost):
            if not isinstance(error, LossWitnessed):
                # Not opened again to see what is left: another node may be about to serve it.
                error = LossWitnessed(self.number, Loss(self.last_commit))
                self._losses.found(error.loss)
            reason = FaultReason.DATA_LOST
            answer = PartitionFaulty(f"partition {self.number} has lost commits: {error}")
        elif not isinstance(error, CommitOutcomeUnknown):
            # It broke before the commit: nothing was stored, so a repeat is safe.
            answer = PartitionFaulty(f"partition {self.number} failed to apply a frame")
        self.health.add(reason, str(error), self.now_ms())
        state, self._state = self._state, None
        if state is not None and isinstance(error, LossWitnessed) and error.loss.found is not None:
            await self._store_loss(state, error.loss)  # before the answer, as everything else
        # Results before health: a broker that reads of a reopening drops its callers.
        for frame in frames:
            frame.fail(answer)
        self._commits.fail_submitted(self._faulty())
        self._exchanges.health_changed()
        if state is not None:
            await self._close_state(state)
        if isinstance(error, EngineFenced):
            self._on_taken_over()
            return
        if isinstance(error, DataCorrupt):  # opening again does not mend it: do not try in a hurry
            await self._pause(_REOPEN_MS_MIN)
        await self._reopen()

    async def _watch_engine(self, engine: Engine) -> None:
        """Recover also where another partition's commit has failed the engine."""
        await engine.wait_failed()
        with suppress(TidemarkError):  # the recovery reports it
            await self.submit([])  # the writer verifies the engine, which raises

    async def _close_state(self, state: PartitionState) -> None:
        if self._watch is not None:
            self._watch.cancel()
        await state.engine.close()
        state.handles.release()

    async def _reopen(self) -> None:
        wait_ms = _REOPEN_MS_MIN
        while not self._stopping.is_set():
            await self._losses.until_none_or_confirmed()
            if self._stopping.is_set():
                return
            try:
                await self._load()
            except EngineFenced as error:
                self.health.add(FaultReason.TAKEN_OVER, str(error), self.now_ms())
                self._losses.give_up(self._faulty())
                self._exchanges.health_changed()
                self._on_taken_over()
                return
            except LossWitnessed as error:
                self._lost(error)
                continue
            except Exception as error:  # of any kind: without its writer the partition hangs
                self._not_opened(error)
                await self._pause(wait_ms)
                wait_ms = min(2 * wait_ms, _REOPEN_MS_MAX)
                continue
            self.health.clear(FaultReason.COMMIT_FAILED, FaultReason.OPEN_FAILED)
            self.health.clear(FaultReason.DATA_CORRUPT, FaultReason.DATA_LOST)
            self._exchanges.health_changed()
            return

    async def _pause(self, wait_ms: int) -> None:
        """Wait, unless the partition is being closed."""
        with suppress(TimeoutError):
            await self._clock.wait_for(self._stopping.wait(), wait_ms)

    async def _store_loss(self, state: PartitionState, loss: Loss) -> None:
        try:
            await self._losses.store(state.engine, loss)
        except Exception as error:  # of any kind: this process knows it, and so do its witnesses
            _log.error("a loss is not stored", extra={"partition": self.number}, exc_info=error)

    def _lost(self, error: LossWitnessed) -> None:
        _log.error("commits are lost: %s", error, extra={"partition": self.number})
        self.health.add(FaultReason.DATA_LOST, str(error), self.now_ms())
        self._exchanges.health_changed()

    def _not_opened(self, error: Exception) -> None:
        corrupt = isinstance(error, DataCorrupt)
        reason = FaultReason.DATA_CORRUPT if corrupt else FaultReason.OPEN_FAILED
        self.health.add(reason, str(error), self.now_ms())
        _log.warning("not opened", extra={"partition": self.number}, exc_info=error)

    async def _load(self) -> None:
        state = await open_state(self._engines, self.identity)
        try:
            await self._losses.check(state, self.last_commit)
            self.disk.update(await state.engine.free_bytes())
        except BaseException:
            await state.engine.close()  # or it could never be opened again
            raise
        self._writer.last_commit = max(self.last_commit, state.numbers.last)
        self._state, self._deadlines = state, state.deadlines
        self._commits.bounds = SHARED if state.engine.storage_epoch else EMBEDDED
        state.hold = self._hold
        self._watch = asyncio.create_task(self._watch_engine(state.engine))
        self.health.openings += 1
        committed_ms = max(state.counters.time_ms, self.now_ms())
        suspicious = self._time.suspicious or state.counters.suspended_ms > 0
        self._time = PartitionTime(committed_ms, self._clock.wall_ms(), self._clock.monotonic_ms())
        self._time.suspicious = suspicious
        self._hold.restart(self.now_ms())

    def _faulty(self) -> TidemarkError:
        return self.health.refusal(self.number) or PartitionFaulty(
            f"partition {self.number} is not open", partition=str(self.number)
        )

    # --- housekeeping --------------------------------------------------------------------------

    async def _keep_running_housekeeping(self) -> None:
        """Until cancelled, or closed: an engine that fails may do so in place of a cancellation."""
        while not self._stopping.is_set():
            await self._clock.sleep_ms(HOUSEKEEPING_MS)
            try:
                await self.run_housekeeping()
            except Exception as error:  # such as a disk that cannot be read: next time
                _log.warning("no housekeeping", extra={"partition": self.number}, exc_info=error)

    async def run_housekeeping(self) -> None:
        """Check the disk and lifecycle, unload idle queues, forget old producers."""
        if self._state is None:
            return
        state = self._state
        self.disk.update(await state.engine.free_bytes())
        if state is not self._state:  # it was closed meanwhile
            return
        earliest_ms = self._deadlines.earliest_ms()
        self.overdue_ms = 0 if earliest_ms is None else max(0, self.now_ms() - earliest_ms)
        changed = self.lifecycle.check_silence(
            self.health, self.now_ms(), self._clock.monotonic_ms()
        )
        changed |= self._check_time(state)
        if self._check_left_out(state) or changed:
            self._exchanges.health_changed()
        with suppress(TidemarkError):  # closing or recovering: both are reported elsewhere
            if self._deadlines.needs_page:
                await self.submit([])  # the writer reads it first
            if self._time.suspicious and not self.state.counters.suspended_ms:
                await self.submit([StampTime()])
            if await self._has_housekeeping():
                await self.submit([RunHousekeeping()])

    def _check_time(self, state: PartitionState) -> bool:
        """Raise or clear the alarm of a clock that jumped; returns whether it changed."""
        raised = self.health.has(FaultReason.CLOCK_JUMPED)
        suspended = self.deletions_suspended
        if suspended and not raised:
            _clock_jumps.add(1)
            _log.error("the clock jumped ahead", extra={"partition": self.number})
        detail = (
            "nothing is deleted until the time is confirmed: "
            f"tidemark partitions confirm-time {self.number}"
            if suspended
            else ""
        )
        return self.health.set_alarm(FaultReason.CLOCK_JUMPED, detail, self.now_ms())

    def _check_left_out(self, state: PartitionState) -> bool:
        """Raise or clear the alarm of records that cannot be read; returns whether it changed."""
        now_ms = self.now_ms()
        state.left_out.forget_old(now_ms)
        return self.health.set_alarm(FaultReason.RECORD_UNREADABLE, state.left_out.detail, now_ms)

    async def _has_housekeeping(self) -> bool:
        """Whether there is anything to unload or forget; usually not, which saves a commit."""
        state, now_ms = self.state, self.now_ms()
        if state.handles.untracked(now_ms):
            return True
        return not self._time.suspicious and await state.producers.has_old(now_ms)
