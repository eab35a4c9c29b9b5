"""The writer of a partition: turns frames that have gathered into one durable commit.

Owns the order of operations. Nothing is answered before the commit of the batch it was computed in
is durable. The meaning of operations is in `operations/`; `commit_loop.py` decides which frames a
commit takes.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

from storage_svc.lifecycle.lifecycle_watch import LifecycleWatch
from storage_svc.loading.deadline_pages import read_deadlines
from storage_svc.operations.expire import ExpireDue
from storage_svc.operations.operation import Operation
from storage_svc.operations.read_ahead import read_ahead
from storage_svc.operations.standing import hand_out_plain, hand_out_rest
from storage_svc.partition.commit import CommitContext, count_fenced
from storage_svc.partition.commit_figures import CommitFigures
from storage_svc.partition.exchange_events import ConnectedExchanges
from storage_svc.partition.frames import Frame
from storage_svc.partition.spans import CommitSpans, refused
from storage_svc.partition.state import PartitionState
from storage_svc.turns import TURN_OPERATIONS_MAX, give_way, in_turns
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


class Writer:
    """How a commit of one partition applies frames, and reports them once it is durable.

    A commit is made in three stages: `apply`, `hand_out` and `complete`. Then its batch is
    complete, and nothing is answered yet.
    """

    def __init__(
        self,
        partition: int,
        exchanges: ConnectedExchanges,
        lifecycle: LifecycleWatch,
        figures: CommitFigures,
    ) -> None:
        self.commits = 0
        self.last_commit = 0
        """The highest number of a commit that this process has seen durable."""
        self._partition = partition
        self._exchanges = exchanges
        self._lifecycle = lifecycle
        self._figures = figures

    async def write(self, commit: CommitContext) -> None:
        """Make a commit durable, then report it, with spans of traced operations.

        Raises, and answers nothing, if the commit fails.
        """
        callers = [
            caller for each in commit.frames for caller in each.callers if is_sampled(caller)
        ]
        with CommitSpans(self._partition, commit.steps, callers) as traced:
            await self.apply(commit, traced)
            await self.hand_out(commit)
            await self.complete(commit)
            batch = commit.journal.batch
            if len(batch):
                with traced.commit():
                    await commit.engine.commit(batch)
        self.end(commit)

    async def apply(self, commit: CommitContext, traced: CommitSpans | None = None) -> None:
        """Apply the frames of a commit, and expire what is due."""
        state, frames = commit.state, commit.frames
        deadlines = state.deadlines
        if deadlines.horizon_ms is not None and deadlines.needs_page:
            await read_deadlines(commit.engine, deadlines)
        if state.is_shared:
            await read_ahead(commit, [each for frame in frames for each in frame.operations])
        frame = frames[0]
        if (  # as most commits of one of many partitions
            len(frames) == len(frame.operations) == 1
            and traced is None
            and 0 != frame.broker_epoch == state.counters.broker_epoch
        ):
            try:
                commit.results = ((await frame.operations[0].apply(commit),),)
            except TidemarkError as error:
                commit.results = ((_refusal(error),),)
        else:
            commit.results = await self._apply_frames(commit, frames, traced)
        # Every commit expires due reservations while a broker is connected; else sweeps do it (V1).
        if deadlines.is_due(commit.now_ms) and self._is_connected(commit):
            await ExpireDue().apply(commit)

    async def hand_out(self, commit: CommitContext) -> None:
        """Hand out what the commit has made ready to standing reserves."""
        if not self.hand_out_now(commit):
            await self.hand_out_rest(commit)

    def hand_out_now(self, commit: CommitContext) -> bool:
        """The same without waiting; False if not all of it is plain: then `hand_out_rest` does what
        is left. Only a connected broker can receive the results."""
        journal = commit.journal
        if not (journal.ready_queues or commit.ended_standing) or not self._is_connected(commit):
            return True
        commit.handed_out = hand_out_plain(commit)
        return not (journal.ready_queues or commit.ended_standing)

    async def hand_out_rest(self, commit: CommitContext) -> None:
        commit.handed_out = [*await hand_out_rest(commit), *commit.handed_out]

    async def complete(self, commit: CommitContext) -> None:
        """Complete the batch."""
        if not self.complete_now(commit):
            await self.complete_rest(commit)

    def complete_now(self, commit: CommitContext) -> bool:
        """The same without waiting; False if something has to be read or verified: then
        `complete_rest` does what is left."""
        journal = commit.journal
        if not journal.finish():
            return False
        commit.state.producers.write(journal.batch)
        if not journal.batch.operations:
            return False
        commit.count()
        return True

    async def complete_rest(self, commit: CommitContext) -> None:
        journal = commit.journal
        await journal.finish_ages(commit.engine)
        commit.state.producers.write(journal.batch)
        if journal.batch.operations:
            commit.count()
        else:
            await commit.engine.verify()

    def _is_connected(self, commit: CommitContext) -> bool:
        """Whether the broker that holds the partition is connected."""
        return self._exchanges.includes(commit.counters.broker_epoch)

    def end(self, commit: CommitContext) -> None:
        """The commit is durable: answer its operations, then report the rest. So the result of a
        reserve comes before messages that it hands out while it stands.

        Raises CommitOutcomeUnknown if that fails, for the frames that were not answered.
        """
        state, journal = commit.state, commit.journal
        batch = journal.batch
        if batch.operations:
            self.commits += 1
            self.last_commit = state.numbers.last = commit.counters.commit
            # Others would distort the figures of real commits.
            self._figures.add(commit.started_ns, commit.steps, batch.bytes_approx)
        try:
            frames, results = commit.frames, commit.results
            if len(frames) == 1:  # as in most commits of one of many partitions
                frames[0].answer(results[0])
            else:
                for frame, its_results in zip(frames, results, strict=True):
                    frame.answer(its_results)
            for key, body in journal.bodies.items():
                state.bodies.add(key, body)
            for key in journal.deleted_bodies:
                state.bodies.discard(key)
            if journal.age_entries is not None:
                for kind, topic, time_ms in journal.age_entries.added:
                    state.ages.added(kind, topic, time_ms)
            if journal.loaded_briefly:
                for lmq_name in journal.loaded_briefly:
                    state.handles.drop_untracked(lmq_name)
            if journal.added_due:
                for table, due_ms in journal.added_due:
                    state.due.added(table, due_ms)
                    self._lifecycle.due(table, due_ms)
            self._exchanges.committed(commit)
        except Exception as error:
            raise CommitOutcomeUnknown("a commit was not reported") from error

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


async def _apply(commit: CommitContext, operation: Operation[R]) -> R | TidemarkError:
    try:
        return await operation.apply(commit)
    except TidemarkError as error:
        return _refusal(error)


def _refusal(error: TidemarkError) -> TidemarkError:
    """The result of an operation that is refused. Raises for a fault of the partition."""
    if isinstance(error, DataCorrupt):
        raise error
    if isinstance(error, Fenced):
        count_fenced("client")
    return error
