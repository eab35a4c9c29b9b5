"""The commits of one partition, one after the other: the frames of each, and where it runs.

A commit takes all frames that have gathered, up to a bound. Nearly every commit is applied without
waiting for anything. Those of all partitions of a node are applied in one turn of the event loop,
step by step, and end in one turn after the sync that they share: they need no separate task, future
or wake-up. A commit that has to wait while it is applied continues in the task of its partition, so
that it delays no other partition; so does the recovery from a commit that failed.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from typing import Any

from storage_svc.engines.engine import CommitEnded
from storage_svc.partition.commit import CommitContext
from storage_svc.partition.frames import EMBEDDED, Frame
from storage_svc.partition.writer import Writer
from storage_svc.turns import CommonTurns, Step
from tidemark.errors import TidemarkError

Recover = Callable[[Sequence[Frame], Exception], Coroutine[Any, Any, None]]
"""Fails the frames of a commit that failed, and opens the partition again."""

Stage = Callable[[CommitContext], Awaitable[None]]
"""A part of the work on a commit, of the writer."""


class CommitLoop:
    """The frames of one partition, and its commit under way. `run` is the task of the partition."""

    def __init__(
        self,
        writer: Writer,
        turns: CommonTurns,
        *,
        new_commit: Callable[[Sequence[Frame]], CommitContext],
        recover: Recover,
        continue_erasing: Callable[[], None],
    ) -> None:
        """`continue_erasing` is called after every commit that leaves rows to be erased, before the
        next begins."""
        self.bounds = EMBEDDED
        """Set when the partition opens its engine."""
        self._writer = writer
        self._turns = turns
        self._new_commit = new_commit
        self._recover = recover
        self._continue_erasing = continue_erasing
        self._frames: list[Frame] = []
        self._under_way = False
        """Whether a commit was begun that has not ended, in a turn or in the task."""
        self._taken: Sequence[Frame] = ()
        self._commit: CommitContext | None = None
        """The commit under way, and its frames."""
        self._turn_asked = False
        self._waits = False
        """Whether the task waits for work: commits begin in turns."""
        self._work: Coroutine[Any, Any, None] | None = None
        """The next work of the task."""
        self._wakeup = asyncio.Event()
        self._stopping = False
        # Bound once: a partition has one commit under way, so that its steps need no arguments.
        self._begin_step: Step = self._begin
        self._apply_step: Step = self._apply
        self._hand_out_step: Step = self._hand_out
        self._complete_step: Step = self._complete
        self._end_step: Step = self._end
        self._on_ended: CommitEnded = self._ended
        self._after_applying: Sequence[Stage] = (writer.hand_out, writer.complete)
        self._after_handing_out: Sequence[Stage] = (writer.complete,)

    def submit(self, frame: Frame) -> None:
        """Queue operations for the next commit."""
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
                self._taken, self._commit = (), None
                self._continue_erasing()
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

    def _begin(self) -> "Step | None":
        """Begin a commit of the frames that have gathered."""
        self._turn_asked = False
        if self._under_way or not self._waits or not self._frames:
            return None
        self._under_way = True
        if len(self._frames) == 1:
            frames, self._frames = self._frames, []
            traced = bool(frames[0].callers)
        else:
            frames = self._take()
            traced = any(each.callers for each in frames)
        self._taken = frames
        try:
            commit = self._commit = self._new_commit(frames)
        except Exception as error:
            self._do_in_task(self._recover(frames, error))
            return None
        if traced or commit.state.is_shared:
            # Its reads are trips to other processes, or it has spans that last until its end.
            self._do_in_task(self._write(commit))
            return None
        return self._apply_step

    def _apply(self) -> "Step | None":
        commit = self._commit
        assert commit is not None, "it was begun"
        if not self._is_done(self._writer.apply(commit), self._after_applying):
            return None
        if commit.journal.ready_queues or commit.ended_standing:
            return self._hand_out_step
        return self._complete_step

    def _hand_out(self) -> "Step | None":
        """Hand out what the commit has made ready to standing reserves."""
        commit = self._commit
        assert commit is not None, "it was begun"
        try:
            is_done = self._writer.hand_out_now(commit)
        except Exception as error:
            self._do_in_task(self._recover(self._taken, error))
            return None
        if is_done or self._is_done(self._writer.hand_out_rest(commit), self._after_handing_out):
            return self._complete_step
        return None

    def _complete(self) -> "Step | None":
        """Complete the batch of the commit, and hand it over to the engine."""
        commit = self._commit
        assert commit is not None, "it was begun"
        try:
            if not self._writer.complete_now(commit) and not self._is_done(
                self._writer.complete_rest(commit), ()
            ):
                return None
            batch = commit.journal.batch
            if not batch.operations:
                return self._end_step
            if not commit.engine.begin_commit(batch, self._on_ended):
                self._do_in_task(self._finish(commit))
        except Exception as error:
            self._do_in_task(self._recover(self._taken, error))
        return None

    def _ended(self, error: Exception | None) -> None:
        """Those of one sync are called in one turn: they share the next one as well."""
        if error is None:
            self._turns.ask(self._end_step)
        elif self._waits:
            self._do_in_task(self._recover(self._taken, error))

    def _end(self) -> None:
        """The commit is durable."""
        commit = self._commit
        if not self._waits or commit is None:  # the task was cancelled: the partition has ended
            return
        try:
            self._writer.end(commit)
        except Exception as error:
            self._do_in_task(self._recover(self._taken, error))
            return
        self._under_way = False
        self._taken, self._commit = (), None  # they must not stay in memory until the next commit
        if commit.state.erasures.marks:
            self._continue_erasing()
        if self._frames:
            self._ask_turn()
        if self._stopping:
            self._wakeup.set()

    def _take(self) -> list[Frame]:
        """The frames of the next commit: all that wait, up to a bound, and one at least."""
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

    def _is_done(self, stage: Coroutine[Any, Any, None], then: Sequence[Stage]) -> bool:
        """Do a stage of the commit under way; False if it has to wait, or fails. Then it continues
        in the task, with the stages that follow."""
        try:
            waits_for = stage.send(None)
        except StopIteration:
            return True
        except Exception as error:
            self._do_in_task(self._recover(self._taken, error))
        else:
            assert self._commit is not None, "it was begun"
            self._do_in_task(self._finish(self._commit, _Started(stage, waits_for), then))
        return False

    # --- in the task ---------------------------------------------------------------------------

    def _do_in_task(self, work: Coroutine[Any, Any, None]) -> None:
        self._work = work
        self._wakeup.set()

    async def _write(self, commit: CommitContext) -> None:
        try:
            await self._writer.write(commit)
        except Exception as error:
            await self._recover(commit.frames, error)

    async def _finish(
        self, commit: CommitContext, started: "_Started | None" = None, then: Sequence[Stage] = ()
    ) -> None:
        """Continue a commit that has to wait."""
        try:
            if started is not None:
                await started
            for stage in then:
                await stage(commit)
            if len(commit.journal.batch):
                await commit.engine.commit(commit.journal.batch)
            self._writer.end(commit)
        except Exception as error:
            await self._recover(commit.frames, error)


class _Started:
    """The rest of a coroutine whose first step was made outside of any task."""

    __slots__ = ("_steps", "_waits_for")

    def __init__(self, steps: Coroutine[Any, Any, None], waits_for: Any) -> None:
        self._steps = steps
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        steps, waits_for = self._steps, self._waits_for
        try:
            while True:
                try:
                    got = yield waits_for
                except BaseException as error:
                    waits_for = steps.throw(error)
                else:
                    waits_for = steps.send(got)
        except StopIteration:
            return
