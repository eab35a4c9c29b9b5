"""The commits of one partition, one after the other: the frames of each, and where it runs.

A commit takes all frames that have gathered, up to a bound. Nearly every commit is applied without
waiting for anything. Those of all partitions of a node are applied in one turn of the event loop,
step by step, and end in one turn after the sync that they share: they need no separate task, future
or wake-up. A commit that has to wait while it is applied continues in the task of its partition, so
that it delays no other partition; so does the recovery from a commit that failed.
"""

import asyncio
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, Generic, TypeVar

from storage_svc.engines.engine import CommitEnded
from storage_svc.operations.operation import Operation
from storage_svc.partition.commit import CommitContext
from storage_svc.partition.frames import EMBEDDED, Frame, Requester
from storage_svc.partition.writer import Prepared, Writer
from storage_svc.turns import STEP_END, CommonTurns, Step
from tidemark.errors import TidemarkError

R = TypeVar("R")
T = TypeVar("T")

Recover = Callable[[Sequence[Frame], Exception], Coroutine[Any, Any, None]]
"""Fails the frames of a commit that failed, and opens the partition again."""


class CommitLoop:
    """The frames of one partition, and its commit under way. `run` is the task of the partition."""

    def __init__(
        self,
        writer: Writer,
        turns: CommonTurns,
        *,
        new_commit: Callable[[], CommitContext],
        recover: Recover,
        committed: Callable[[], None],
    ) -> None:
        """`committed` is called after every commit, before the next begins."""
        self.bounds = EMBEDDED
        """Set when the partition opens its engine."""
        self._writer = writer
        self._turns = turns
        self._new_commit = new_commit
        self._recover = recover
        self._committed = committed
        self._frames: list[Frame] = []
        self._under_way = False
        """Whether a commit was begun that has not ended, in a turn or in the task."""
        self._taken: Sequence[Frame] = ()
        """The frames of the commit under way."""
        self._preparing: Coroutine[Any, Any, Prepared] | None = None
        self._prepared: Prepared | None = None
        """The same commit while it is applied in turns, and from then on."""
        self._turn_asked = False
        self._waits = False
        """Whether the task waits for work: commits begin in turns."""
        self._work: Coroutine[Any, Any, None] | None = None
        """The next work of the task."""
        self._wakeup = asyncio.Event()
        self._stopping = False
        # Bound once: a partition has one commit under way, so that its steps need no arguments.
        self._begin_step: Step = self._begin_turn
        self._apply_step: Step = self._apply
        self._hand_over_step: Step = self._hand_over
        self._answer_step: Step = self._answer
        self._report_step: Step = self._report
        self._on_ended: CommitEnded = self._ended

    def submit(
        self,
        operations: Sequence[Operation[R]],
        callers: Sequence[str],
        broker_epoch: int | None,
        requester: Requester[R],
    ) -> None:
        """Queue operations for the next commit."""
        frame = Frame(operations, callers, broker_epoch, requester)
        if frame.steps <= self.bounds.operations:
            self._frames.append(frame)
        else:
            self._frames += frame.parts(self.bounds.operations)
        if self._waits and not (self._under_way or self._turn_asked):
            self._turn_asked = True
            self._turns.ask(self._begin_step)

    def stop(self) -> None:
        """End `run` once everything that was submitted is answered."""
        self._stopping = True
        self._wakeup.set()

    def fail_submitted(self, error: TidemarkError) -> None:
        """Fail the frames that no commit has taken yet."""
        frames, self._frames = self._frames, []
        for frame in frames:
            frame.fail(error)

    async def run(self) -> None:
        """Do work that cannot be done in turns, until `stop`. Nothing is committed afterwards."""
        try:
            while await self._wait_for_work():
                work, self._work = self._work, None
                if work is not None:
                    await work
                self._under_way = False
                self._taken, self._preparing, self._prepared = (), None, None
                self._committed()
        finally:
            self._waits = False
            if self._work is not None:
                self._work.close()

    async def _wait_for_work(self) -> bool:
        """False at the end."""
        self._waits = True
        self._ask_turn()  # for frames that have arrived since
        while self._work is None:
            if self._stopping and not self._under_way and not self._frames:
                return False
            self._wakeup.clear()
            await self._wakeup.wait()
        self._waits = False
        return True

    # --- turns ---------------------------------------------------------------------------------

    def _ask_turn(self) -> None:
        if self._frames and self._waits and not (self._under_way or self._turn_asked):
            self._turn_asked = True
            self._turns.ask(self._begin_step)

    def _begin_turn(self) -> "Step | None":
        """Begin a commit of the frames that have gathered."""
        self._turn_asked = False
        if self._under_way or not self._waits or not self._frames:
            return None
        self._under_way = True
        frames = self._taken = self._take()
        try:
            commit = self._new_commit()
            traced = frames[0].callers if len(frames) == 1 else any(each.callers for each in frames)
            if commit.state.is_shared or traced:
                # Its reads are trips to other processes, or it has spans that last until its end.
                self._do_in_task(self._write(commit, frames))
                return None
            self._preparing = self._writer.prepare(commit, frames)
            return self._apply_step
        except Exception as error:
            self._do_in_task(self._recover(frames, error))
            return None

    def _apply(self) -> "Step | None":
        """A step of a commit."""
        preparing = self._preparing
        assert preparing is not None, "it was begun"
        try:
            waits_for = preparing.send(None)
        except StopIteration as applied:
            self._prepared = applied.value
            self._preparing = None
            return self._hand_over_step
        except Exception as error:
            self._do_in_task(self._recover(self._taken, error))
            return None
        if waits_for is STEP_END:
            return self._apply_step
        self._do_in_task(self._finish(self._taken, _Started(preparing, waits_for)))
        return None

    def _take(self) -> list[Frame]:
        """The frames of the next commit: all that wait, up to a bound, and one at least."""
        if len(self._frames) == 1:
            frames, self._frames = self._frames, []
            return frames
        taken = body_bytes = steps = 0
        body_bytes_max, steps_max = self.bounds
        for frame in self._frames:
            body_bytes += frame.body_bytes
            steps += frame.steps
            if taken and (body_bytes > body_bytes_max or steps > steps_max):
                break
            taken += 1
        frames, self._frames = self._frames[:taken], self._frames[taken:]
        return frames

    def _hand_over(self) -> "Step | None":
        prepared = self._prepared
        assert prepared is not None, "it was applied"
        if not prepared.batch.operations:
            return self._answer_step
        try:
            began = prepared.context.engine.begin_commit(prepared.batch, self._on_ended)
        except Exception as error:
            self._do_in_task(self._recover(self._taken, error))
            return None
        if not began:
            self._do_in_task(self._finish(self._taken, prepared))
        return None

    def _ended(self, error: Exception | None) -> None:
        """Those of one sync are called in one turn: they share the next one as well."""
        if error is None:
            self._turns.ask(self._answer_step)
        elif self._waits:
            self._do_in_task(self._recover(self._taken, error))

    def _answer(self) -> "Step | None":
        """The commit is durable."""
        prepared = self._prepared
        if not self._waits or prepared is None:  # the task was cancelled: the partition has ended
            return None
        try:
            self._writer.answer(prepared)
        except Exception as error:
            self._do_in_task(self._recover(self._taken, error))
            return None
        return self._report_step

    def _report(self) -> None:
        assert self._prepared is not None, "it was answered"
        try:
            self._writer.report(self._prepared)
        except Exception as error:
            self._do_in_task(self._recover(self._taken, error))
            return
        self._under_way = False
        self._taken, self._prepared = (), None  # they must not stay in memory until the next commit
        self._committed()
        if self._frames:
            self._ask_turn()
        if self._stopping:
            self._wakeup.set()

    # --- in the task ---------------------------------------------------------------------------

    def _do_in_task(self, work: Coroutine[Any, Any, None]) -> None:
        self._work = work
        self._wakeup.set()

    async def _write(self, commit: CommitContext, frames: Sequence[Frame]) -> None:
        try:
            await self._writer.write(commit, frames)
        except Exception as error:
            await self._recover(frames, error)

    async def _finish(
        self, frames: Sequence[Frame], applied: "Prepared | _Started[Prepared]"
    ) -> None:
        """Continue a commit that has to wait."""
        try:
            prepared = await applied if isinstance(applied, _Started) else applied
            if len(prepared.batch):
                await prepared.context.engine.commit(prepared.batch)
            self._writer.answer(prepared)
            self._writer.report(prepared)
        except Exception as error:
            await self._recover(frames, error)


class _Started(Generic[T]):
    """The rest of a coroutine whose first step was made outside of any task."""

    __slots__ = ("_steps", "_waits_for")

    def __init__(self, steps: Coroutine[Any, Any, T], waits_for: Any) -> None:
        self._steps = steps
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, T]:
        steps, waits_for = self._steps, self._waits_for
        try:
            while True:
                if waits_for is STEP_END:
                    waits_for = steps.send(None)
                    continue
                try:
                    got = yield waits_for
                except BaseException as error:
                    waits_for = steps.throw(error)
                else:
                    waits_for = steps.send(got)
        except StopIteration as ended:
            result: T = ended.value
            return result
