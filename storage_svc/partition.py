"""A partition: one writer that turns whatever gathered into one durable commit, then answers.

Owns the engine, the order of operations, the time, the broker epoch and the health of the
partition; what the operations mean is in the modules of `dispatch`. Nothing is answered before the
commit of the batch it was computed in. A commit that fails has an unknown outcome: nobody is told
success, all memory is dropped, and the engine is opened again.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from opentelemetry.trace import Link

from storage_svc import ledger
from storage_svc.deadlines import Deadlines
from storage_svc.dispatch import HANDLERS
from storage_svc.engines.engine import Engine, Engines, Identity, Reader, Table
from storage_svc.engines.keys import read_u64, successor
from storage_svc.handles import Handles
from storage_svc.health import FaultReason, Health
from storage_svc.journal import BatchJournal, QueueGroup
from storage_svc.operations import Append, KeepHouse, Operation, Result
from storage_svc.partition_time import PartitionTime
from storage_svc.producers import Producers
from storage_svc.sweep_lease import SweepLease
from storage_svc.topics import Topics
from storage_svc.unit import Memory, Unit
from storage_svc.wakeups import WakeUps
from tidemark.clock import Clock
from tidemark.errors import (
    CommitOutcomeUnknown,
    DataCorrupt,
    Fenced,
    PartitionFaulty,
    ShuttingDown,
    TidemarkError,
)
from tidemark.telemetry import (
    context_from_traceparent,
    link_from_traceparent,
    meter,
    span,
    tracer,
    tracing_enabled,
)

COMMIT_BYTES_MAX = 8 * 1024 * 1024
"""Bodies that one commit takes: what lies beyond waits for the next, so that none takes long."""

HOUSEKEEPING_MS = 1000
_REOPEN_MS_MIN = 100
_REOPEN_MS_MAX = 10_000
_PAGE_ROWS = 10_000

_log = logging.getLogger(__name__)
_tracer = tracer(__name__)
_meter = meter(__name__)
_commit_seconds = _meter.create_histogram(
    "tidemark.storage.commit.duration", unit="s", description="From applying to durable"
)
_commit_operations = _meter.create_histogram(
    "tidemark.storage.commit.operations", description="Operations that gathered for a commit"
)
_silences = _meter.create_counter(
    "tidemark.storage.lifecycle_silences", description="Times that lifecycle fell silent"
)
_fenced_calls = _meter.create_counter(
    "tidemark.storage.fenced_calls", description="Operations of brokers that no longer own"
)


@dataclass(frozen=True, slots=True)
class Silence:
    """When lifecycle counts as silent, and what that means."""

    after_ms: int = 0
    """0: never."""
    is_fault: bool = False


_SILENCE_IGNORED = Silence()


@dataclass(slots=True)
class _Frame:
    """Operations that arrived together, and who waits for their results."""

    operations: Sequence[Operation]
    callers: Sequence[str]  # trace contexts, one per operation
    broker_epoch: int | None  # None: not from a broker
    results: asyncio.Future[list[Result]]
    body_bytes: int


@dataclass(slots=True, eq=False)
class Watcher:
    """What one exchange wants to hear once it is durable. Read and cleared by the exchange."""

    broker_epoch: int
    ready: dict[QueueGroup, None] = field(default_factory=dict)
    next_deadline_changed: bool = True
    told_deadline_ms: int | None = None
    health_changed: bool = True
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def deadline_moved(self, earliest_ms: int | None, now_ms: int) -> bool:
        """Whether the broker must hear of it: it would wake too late, or for nothing again.

        That the earliest deadline went away is told when it would have come: messages are settled
        all the time, and none of that is news.
        """
        told_ms = self.told_deadline_ms
        if told_ms is None or told_ms <= now_ms:
            return earliest_ms != told_ms
        return earliest_ms is not None and earliest_ms < told_ms


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
        silence: Silence = _SILENCE_IGNORED,
    ) -> None:
        self.identity = identity
        self.number = identity.partition
        self.health = Health()
        self.commits = 0
        self.sweep_lease = SweepLease(clock.monotonic_ms())
        self.wakeups = WakeUps()
        self.due_earlier = asyncio.Event()
        """Set when lifecycle must be told something; cleared by whoever tells it."""
        self._engines = engines
        self._clock = clock
        self._await_sweep = await_sweep
        self._disk_free_bytes_min = disk_free_bytes_min
        self._silence = silence
        self._disk_full = False
        self._memory: Memory | None = None
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
        if self._memory is not None:
            await self._memory.engine.close()
            self._memory = None

    # --- asking --------------------------------------------------------------------------------

    def submit(
        self,
        operations: Sequence[Operation],
        callers: Sequence[str] = (),
        broker_epoch: int | None = None,
    ) -> asyncio.Future[list[Result]]:
        """Queue operations for the next commit; their results come in the same order."""
        results: asyncio.Future[list[Result]] = asyncio.get_running_loop().create_future()
        if self._stopping.is_set():
            results.set_exception(ShuttingDown("the storage service is stopping"))
            return results
        if self._memory is None:
            results.set_exception(self._faulty())
            return results
        body_bytes = sum(len(each.body) for each in operations if isinstance(each, Append))
        self._frames.append(_Frame(operations, callers, broker_epoch, results, body_bytes))
        self._arrived.set()
        return results

    async def call(self, operation: Operation, broker_epoch: int | None = None) -> Result:
        """One operation; raises its error."""
        (result,) = await self.submit([operation], broker_epoch=broker_epoch)
        if isinstance(result, TidemarkError):
            raise result
        return result

    def check_epoch(self, broker_epoch: int | None) -> None:
        """Raise Fenced for a broker that does not own the partition (any more)."""
        current = self.memory.counters.broker_epoch
        if broker_epoch is not None and (broker_epoch != current or not current):
            _fenced_calls.add(1)
            raise Fenced(
                f"partition {self.number} is owned under epoch {current}, not {broker_epoch}"
                if current
                else f"nobody has claimed partition {self.number}",
                epoch=str(current),
                owner=self.memory.claim.address,
            )

    @property
    def is_open(self) -> bool:
        """False between a fault and the reopening that heals it."""
        return self._memory is not None

    @property
    def memory(self) -> Memory:
        """What the partition knows; raises PartitionFaulty while it is not open."""
        if self._memory is None:
            raise self._faulty()
        return self._memory

    def now_ms(self) -> int:
        return self._time.now_ms(self._clock.wall_ms(), self._clock.monotonic_ms())

    def confirm_time(self) -> None:
        """An operator says that the time is right after a jump: deleting goes on."""
        self._time.confirm()

    @property
    def next_deadline_ms(self) -> int | None:
        """When `ExpireDue` would find something; None if nothing waits."""
        return self._deadlines.earliest_ms()

    @property
    def reservations(self) -> int:
        """Deadlines that are running, nack delays included."""
        return self._deadlines.total

    @property
    def driven(self) -> bool:
        """Whether the owner is connected and sees to what is due."""
        if self._memory is None:
            return False
        epoch = self._memory.counters.broker_epoch
        return any(watcher.broker_epoch == epoch for watcher in self._watchers)

    def reader(self) -> Reader:
        return self.memory.engine.reader()

    def watch(self, broker_epoch: int) -> Watcher:
        watcher = Watcher(broker_epoch)
        watcher.changed.set()
        self._watchers.add(watcher)
        return watcher

    def unwatch(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)
        if self._memory is not None and not self.driven:
            self._memory.handles.forget_trackers()
            # Nobody expires reservations now but sweeps (V1).
            earliest_ms = self._deadlines.earliest_ms()
            if earliest_ms is not None:
                self.wakeups.scan_begins(Table.DEADLINES)
                self._due(Table.DEADLINES, earliest_ms)

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

    def _due(self, table: Table, due_ms: int) -> None:
        if self.wakeups.added(table, due_ms):
            self.due_earlier.set()

    def _listen_for_lifecycle(self) -> None:
        """Lifecycle that falls silent is an alarm, or a fault if the settings say so (L4)."""
        silent_ms = self._clock.monotonic_ms() - self.sweep_lease.heard_ms
        before = self.health.has(FaultReason.LIFECYCLE_SILENT)
        silent = self._silence.after_ms > 0 and silent_ms > self._silence.after_ms
        if silent == before:
            return
        if silent:
            _log.error("lifecycle is silent", extra={"partition": self.number, "ms": silent_ms})
            _silences.add(1)
            self.health.add(
                FaultReason.LIFECYCLE_SILENT,
                f"no sweeper was heard of for {silent_ms} ms",
                self.now_ms(),
                alarm=not self._silence.is_fault,
            )
        else:
            self.health.clear(FaultReason.LIFECYCLE_SILENT)
        self._tell_health()

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
        unit = self._unit()
        with span(_tracer, "storage commit", links=_links(frames)) as commit:
            results = [await self._apply_frame(unit, frame) for frame in frames]
            batch = unit.journal.finish()
            if len(batch):
                unit.count()
                ledger.put_counters(batch, unit.memory.counters)
                await unit.memory.engine.commit(batch)
                self.commits += 1
            commit.set_attribute("tidemark.commit.bytes", batch.bytes_approx)
        # Results first: who waits for them wakes first, so that results and events share a frame.
        for frame, answer in zip(frames, results, strict=True):
            if not frame.results.done():
                frame.results.set_result(answer)
        self._committed(unit)
        _commit_seconds.record((self._clock.monotonic_ns() - started_ns) / 1e9)
        _commit_operations.record(sum(len(frame.operations) for frame in frames))

    def _unit(self) -> Unit:
        now_ms = self.now_ms()
        memory = self.memory
        return Unit(
            memory,
            BatchJournal(now_ms, self._deadlines, memory.counters.record),
            self.number,
            self.identity.partitions,
            now_ms,
            self._disk_full,
            self.health.refusal(self.number),
            self._time_refusal(),
        )

    def _time_refusal(self) -> TidemarkError | None:
        if not self._time.suspicious:
            return None
        return PartitionFaulty(
            f"the clock of partition {self.number} jumped ahead: nothing is deleted until its "
            "time is confirmed",
            partition=str(self.number),
        )

    async def _apply_frame(self, unit: Unit, frame: _Frame) -> list[Result]:
        try:
            self.check_epoch(frame.broker_epoch)
        except Fenced as error:
            return [error] * len(frame.operations)
        if not tracing_enabled():
            return [await _apply(unit, operation) for operation in frame.operations]
        results: list[Result] = []
        callers = frame.callers or [""] * len(frame.operations)
        for operation, caller in zip(frame.operations, callers, strict=True):
            context = context_from_traceparent(caller) if caller else None
            with span(_tracer, f"storage {type(operation).__name__.lower()}", context=context):
                results.append(await _apply(unit, operation))
        return results

    def _committed(self, unit: Unit) -> None:
        """The commit is durable: keep what may be needed again, and tell what is new."""
        for key, body in unit.journal.bodies.items():
            unit.memory.bodies.add(key, body)
        for key in unit.journal.deleted_bodies:
            unit.memory.bodies.discard(key)
        unit.memory.producers.trim()
        for table, time_ms in unit.journal.indexed:
            unit.memory.lower_mark(table, time_ms)
            self._due(table, time_ms)
        earliest_ms = self._deadlines.earliest_ms()
        epoch = unit.memory.counters.broker_epoch
        for watcher in self._watchers:
            watcher.ready.update(unit.journal.ready_queues)
            moved = watcher.deadline_moved(earliest_ms, unit.now_ms)
            watcher.next_deadline_changed = watcher.next_deadline_changed or moved
            if watcher.ready or moved or watcher.broker_epoch != epoch:
                watcher.changed.set()

    # --- faults --------------------------------------------------------------------------------

    async def _recover(self, frames: list[_Frame], error: Exception) -> None:
        """Answer those who wait, drop all memory, and open the engine again."""
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
        memory, self._memory = self._memory, None
        if memory is not None:
            await memory.engine.close()
        self._answer_all(self._frames, self._faulty())
        self._frames = []
        await self._reopen()

    async def _reopen(self) -> None:
        wait_ms = _REOPEN_MS_MIN
        while not self._stopping.is_set():
            try:
                await self._load()
            except (TidemarkError, OSError) as error:
                self.health.add(FaultReason.OPEN_FAILED, str(error), self.now_ms())
                _log.warning("not reopened", extra={"partition": self.number, "why": str(error)})
                with suppress(TimeoutError):
                    await self._clock.wait_for(self._stopping.wait(), wait_ms)
                wait_ms = min(2 * wait_ms, _REOPEN_MS_MAX)
                continue
            self.health.clear(FaultReason.COMMIT_FAILED, FaultReason.OPEN_FAILED)
            self.health.clear(FaultReason.DATA_CORRUPT)
            self._tell_health()
            return

    async def _load(self) -> None:
        """Read what every operation may need: counters, claim, topics, deadlines. No queue."""
        engine = await self._engines.open(self.identity)
        try:
            counters, claim = await ledger.load(engine)
            topics = Topics()
            await topics.load(engine)
            self._deadlines = Deadlines()
            for table in (Table.DEADLINES, Table.DELAYS):
                await self._read_deadlines(engine, table)
        except BaseException:
            await engine.close()
            raise
        handles = Handles(engine, topics, counters)
        self._memory = Memory(engine, counters, claim, topics, handles, Producers(engine))
        committed_ms, suspicious = max(counters.time_ms, self.now_ms()), self._time.suspicious
        self._time = PartitionTime(committed_ms, self._clock.wall_ms(), self._clock.monotonic_ms())
        self._time.suspicious = suspicious
        self._check_disk()

    async def _read_deadlines(self, engine: Engine, table: Table) -> None:
        start = b""
        while page := await engine.scan(table, start, None, limit=_PAGE_ROWS):
            for key, _ in page:
                self._deadlines.add(read_u64(key))
            start = successor(page[-1][0])

    # --- housekeeping --------------------------------------------------------------------------

    async def _housekeep(self) -> None:
        while True:
            await self._clock.sleep_ms(HOUSEKEEPING_MS)
            await self.housekeep_once()

    async def housekeep_once(self) -> None:
        """Look at the disk and for lifecycle, unload idle queues, forget old producers."""
        if self._memory is None:
            return
        self._check_disk()
        self._listen_for_lifecycle()
        with suppress(TidemarkError):  # whoever closes or reopens the partition says so
            await self.submit([KeepHouse()])

    def _check_disk(self) -> None:
        usage = self.memory.engine.usage()
        full = usage.disk_free_bytes < self._disk_free_bytes_min
        if full != self._disk_full:
            _log.warning(
                "the disk is past its watermark" if full else "the disk has room again",
                extra={"partition": self.number, "free_bytes": usage.disk_free_bytes},
            )
        self._disk_full = full

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


async def _apply(unit: Unit, operation: Operation) -> Result:
    try:
        return await HANDLERS[type(operation)](unit, operation)
    except DataCorrupt:
        raise
    except TidemarkError as error:
        return error


def _links(frames: list[_Frame]) -> Iterator[Link | None]:
    """A commit belongs to many traces: it is linked to each operation in it."""
    if tracing_enabled():
        for frame in frames:
            for caller in frame.callers:
                yield link_from_traceparent(caller)
