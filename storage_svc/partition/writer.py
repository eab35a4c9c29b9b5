"""The writer of a partition: turns all frames that have gathered into one durable commit.

Owns the order of operations. Nothing is answered before the commit of the batch it was computed in
is durable. What the operations mean is in `operations/`; `partition.py` recovers from a
commit that fails.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from storage_svc.lifecycle.lifecycle_watch import LifecycleWatch
from storage_svc.loading.deadline_pages import read_deadlines
from storage_svc.operations.acks import AckReservations
from storage_svc.operations.expire import ExpireDue
from storage_svc.operations.operation import Operation
from storage_svc.operations.publish import Append, AppendRuns
from storage_svc.operations.read_ahead import read_ahead
from storage_svc.operations.reserve import Reserved
from storage_svc.operations.standing import hand_out_standing
from storage_svc.partition.commit import CommitContext, count_fenced
from storage_svc.partition.counters import put_counters
from storage_svc.partition.exchange_events import ConnectedExchanges
from storage_svc.partition.spans import CommitSpans, refused
from storage_svc.partition.state import PartitionState
from storage_svc.turns import TURN_OPERATIONS_MAX, give_way, in_turns
from tidemark.clock import Clock
from tidemark.errors import DataCorrupt, Fenced, TidemarkError
from tidemark.telemetry import current_traceparent, histogram, is_sampled, seconds
from tidemark.telemetry.metrics import BYTES, COUNTS


class CommitBounds(NamedTuple):
    """What one commit takes: the rest waits for the next, so that no commit takes long."""

    body_bytes: int
    operations: int
    """A frame with more is cut into parts."""


EMBEDDED = CommitBounds(body_bytes=8 * 1024 * 1024, operations=1000)
SHARED = CommitBounds(body_bytes=1024 * 1024, operations=250)
"""On a server that others use: it does nothing else while it writes the rows of a commit, some two
to four of them per operation."""

R = TypeVar("R")

_commit_seconds = seconds("tidemark.storage.commit.duration", "From applying to durable")
_commit_operations = histogram(
    "tidemark.storage.commit.operations", "Operations that gathered for a commit", COUNTS
)
_commit_bytes = histogram("tidemark.storage.commit.size", "What a commit writes", BYTES, unit="By")


def check_broker_epoch(state: PartitionState, broker_epoch: int | None) -> None:
    """Raise Fenced for a broker that does not hold the partition, or no longer does."""
    current = state.counters.broker_epoch
    if broker_epoch is not None and (broker_epoch != current or not current):
        count_fenced("broker")
        number = state.engine.identity.partition
        raise Fenced(
            f"partition {number} is held under epoch {current}, not {broker_epoch}"
            if current
            else f"no broker has claimed partition {number}",
            epoch=str(current),
            owner=state.claim.address,
        )


@dataclass(slots=True)
class Frame:
    """Operations that arrived together, and the future of their results."""

    operations: Sequence[Operation[Any]]
    callers: Sequence[str]  # trace contexts, one per operation
    broker_epoch: int | None  # None: not from a broker
    results: asyncio.Future[list[Any]]
    body_bytes: int
    steps: int
    """How many operations it counts for: some are for many reservations."""

    def fail(self, error: TidemarkError) -> None:
        if not self.results.done():
            self.results.set_exception(error)


class Writer:
    """The frames of one partition, and how a commit applies them."""

    def __init__(
        self,
        partition: int,
        clock: Clock,
        exchanges: ConnectedExchanges,
        lifecycle: LifecycleWatch,
    ) -> None:
        self.commits = 0
        self.bounds = EMBEDDED
        """Set when the partition opens its engine."""
        self.last_commit = 0
        """The highest number of a commit that this process has seen durable."""
        self._partition = partition
        self._clock = clock
        self._exchanges = exchanges
        self._lifecycle = lifecycle
        self._frames: list[Frame] = []
        self._arrived = asyncio.Event()
        self._stopping = False

    def submit(
        self, operations: Sequence[Operation[R]], callers: Sequence[str], broker_epoch: int | None
    ) -> asyncio.Future[list[R | TidemarkError]]:
        """Queue operations for the next commit; their results come in the same order."""
        loop = asyncio.get_running_loop()
        results: asyncio.Future[list[R | TidemarkError]] = loop.create_future()
        if not callers and (caller := current_traceparent()):
            callers = [caller] * len(operations)
        body_bytes, steps = _size(operations)
        if steps <= self.bounds.operations:
            self._add(Frame(operations, callers, broker_epoch, results, body_bytes, steps))
            return results
        parts = []
        operations_max = max(1, len(operations) * self.bounds.operations // steps)
        for start in range(0, len(operations), operations_max):
            end = start + operations_max
            some = operations[start:end]
            part = Frame(some, callers[start:end], broker_epoch, loop.create_future(), *_size(some))
            self._add(part)
            parts.append(part.results)
        asyncio.gather(*parts, return_exceptions=True).add_done_callback(partial(_join, results))
        return results

    def _add(self, frame: Frame) -> None:
        self._frames.append(frame)
        self._arrived.set()

    def stop(self) -> None:
        """End `next_frames` once everything that was submitted is taken."""
        self._stopping = True
        self._arrived.set()

    def fail_submitted(self, error: TidemarkError) -> None:
        """Fail the frames that no commit has taken yet."""
        for frame in self._frames:
            frame.fail(error)
        self._frames = []

    async def next_frames(self) -> list[Frame]:
        """What the next commit takes: all frames, up to a bound. Empty at the end."""
        while not self._frames:
            if self._stopping:
                return []
            self._arrived.clear()
            await self._arrived.wait()
        taken = body_bytes = steps = 0
        for frame in self._frames:
            if taken and body_bytes + frame.body_bytes > self.bounds.body_bytes:
                break
            if taken and steps + frame.steps > self.bounds.operations:
                break
            taken += 1
            body_bytes += frame.body_bytes
            steps += frame.steps
        frames, self._frames = self._frames[:taken], self._frames[taken:]
        return frames

    async def write(self, commit: CommitContext, frames: list[Frame]) -> None:
        """Apply frames, make the commit durable, then answer and report the events.

        Raises, and answers nothing, if the commit fails.
        """
        started_ns = self._clock.monotonic_ns()
        callers = [caller for each in frames for caller in each.callers]
        with CommitSpans(self._partition, callers) as traced:
            if commit.state.deadlines.needs_page:
                await read_deadlines(commit.engine, commit.state.deadlines)
            if commit.engine.storage_epoch:
                await read_ahead(commit, [each for frame in frames for each in frame.operations])
            results = await self._apply_frames(commit, frames, traced)
            if self._expires_due(commit):
                await ExpireDue().apply(commit)
            handed_out = await self._hand_out(commit)
            batch = await commit.journal.finish(commit.engine)
            commit.state.producers.write(batch)
            if len(batch):
                commit.count()
                put_counters(batch, commit.counters)
                commit.state.numbers.write(batch)
                with traced.commit():
                    await commit.engine.commit(batch)
                self.commits += 1
                self.last_commit = commit.state.numbers.last = commit.counters.commit
            else:
                await commit.engine.verify()
        # Results first: their callers wake first, so that results and events share a frame.
        for frame, answer in zip(frames, results, strict=True):
            if not frame.results.done():
                frame.results.set_result(answer)
        self._committed(commit, handed_out)
        if not len(batch):  # nothing was written: it would distort the figures of real commits
            return
        _commit_seconds.record((self._clock.monotonic_ns() - started_ns) / 1e9)
        _commit_operations.record(sum(frame.steps for frame in frames))
        _commit_bytes.record(batch.bytes_approx)

    def _expires_due(self, commit: CommitContext) -> bool:
        """Every commit expires what is due while a broker is connected; else sweeps do it (V1)."""
        connected = self._exchanges.includes(commit.counters.broker_epoch)
        return connected and commit.state.deadlines.is_due(commit.now_ms)

    async def _hand_out(self, commit: CommitContext) -> list[Reserved]:
        """Results of standing reserves, which only a connected broker can receive."""
        if not commit.journal.ready_queues and not commit.ended_standing:
            return []
        connected = self._exchanges.includes(commit.counters.broker_epoch)
        return await hand_out_standing(commit) if connected else []

    async def _apply_frames(
        self, commit: CommitContext, frames: list[Frame], traced: CommitSpans
    ) -> list[list[Any]]:
        results = []
        turn_operations = 0
        for frame in frames:
            if turn_operations >= TURN_OPERATIONS_MAX:
                await give_way()
                turn_operations = 0
            results.append(await self._apply_frame(commit, frame, traced))
            turn_operations += len(frame.operations)
        return results

    async def _apply_frame(
        self, commit: CommitContext, frame: Frame, traced: CommitSpans
    ) -> list[Any]:
        try:
            check_broker_epoch(commit.state, frame.broker_epoch)
        except Fenced as error:
            return [error] * len(frame.operations)
        results: list[Any] = []
        if not any(map(is_sampled, frame.callers)):
            if len(frame.operations) <= TURN_OPERATIONS_MAX:
                return [await _apply(commit, operation) for operation in frame.operations]
            async for part in in_turns(frame.operations):
                results += [await _apply(commit, operation) for operation in part]
            return results
        for operation, caller in zip(frame.operations, frame.callers, strict=True):
            with traced.operation(operation, caller) as span:
                results.append(await _apply(commit, operation))
                refused(span, results[-1])
        return results

    def _committed(self, commit: CommitContext, handed_out: list[Reserved]) -> None:
        """The commit is durable: update the caches and report what is new."""
        state, journal = commit.state, commit.journal
        for key, body in journal.bodies.items():
            state.bodies.add(key, body)
        for key in journal.deleted_bodies:
            state.bodies.discard(key)
        state.producers.trim()
        for kind, topic, time_ms in journal.ages.added:
            state.ages.added(kind, topic, time_ms)
        for lmq_name in journal.loaded_briefly:
            state.handles.drop_untracked(lmq_name)
        for table, due_ms in journal.added_due:
            state.due.added(table, due_ms)
            self._lifecycle.due(table, due_ms)
        self._exchanges.committed(
            state.counters.broker_epoch,
            handed_out,
            journal.ready_queues,
            journal.expired,
            state.deadlines.earliest_ms(),
            commit.now_ms,
        )


def _size(operations: Sequence[object]) -> tuple[int, int]:
    """The bytes of bodies, and how many operations they count for."""
    body_bytes, steps = 0, len(operations)
    for each in operations:
        if isinstance(each, Append):
            body_bytes += len(each.body)
        elif isinstance(each, AppendRuns):
            body_bytes += sum(len(append.body) for append in each.appends)
            steps += len(each.appends) - 1
        elif isinstance(each, AckReservations):
            steps += len(each.receipts) - 1
    return body_bytes, steps


def _join(results: asyncio.Future[list[Any]], parts: asyncio.Future[list[Any]]) -> None:
    """The results of a frame that was cut; if a part has failed, it fails as a whole."""
    if results.done() or parts.cancelled():  # its caller may have been cancelled
        return
    joined: list[Any] = []
    for part in parts.result():
        if isinstance(part, BaseException):
            results.set_exception(part)
            return
        joined += part
    results.set_result(joined)


async def _apply(commit: CommitContext, operation: Operation[R]) -> R | TidemarkError:
    try:
        return await operation.apply(commit)
    except DataCorrupt:
        raise
    except Fenced as error:
        count_fenced("client")
        return error
    except TidemarkError as error:
        return error
