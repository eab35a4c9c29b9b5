"""The writer of a partition: turns frames that have gathered into one durable commit.

Owns the order of operations. Nothing is answered before the commit of the batch it was computed in
is durable. The meaning of operations is in `operations/`; `commit_loop.py` decides which frames a
commit takes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from storage_svc.engines.engine import Batch
from storage_svc.lifecycle.lifecycle_watch import LifecycleWatch
from storage_svc.loading.deadline_pages import read_deadlines
from storage_svc.operations.expire import ExpireDue
from storage_svc.operations.operation import Operation
from storage_svc.operations.read_ahead import read_ahead
from storage_svc.operations.reserve import Reserved
from storage_svc.operations.standing import hand_out_standing
from storage_svc.partition.commit import CommitContext, count_fenced
from storage_svc.partition.commit_figures import CommitFigures
from storage_svc.partition.counters import put_counters
from storage_svc.partition.exchange_events import ConnectedExchanges
from storage_svc.partition.frames import Frame
from storage_svc.partition.spans import CommitSpans, refused
from storage_svc.partition.state import PartitionState
from storage_svc.turns import STEP_END, TURN_OPERATIONS_MAX, give_way, in_turns
from tidemark.clock import Clock
from tidemark.errors import CommitOutcomeUnknown, DataCorrupt, Fenced, TidemarkError
from tidemark.telemetry import is_sampled

R = TypeVar("R")


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


class Prepared(NamedTuple):
    """A commit that was applied: the rows to write, and the results to report once durable."""

    context: CommitContext
    frames: Sequence[Frame]
    results: Sequence[Sequence[Any]]
    """Those of each frame."""
    handed_out: Sequence[Reserved]
    batch: Batch
    """Empty if there is nothing to write."""
    operations: int
    started_ns: int


class Writer:
    """How a commit of one partition applies frames, and reports them once it is durable."""

    def __init__(
        self,
        partition: int,
        clock: Clock,
        exchanges: ConnectedExchanges,
        lifecycle: LifecycleWatch,
        figures: CommitFigures,
    ) -> None:
        self.commits = 0
        self.last_commit = 0
        """The highest number of a commit that this process has seen durable."""
        self._partition = partition
        self._clock = clock
        self._exchanges = exchanges
        self._lifecycle = lifecycle
        self._figures = figures

    async def write(self, commit: CommitContext, frames: Sequence[Frame]) -> None:
        """Apply frames, make the commit durable, then report it, with spans of traced operations.

        Raises, and answers nothing, if the commit fails.
        """
        callers = [caller for each in frames for caller in each.callers if is_sampled(caller)]
        with CommitSpans(self._partition, _operations(frames), callers) as traced:
            prepared = await self.prepare(commit, frames, traced)
            if len(prepared.batch):
                with traced.commit():
                    await commit.engine.commit(prepared.batch)
        self.answer(prepared)
        self.report(prepared)

    async def prepare(
        self, commit: CommitContext, frames: Sequence[Frame], traced: CommitSpans | None = None
    ) -> Prepared:
        """Apply frames: the batch is complete, and nothing is answered yet. Without `traced` in
        steps, for common turns (ADR 40)."""
        started_ns = self._clock.monotonic_ns()
        state, journal = commit.state, commit.journal
        if state.deadlines.needs_page:
            await read_deadlines(commit.engine, state.deadlines)
        if state.is_shared:
            await read_ahead(commit, [each for frame in frames for each in frame.operations])
        frame, operations = frames[0], frames[0].operations
        results: Sequence[Sequence[Any]]
        if (  # as most commits of one of many partitions
            len(frames) == len(operations) == 1
            and traced is None
            and 0 != frame.broker_epoch == state.counters.broker_epoch
        ):
            results = ((await _apply(commit, operations[0]),),)
        else:
            results = await self._apply_frames(commit, frames, traced)
        # Every commit expires due reservations while a broker is connected; else sweeps do it (V1).
        if state.deadlines.is_due(commit.now_ms) and self._is_connected(commit):
            await ExpireDue().apply(commit)
        handed_out: Sequence[Reserved] = ()
        if journal.ready_queues or commit.ended_standing:
            if traced is None:
                await STEP_END
            # Only a connected broker can receive the results of standing reserves.
            if self._is_connected(commit):
                handed_out = await hand_out_standing(commit)
        if traced is None:
            await STEP_END
        batch = await journal.finish(commit.engine)
        state.producers.write(batch)
        if batch.operations:
            commit.count()
            put_counters(batch, commit.counters)
            state.numbers.write(batch)
        else:
            await commit.engine.verify()
        steps = frame.steps if len(frames) == 1 else _operations(frames)
        return Prepared(commit, frames, results, handed_out, batch, steps, started_ns)

    def _is_connected(self, commit: CommitContext) -> bool:
        """Whether the broker that holds the partition is connected."""
        return self._exchanges.includes(commit.counters.broker_epoch)

    def answer(self, prepared: Prepared) -> None:
        """The commit is durable: answer its operations.

        Raises CommitOutcomeUnknown if that fails, for the frames that were not answered.
        """
        commit = prepared.context
        if prepared.batch.operations:
            self.commits += 1
            self.last_commit = commit.state.numbers.last = commit.counters.commit
        try:
            for frame, answer in zip(prepared.frames, prepared.results, strict=True):
                frame.answer(answer)
        except Exception as error:
            raise CommitOutcomeUnknown("a commit was not answered") from error

    def report(self, prepared: Prepared) -> None:
        """After the answers: the result of a reserve comes before messages that it hands out while
        it stands. Raises CommitOutcomeUnknown if that fails."""
        try:
            self._committed(prepared.context, prepared.handed_out)
        except Exception as error:
            raise CommitOutcomeUnknown("a commit was not reported") from error
        if prepared.batch.operations:  # others would distort the figures of real commits
            took_ns = self._clock.monotonic_ns() - prepared.started_ns
            self._figures.add(took_ns, prepared.operations, prepared.batch.bytes_approx)

    async def _apply_frames(
        self, commit: CommitContext, frames: Sequence[Frame], traced: CommitSpans | None
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
        self, commit: CommitContext, frame: Frame, traced: CommitSpans | None
    ) -> list[Any]:
        try:
            check_broker_epoch(commit.state, frame.broker_epoch)
        except Fenced as error:
            return [error] * len(frame.operations)
        results: list[Any] = []
        if traced is None or not frame.callers:
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

    def _committed(self, commit: CommitContext, handed_out: Sequence[Reserved]) -> None:
        """The commit is durable: update the caches and report new events."""
        state, journal = commit.state, commit.journal
        for key, body in journal.bodies.items():
            state.bodies.add(key, body)
        for key in journal.deleted_bodies:
            state.bodies.discard(key)
        state.producers.trim()
        if not journal.ages.is_empty:
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


def _operations(frames: Sequence[Frame]) -> int:
    return sum([each.steps for each in frames])


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
