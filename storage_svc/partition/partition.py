"""A partition: one writer that turns whatever gathered into one durable commit, then answers.

Owns the engine, the order of operations, the time, the broker epoch and the health of the
partition; what the operations mean is in `operations/`. Nothing is answered before the
commit of the batch it was computed in. A commit that fails has an unknown outcome: nobody is told
success, all memory is dropped, and the engine is opened again.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from storage_svc.engines.engine import Engines, Identity, Reader, Table
from storage_svc.lifecycle.lifecycle_watch import NEVER_SILENT, LifecycleWatch, Silence
from storage_svc.operations.expire import ExpireDue
from storage_svc.operations.loading import RunHousekeeping
from storage_svc.operations.operation import Operation
from storage_svc.operations.publish import Append
from storage_svc.partition.clock import PartitionTime
from storage_svc.partition.commit import CommitContext
from storage_svc.partition.counters import put_counters
from storage_svc.partition.deadlines import Deadlines
from storage_svc.partition.disk_watch import DiskWatch
from storage_svc.partition.exchange_events import Watcher
from storage_svc.partition.health import FaultReason, Health
from storage_svc.partition.spans import CommitSpans, refused
from storage_svc.partition.state import PartitionState, open_state
from tidemark.clock import Clock
from tidemark.errors import (
    CommitOutcomeUnknown,
    DataCorrupt,
    Fenced,
    PartitionFaulty,
    ShuttingDown,
    TidemarkError,
)
from tidemark.telemetry import counter, current_traceparent, histogram, is_sampled, seconds
from tidemark.telemetry.metrics import BYTES, COUNTS

COMMIT_BYTES_MAX = 8 * 1024 * 1024
"""Bodies that one commit takes: what lies beyond waits for the next, so that none takes long."""

HOUSEKEEPING_MS = 1000
_REOPEN_MS_MIN = 100
_REOPEN_MS_MAX = 10_000

R = TypeVar("R")

_log = logging.getLogger(__name__)
_commit_seconds = seconds("tidemark.storage.commit.duration", "From applying to durable")
_commit_operations = histogram(
    "tidemark.storage.commit.operations", "Operations that gathered for a commit", COUNTS
)
_commit_bytes = histogram("tidemark.storage.commit.size", "What a commit writes", BYTES, unit="By")
_fenced_calls = counter(
    "tidemark.storage.fenced_calls",
    "Operations of brokers and clients that no longer own what they ask for",
    zeros=({"holder": "broker"}, {"holder": "client"}),
)


@dataclass(slots=True)
class _Frame:
    """Operations that arrived together, and who waits for their results."""

    operations: Sequence[Operation[Any]]
    callers: Sequence[str]  # trace contexts, one per operation
    broker_epoch: int | None  # None: not from a broker
    results: asyncio.Future[list[Any]]
    body_bytes: int


class Partition:
    """The single writer of one partition. Start it with `open`, end it with `close`."""

    def __init__(
        self,
        engines: Engines,
        identity: Identity,
        clock: Clock,
        *,
        await_sweep: bool = False,
        disk_free_bytes_min: int = 0,
        silence: Silence = NEVER_SILENT,
    ) -> None:
        self.identity = identity
        self.number = identity.partition
        self.health = Health()
        self.commits = 0
        self.lifecycle = LifecycleWatch(self.number, silence, clock.monotonic_ms())
        self._engines = engines
        self._clock = clock
        self._await_sweep = await_sweep
        self.disk = DiskWatch(self.number, disk_free_bytes_min)
        self.overdue_ms = 0
        """How long the earliest deadline was past when last looked at."""
        self._state: PartitionState | None = None
        self._deadlines = Deadlines()
        self._time = PartitionTime(0, clock.wall_ms(), clock.monotonic_ms())
        self._frames: list[_Frame] = []
        self._arrived = asyncio.Event()
        self._watchers: set[Watcher] = set()
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    # --- life ----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Open the engine and start the writer. Raises what keeps the engine from opening."""
        await self._load()
        if self._await_sweep:
            self.health.add(FaultReason.AWAITING_SWEEP, "", self.now_ms())
        self._tasks = [
            asyncio.create_task(self._write()),
            asyncio.create_task(self._housekeep()),
        ]

    async def close(self) -> None:
        """Finish what was submitted, then release the engine."""
        self._stopping.set()
        self._arrived.set()
        if self._tasks:
            writer, housekeeper = self._tasks
            housekeeper.cancel()
            await asyncio.gather(writer, housekeeper, return_exceptions=True)
        if self._state is not None:
            await self._state.engine.close()
            self._state = None

    # --- asking --------------------------------------------------------------------------------

    def submit(
        self,
        operations: Sequence[Operation[R]],
        callers: Sequence[str] = (),
        broker_epoch: int | None = None,
    ) -> asyncio.Future[list[R | TidemarkError]]:
        """Queue operations for the next commit; their results come in the same order."""
        loop = asyncio.get_running_loop()
        results: asyncio.Future[list[R | TidemarkError]] = loop.create_future()
        if self._stopping.is_set():
            results.set_exception(ShuttingDown("the storage service is stopping"))
            return results
        if self._state is None:
            results.set_exception(self._faulty())
            return results
        if not callers and (caller := current_traceparent()):
            callers = [caller] * len(operations)
        requests: Sequence[object] = operations
        body_bytes = sum(len(each.body) for each in requests if isinstance(each, Append))
        self._frames.append(_Frame(operations, callers, broker_epoch, results, body_bytes))
        self._arrived.set()
        return results

    async def call(self, operation: Operation[R], broker_epoch: int | None = None) -> R:
        """One operation; raises its error."""
        (result,) = await self.submit([operation], broker_epoch=broker_epoch)
        if isinstance(result, TidemarkError):
            raise result
        return result

    def check_epoch(self, broker_epoch: int | None) -> None:
        """Raise Fenced for a broker that does not own the partition (any more)."""
        current = self.state.counters.broker_epoch
        if broker_epoch is not None and (broker_epoch != current or not current):
            _fenced_calls.add(1, {"holder": "broker"})
            raise Fenced(
                f"partition {self.number} is owned under epoch {current}, not {broker_epoch}"
                if current
                else f"nobody has claimed partition {self.number}",
                epoch=str(current),
                owner=self.state.claim.address,
            )

    @property
    def is_open(self) -> bool:
        """False between a fault and the reopening that heals it."""
        return self._state is not None

    @property
    def state(self) -> PartitionState:
        """What the partition knows; raises PartitionFaulty while it is not open."""
        if self._state is None:
            raise self._faulty()
        return self._state

    def now_ms(self) -> int:
        return self._time.now_ms(self._clock.wall_ms(), self._clock.monotonic_ms())

    def confirm_time(self) -> None:
        """An operator says that the time is right after a jump: deleting goes on."""
        self._time.confirm()

    @property
    def next_deadline_ms(self) -> int | None:
        """When something expires; None if nothing waits."""
        return self._deadlines.earliest_ms()

    @property
    def reservations(self) -> int:
        """Deadlines that are running, nack delays included."""
        return self._deadlines.total

    @property
    def driven(self) -> bool:
        """Whether the owner is connected and sees to what is due."""
        if self._state is None:
            return False
        epoch = self._state.counters.broker_epoch
        return any(watcher.broker_epoch == epoch for watcher in self._watchers)

    def reader(self) -> Reader:
        return self.state.engine.reader()

    def watch(self, broker_epoch: int) -> Watcher:
        watcher = Watcher(broker_epoch)
        watcher.changed.set()
        self._watchers.add(watcher)
        return watcher

    def unwatch(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)
        if self._state is not None and not self.driven:
            self._state.handles.forget_trackers()
            # Nobody expires reservations now but sweeps (V1).
            self.lifecycle.undriven(Table.DEADLINES, self._deadlines.earliest_ms())

    # --- sweeps --------------------------------------------------------------------------------

    def sweep_ended(self, succeeded: bool, detail: str) -> None:
        """Phase one of a sweep has ended (L4)."""
        before = self.health.faults
        if succeeded:
            self.health.clear(FaultReason.AWAITING_SWEEP, FaultReason.SWEEP_FAILED)
        else:
            self.health.add(FaultReason.SWEEP_FAILED, detail, self.now_ms())
        if self.health.faults != before:
            self._tell_health()

    @property
    def awaits_sweep(self) -> bool:
        return self.health.has(FaultReason.AWAITING_SWEEP)

    # --- the writer ----------------------------------------------------------------------------

    async def _write(self) -> None:
        while True:
            if not self._frames:
                if self._stopping.is_set():
                    return
                self._arrived.clear()
                await self._arrived.wait()
                continue
            frames = self._gather()
            try:
                await self._commit(frames)
            except Exception as error:
                await self._recover(frames, error)

    def _gather(self) -> list[_Frame]:
        """What the next commit takes: everything, up to a bound."""
        taken = body_bytes = 0
        for frame in self._frames:
            if taken and body_bytes + frame.body_bytes > COMMIT_BYTES_MAX:
                break
            taken += 1
            body_bytes += frame.body_bytes
        frames, self._frames = self._frames[:taken], self._frames[taken:]
        return frames

    async def _commit(self, frames: list[_Frame]) -> None:
        started_ns = self._clock.monotonic_ns()
        commit = self._new_commit()
        callers = [caller for each in frames for caller in each.callers]
        with CommitSpans(self.number, callers) as traced:
            results = [await self._apply_frame(commit, frame, traced) for frame in frames]
            if self.driven and self._is_due(commit.now_ms):
                await ExpireDue().apply(commit)
            batch = commit.journal.finish()
            if len(batch):
                commit.count()
                put_counters(batch, commit.counters)
                with traced.commit():
                    await commit.engine.commit(batch)
                self.commits += 1
        # Results first: who waits for them wakes first, so that results and events share a frame.
        for frame, answer in zip(frames, results, strict=True):
            if not frame.results.done():
                frame.results.set_result(answer)
        self._committed(commit)
        if not len(batch):  # nothing was committed: it would hide what the others took
            return
        _commit_seconds.record((self._clock.monotonic_ns() - started_ns) / 1e9)
        _commit_operations.record(sum(len(frame.operations) for frame in frames))
        _commit_bytes.record(batch.bytes_approx)

    def _new_commit(self) -> CommitContext:
        return CommitContext(
            self.state,
            self.number,
            self.identity.partitions,
            self.now_ms(),
            disk_full=self.disk.full,
            publishes_refused=self.health.refusal(self.number),
            deletions_refused=self._time_refusal(),
        )

    def _is_due(self, now_ms: int) -> bool:
        earliest_ms = self._deadlines.earliest_ms()
        return earliest_ms is not None and earliest_ms <= now_ms

    def _time_refusal(self) -> TidemarkError | None:
        if not self._time.suspicious:
            return None
        return PartitionFaulty(
            f"the clock of partition {self.number} jumped ahead: nothing is deleted until its "
            "time is confirmed",
            partition=str(self.number),
        )

    async def _apply_frame(
        self, commit: CommitContext, frame: _Frame, traced: CommitSpans
    ) -> list[Any]:
        try:
            self.check_epoch(frame.broker_epoch)
        except Fenced as error:
            return [error] * len(frame.operations)
        if not any(map(is_sampled, frame.callers)):
            return [await _apply(commit, operation) for operation in frame.operations]
        results: list[Any] = []
        for operation, caller in zip(frame.operations, frame.callers, strict=True):
            with traced.operation(operation, caller) as span:
                results.append(await _apply(commit, operation))
                refused(span, results[-1])
        return results

    def _committed(self, commit: CommitContext) -> None:
        """The commit is durable: keep what may be needed again, and tell what is new."""
        for key, body in commit.journal.bodies.items():
            commit.state.bodies.add(key, body)
        for key in commit.journal.deleted_bodies:
            commit.state.bodies.discard(key)
        commit.state.producers.trim()
        for table, due_ms in commit.journal.added_due:
            commit.state.due.added(table, due_ms)
            self.lifecycle.due(table, due_ms)
        earliest_ms = self._deadlines.earliest_ms()
        journal, epoch = commit.journal, commit.state.counters.broker_epoch
        for watcher in self._watchers:
            if watcher.broker_epoch == epoch:
                watcher.committed(journal.ready_queues, journal.expired, earliest_ms, commit.now_ms)
            else:
                watcher.changed.set()  # it is fenced, and ends

    # --- faults --------------------------------------------------------------------------------

    async def _recover(self, frames: list[_Frame], error: Exception) -> None:
        """Answer those who wait, drop all state, and open the engine again."""
        _log.error("a commit failed", extra={"partition": self.number}, exc_info=error)
        reason = FaultReason.COMMIT_FAILED
        answer: TidemarkError = CommitOutcomeUnknown(f"a commit of partition {self.number} failed")
        if isinstance(error, DataCorrupt):
            reason = FaultReason.DATA_CORRUPT
            answer = error
        elif not isinstance(error, CommitOutcomeUnknown):
            # It broke before the commit: nothing was stored, so a repeat is safe.
            answer = PartitionFaulty(f"partition {self.number} failed to apply a frame")
        self.health.add(reason, str(error), self.now_ms())
        self._tell_health()
        self._answer_all(frames, answer)
        state, self._state = self._state, None
        if state is not None:
            await state.engine.close()
        self._answer_all(self._frames, self._faulty())
        self._frames = []
        await self._reopen()

    async def _reopen(self) -> None:
        wait_ms = _REOPEN_MS_MIN
        while not self._stopping.is_set():
            try:
                await self._load()
            except Exception as error:  # whatever it is: a writer that ends answers nobody
                self.health.add(FaultReason.OPEN_FAILED, str(error), self.now_ms())
                _log.warning("not reopened", extra={"partition": self.number}, exc_info=error)
                with suppress(TimeoutError):
                    await self._clock.wait_for(self._stopping.wait(), wait_ms)
                wait_ms = min(2 * wait_ms, _REOPEN_MS_MAX)
                continue
            self.health.clear(FaultReason.COMMIT_FAILED, FaultReason.OPEN_FAILED)
            self.health.clear(FaultReason.DATA_CORRUPT)
            self._tell_health()
            return

    async def _load(self) -> None:
        state = await open_state(self._engines, self.identity)
        try:
            self.disk.look(state.engine.disk_free_bytes())
        except BaseException:
            await state.engine.close()  # or it could never be opened again
            raise
        self._state, self._deadlines = state, state.deadlines
        self.health.openings += 1
        committed_ms = max(state.counters.time_ms, self.now_ms())
        suspicious = self._time.suspicious
        self._time = PartitionTime(committed_ms, self._clock.wall_ms(), self._clock.monotonic_ms())
        self._time.suspicious = suspicious

    # --- housekeeping --------------------------------------------------------------------------

    async def _housekeep(self) -> None:
        while True:
            await self._clock.sleep_ms(HOUSEKEEPING_MS)
            try:
                await self.housekeep_once()
            except Exception as error:  # such as a disk that cannot be looked at: next time
                _log.warning("no housekeeping", extra={"partition": self.number}, exc_info=error)

    async def housekeep_once(self) -> None:
        """Look at the disk and for lifecycle, unload idle queues, forget old producers."""
        if self._state is None:
            return
        self.disk.look(self._state.engine.disk_free_bytes())
        earliest_ms = self._deadlines.earliest_ms()
        self.overdue_ms = 0 if earliest_ms is None else max(0, self.now_ms() - earliest_ms)
        if self.lifecycle.listen(self.health, self.now_ms(), self._clock.monotonic_ms()):
            self._tell_health()
        with suppress(TidemarkError):  # whoever closes or reopens the partition says so
            if await self._has_housekeeping():
                await self.submit([RunHousekeeping()])

    async def _has_housekeeping(self) -> bool:
        """Whether a commit has something to unload or forget: mostly not, and then none is made."""
        state, now_ms = self.state, self.now_ms()
        if state.handles.untracked(now_ms):
            return True
        return not self._time.suspicious and await state.producers.has_old(now_ms)

    def _tell_health(self) -> None:
        for watcher in self._watchers:
            watcher.health_changed = True
            watcher.changed.set()

    def _answer_all(self, frames: list[_Frame], error: TidemarkError) -> None:
        for frame in frames:
            if not frame.results.done():
                frame.results.set_exception(error)

    def _faulty(self) -> TidemarkError:
        return self.health.refusal(self.number) or PartitionFaulty(
            f"partition {self.number} is not open", partition=str(self.number)
        )


async def _apply(commit: CommitContext, operation: Operation[R]) -> R | TidemarkError:
    try:
        return await operation.apply(commit)
    except DataCorrupt:
        raise
    except Fenced as error:
        _fenced_calls.add(1, {"holder": "client"})
        return error
    except TidemarkError as error:
        return error
