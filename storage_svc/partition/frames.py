"""Frames: operations that arrived together, on their way through a commit and back.

A frame that is too large for one commit is cut, and gets its results in parts.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from storage_svc.operations.acks import AckReservations
from storage_svc.operations.operation import Operation
from storage_svc.operations.publish import Append, AppendRuns
from tidemark.errors import TidemarkError
from tidemark.telemetry import is_sampled

R = TypeVar("R")


class CommitBounds(NamedTuple):
    """The most that one commit takes: the rest waits for the next, so that no commit takes long."""

    body_bytes: int
    operations: int
    """A frame with more is cut into parts."""


EMBEDDED = CommitBounds(body_bytes=8 * 1024 * 1024, operations=1000)
SHARED = CommitBounds(body_bytes=1024 * 1024, operations=250)
"""On a server that others use: it does nothing else while it writes the rows of a commit, some two
to four of them per operation."""


class Frame:
    """Operations that arrived together, or a part of them, and where their results go."""

    __slots__ = ("body_bytes", "broker_epoch", "callers", "is_answered", "operations", "steps")

    def __init__(
        self,
        operations: Sequence[Operation[Any]],
        callers: Sequence[str],
        broker_epoch: int | None,
    ) -> None:
        self.operations = operations
        self.callers = sampled(callers)
        """Trace contexts, one per operation; empty if none is traced."""
        self.broker_epoch = broker_epoch
        """None: not from a broker."""
        self.body_bytes, self.steps = measured(operations)
        """The bytes of bodies, and how many operations it counts for: some are for many runs or
        reservations."""
        self.is_answered = False
        """Whether all operations have their results."""

    def answer(self, results: Sequence[Any]) -> None:
        """The commit of the next operations is durable. Called in the turn that ends the commit.
        If the frame was cut, results come in parts, in the order of operations."""
        raise NotImplementedError

    def fail(self, error: TidemarkError) -> None:
        """None of the operations without a result gets one."""
        raise NotImplementedError

    def parts(self, steps_max: int) -> "Sequence[Frame]":
        """The frame, cut if it is too large for one commit."""
        if self.steps <= steps_max:
            return (self,)
        operations_max = max(1, len(self.operations) * steps_max // self.steps)
        return [
            _Part(
                self,
                self.operations[start : start + operations_max],
                self.callers[start : start + operations_max],
            )
            for start in range(0, len(self.operations), operations_max)
        ]


class _Part(Frame):
    """Operations of a frame that was cut."""

    __slots__ = ("_whole",)

    def __init__(
        self, whole: Frame, operations: Sequence[Operation[Any]], callers: Sequence[str]
    ) -> None:
        super().__init__(operations, callers, whole.broker_epoch)
        self._whole = whole

    def answer(self, results: Sequence[Any]) -> None:
        self.is_answered = True
        self._whole.answer(results)

    def fail(self, error: TidemarkError) -> None:
        self._whole.fail(error)


class Awaited(Frame, Generic[R]):
    """Operations of a caller that awaits the results of all of them together."""

    __slots__ = ("_gathered", "results")

    def __init__(
        self,
        operations: Sequence[Operation[R]],
        callers: Sequence[str],
        broker_epoch: int | None,
    ) -> None:
        super().__init__(operations, callers, broker_epoch)
        self.results: asyncio.Future[list[R | TidemarkError]]
        self.results = asyncio.get_running_loop().create_future()
        self._gathered: list[R | TidemarkError] = []

    def answer(self, results: Sequence[Any]) -> None:
        self._gathered += results
        if len(self._gathered) == len(self.operations):
            self.is_answered = True
            if not self.results.done():  # the caller may have been cancelled
                self.results.set_result(self._gathered)

    def fail(self, error: TidemarkError) -> None:
        """Also if a part has succeeded: whether all were applied is unknown then."""
        if not self.results.done():
            self.results.set_exception(error)


def sampled(callers: Sequence[str]) -> Sequence[str]:
    """Trace contexts, one per operation; none if no operation is traced."""
    return callers if callers and any(map(is_sampled, callers)) else ()


def measured(operations: Sequence[Operation[Any]]) -> tuple[int, int]:
    """The bytes of the bodies in operations, and how many operations they count for."""
    body_bytes, steps = 0, len(operations)
    for each in operations:
        if isinstance(each, AppendRuns):
            for _, body, _ in each.runs:
                body_bytes += len(body)
            steps += len(each.runs) - 1
        elif isinstance(each, AckReservations):
            steps += len(each.receipts) - 1
        elif isinstance(each, Append):
            body_bytes += len(each.body)
    return body_bytes, steps
