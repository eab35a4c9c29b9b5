"""A partition: its life from opening to closing, its health and its recovery from faults.

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
    READ_FAULTS,
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
from storage_svc.operations.claim import CheckWitness
from storage_svc.operations.erase import Erased, EraseRows
from storage_svc.operations.operation import Operation
from storage_svc.operations.partition_time import StampTime
from storage_svc.partition.age_marks import AgeMarks
from storage_svc.partition.broker_hold import BrokerHold
from storage_svc.partition.commit import CommitContext
from storage_svc.partition.commit_figures import CommitFigures
from storage_svc.partition.commit_loop import CommitLoop
from storage_svc.partition.commit_numbers import Loss, LossWitnessed
from storage_svc.partition.deadlines import Deadlines
from storage_svc.partition.disk_watch import DiskWatch
from storage_svc.partition.due_indexes import DueIndexes
from storage_svc.partition.exchange_events import ConnectedExchanges, ExchangeEvents, OnHandedOut
from storage_svc.partition.failures import failure_of
from storage_svc.partition.frames import EMBEDDED, SHARED, Awaited, Frame
from storage_svc.partition.health import FaultReason, Health
from storage_svc.partition.housekeeping import Housekeeping
from storage_svc.partition.losses import Losses, Witness, no_witness
from storage_svc.partition.state import PartitionState, open_state
from storage_svc.partition.timekeeping import Timekeeping
from storage_svc.partition.writer import Writer, check_broker_epoch
from storage_svc.turns import CommonTurns
from tidemark.clock import Clock
from tidemark.errors import (
    DataCorrupt,
    InvalidArgument,
    PartitionFaulty,
    ShuttingDown,
    TidemarkError,
    Unavailable,
)
from tidemark.telemetry import current_traceparent

_REOPEN_MS_MIN = 100
_REOPEN_MS_MAX = 10_000

R = TypeVar("R")

_log = logging.getLogger(__name__)


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
        self._engines = engines
        self._clock = clock
        self._chance = chance
        self._on_taken_over = on_taken_over
        self._await_sweep = await_sweep
        self._exchanges = ConnectedExchanges()
        self._turns = turns or CommonTurns()
        self._writer = Writer(
            self.number, self._exchanges, self.lifecycle, figures or CommitFigures(clock)
        )
        self._commits = CommitLoop(
            self._writer,
            self._turns,
            new_commit=self._new_commit,
            recover=self._recover,
            continue_erasing=self._continue_erasing,
        )
        self._state: PartitionState | None = None
        self._deadlines = Deadlines()
        """Those of the state, also while a fault is being recovered from."""
        self._time = Timekeeping(self.number, clock, self.health)
        self.housekeeping = Housekeeping(self, self._time, self._exchanges, clock)
        self._hold = BrokerHold()
        self._losses = Losses(self.number, witness, confirmed=loss_confirmed)
        self._stopping = asyncio.Event()
        self.is_closing = False
        """Set together with the event, and asked for every frame."""
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
            asyncio.create_task(self.housekeeping.run()),
        ]

    async def leave(self) -> None:
        """Close it because another node is to hold it: brokers look for it there."""
        await self.close()
        self.has_left = True
        self._exchanges.health_changed()

    async def close(self) -> None:
        """Finish what was submitted, then release the engine."""
        self.is_closing = True
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
        awaited = Awaited[R](operations, callers, broker_epoch)
        self.submit_frame(awaited)
        return awaited.results

    def submit_frame(self, frame: Frame) -> None:
        """The same for a frame that takes its results as they come, without a future."""
        if self.is_closing:
            frame.fail(ShuttingDown(f"partition {self.number} is being closed"))
        elif self._state is None:
            frame.fail(self._faulty())
        else:
            self._commits.submit(frame)

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

    async def check_witness(self, commit: int) -> None:
        """Raise PartitionFaulty, and report DATA_LOST, if a commit that a caller has seen is gone.

        Before reads: a partition that goes back behind it later is noticed by `verify`.
        """
        if not self.state.numbers.has(commit):
            await self.call(CheckWitness(commit))

    @asynccontextmanager
    async def verified(self) -> AsyncIterator[None]:
        """Verify what the block has read, or its refusal: that is an answer as well."""
        try:
            async with self.reading():
                yield
        except TidemarkError:
            await self.verify()
            raise
        await self.verify()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Raise the fault of the partition for a read of the block that its engine refuses.

        The fault may be new: verifying finds it. Where nothing is committed, nothing else notices
        that the store has lost the data.
        """
        try:
            yield
        except READ_FAULTS as error:
            await self.verify()
            raise PartitionFaulty(
                f"partition {self.number} could not be read: {error}", partition=str(self.number)
            ) from error

    # --- state ---------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """False between a fault and the reopening that clears it."""
        return self._state is not None

    @property
    def state(self) -> PartitionState:
        """The state of the partition in memory; raises PartitionFaulty while it is not open."""
        if self._state is None:
            raise self._faulty()
        return self._state

    def keeps(self, state: PartitionState) -> bool:
        """Whether it is still open with that state."""
        return self._state is state

    def now_ms(self) -> int:
        return self._time.now_ms()

    @property
    def deletions_suspended(self) -> bool:
        """Whether nothing is deleted until an operator confirms the time."""
        self.now_ms()  # notices a jump
        return self._time.is_suspicious

    async def confirm_time(self, *, to_wall_clock: bool = False) -> None:
        """An operator confirms the time after a jump: deletions are allowed again.

        With `to_wall_clock`, time first returns to the wall clock, which was corrected; it goes
        back then, and stored times stay as they are.
        """
        state = self.state
        self._time.confirm(to_wall_clock=to_wall_clock)
        if to_wall_clock:  # their marks lie in a time that is to come again
            state.due, state.ages = DueIndexes(), AgeMarks()
        await self.call(StampTime())
        self._time.check()
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
    def overdue_ms(self) -> int:
        """How long the earliest deadline was past at the last housekeeping."""
        return self.housekeeping.overdue_ms

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

    def is_held_under(self, broker_epoch: int) -> bool:
        """Whether it is open, and a broker holds it under that epoch."""
        state = self._state
        return state is not None and 0 < broker_epoch == state.counters.broker_epoch

    def refused_before(self) -> TidemarkError | None:
        """Why the broker that holds the partition must claim it again, now that it serves: a run of
        that broker was refused, and those behind it on the way must not overtake its repeat."""
        state = self._state
        if state is None or not state.refused_epoch:  # as nearly always
            return None
        if state.refused_epoch != state.counters.broker_epoch or self.health.refusal(self.number):
            return None
        detail = f"partition {self.number} has refused runs, and serves again"
        return Unavailable(detail, partition=str(self.number))

    @property
    def has_connected_broker(self) -> bool:
        """Whether the broker that holds the partition is connected, and expires what is due."""
        state = self._state
        return state is not None and self._exchanges.includes(state.counters.broker_epoch)

    def connect(
        self,
        broker_epoch: int,
        changed: Callable[[], None],
        handed_out: OnHandedOut = lambda _: None,
    ) -> ExchangeEvents:
        """The events for the exchange of a broker, until `disconnect`."""
        if self.is_held_under(broker_epoch):
            self._hold.begin(self.now_ms())
        return self._exchanges.connect(broker_epoch, changed, handed_out)

    def disconnect(self, events: ExchangeEvents) -> None:
        self._exchanges.disconnect(events)
        if self._state is not None and not self.has_connected_broker:
            self._broker_gone(self._state)

    def _broker_gone(self, state: PartitionState) -> None:
        state.broker_gone()
        # From now on only sweeps expire reservations (V1).
        self.lifecycle.broker_disconnected(Table.DEADLINES, state.deadlines.earliest_ms())

    # --- sweeps --------------------------------------------------------------------------------

    def sweep_ended(self, sweeper_id: str, succeeded: bool, detail: str) -> bool:
        """Phase one of a sweep has ended (L4); returns whether the report counts.

        The outcome of a sweeper that no longer holds the lease is out of date, and no later report
        of it would correct the health (L11).
        """
        if not self.lifecycle.lease.is_held_by(sweeper_id, self._clock.monotonic_ms()):
            _log.info("sweep report ignored", extra={"partition": self.number, "by": sweeper_id})
            return False
        before = self.health.faults
        if succeeded:
            self.health.clear(FaultReason.AWAITING_SWEEP, FaultReason.SWEEP_FAILED)
        elif self.is_open:
            self.health.add(FaultReason.SWEEP_FAILED, detail, self.now_ms())
        # Else its own faults are why the sweep failed. The detail repeats them: as one of them it
        # would grow with every sweep.
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
        state = self._state
        if state is None or state.erasures.first() is None or self.is_closing:
            return
        if self._erasing is not None and not self._erasing.done():
            return
        self._erasing = self.submit([EraseRows()])
        self._erasing.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _new_commit(self, frames: Sequence[Frame]) -> CommitContext:
        state = self._state or self.state
        counters = state.counters
        reading = self._turns.read(self._clock)
        return CommitContext(
            state,
            self.number,
            self.identity.partitions,
            self._time.stamp(reading, counters),
            frames,
            reading.monotonic_ns,
            self.disk.full,
            self.health.refusal(self.number) or self.refused_before(),
            self._time.refusal() if counters.suspended_ms else None,
            self._chance,
        )

    # --- faults --------------------------------------------------------------------------------

    async def _recover(self, frames: Sequence[Frame], error: Exception) -> None:
        """Fail everything that waits for an answer, drop all memory and reopen the engine."""
        _log.error("a commit failed", extra={"partition": self.number}, exc_info=error)
        if isinstance(error, EngineDataLost) and not isinstance(error, LossWitnessed):
            # Not opened again to see what is left: another node may be about to serve it. What is
            # known is stored below.
            error = LossWitnessed(self.number, Loss(self.last_commit))
            self._losses.found(error.loss)
        reason, answer = failure_of(self.number, error)
        self.health.add(reason, str(error), self.now_ms())
        state, self._state = self._state, None
        loss = error.loss if isinstance(error, LossWitnessed) else None
        is_stored = True
        if state is not None and loss is not None:  # before the answer, as everything else
            is_stored = await self._store_loss(state, loss)
        # Results before health: a broker that reads of a reopening drops its callers.
        for frame in frames:
            if not frame.is_answered:
                frame.fail(answer)
        self._commits.fail_submitted(self._faulty())
        self._exchanges.health_changed()
        if state is not None:
            if loss is not None and loss.found is None and not is_stored:
                await self._store_loss_later(state, loss)
            await self._close_state(state)
        # Also if it is fenced: where the store had lost the opening of this node, another one has
        # the partition that this one has deposed before. Otherwise opening it is refused.
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
            self.health.clear(FaultReason.TAKEN_OVER)
            if self._state is not None and not self.has_connected_broker:
                self._broker_gone(self._state)  # it may have gone while nothing was open
            self._exchanges.health_changed()
            return

    async def _pause(self, wait_ms: int) -> None:
        """Wait, unless the partition is being closed."""
        with suppress(TimeoutError):
            await self._clock.wait_for(self._stopping.wait(), wait_ms)

    async def _store_loss(self, state: PartitionState, loss: Loss) -> bool:
        """Returns False if it is to be tried again: until then only this process and its witnesses
        know of the loss, and a restart of all of them forgets it."""
        try:
            await self._losses.store(state.engine, loss)
        except EngineFenced as error:  # the other node serves what is left, or knows as well
            _log.warning("a loss is not stored: %s", error, extra={"partition": self.number})
        except Exception as error:
            _log.error("could not store a loss", extra={"partition": self.number}, exc_info=error)
            return False
        return True

    async def _store_loss_later(self, state: PartitionState, loss: Loss) -> None:
        """Try it until it succeeds, or until an operator has confirmed the loss."""
        wait_ms = _REOPEN_MS_MIN
        while True:
            with suppress(TimeoutError):
                await self._clock.wait_for(self._losses.until_none_or_confirmed(), wait_ms)
                return
            if await self._store_loss(state, loss):
                return
            wait_ms = min(2 * wait_ms, _REOPEN_MS_MAX)

    def _lost(self, error: LossWitnessed) -> None:
        _log.error("commits are lost: %s", error, extra={"partition": self.number})
        self.health.add(FaultReason.DATA_LOST, str(error), self.now_ms())
        self._exchanges.health_changed()

    def _not_opened(self, error: Exception) -> None:
        corrupt = isinstance(error, DataCorrupt)
        reason = FaultReason.DATA_CORRUPT if corrupt else FaultReason.OPEN_FAILED
        self.health.add(reason, str(error), self.now_ms())
        _log.warning("partition cannot be opened", extra={"partition": self.number}, exc_info=error)

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
        self._time.go_on_from(state.counters)
        self._hold.restart(self.now_ms())

    def _faulty(self) -> TidemarkError:
        return self.health.refusal(self.number) or PartitionFaulty(
            f"partition {self.number} is not open", partition=str(self.number)
        )
