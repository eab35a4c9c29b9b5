"""Frames: operations that arrived together, on their way through a commit and back.

A frame that is too large for one commit is cut; whatever asked for it gets its results in parts.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from storage_svc.operations.acks import AckReservations
from storage_svc.operations.operation import Operation
from storage_svc.operations.publish import Append, AppendRuns
from tidemark.errors import TidemarkError
from tidemark.telemetry import is_sampled

R = TypeVar("R")
R_contra = TypeVar("R_contra", contravariant=True)


class CommitBounds(NamedTuple):
    """The most that one commit takes: the rest waits for the next, so that no commit takes long."""

    body_bytes: int
    operations: int
    """A frame with more is cut into parts."""


EMBEDDED = CommitBounds(body_bytes=8 * 1024 * 1024, operations=1000)
SHARED = CommitBounds(body_bytes=1024 * 1024, operations=250)
"""On a server that others use: it does nothing else while it writes the rows of a commit, some two
to four of them per operation."""


class Requester(Protocol[R_contra]):
    """Receives the results of operations. They may come in parts, in the order of operations."""

    def answer(self, results: "Sequence[R_contra | TidemarkError]") -> None:
        """The commit of the next operations is durable. Called in the turn that ends the commit."""
        ...

    def fail(self, error: TidemarkError) -> None:
        """None of the operations without a result gets one."""
        ...


class Frame:
    """Operations that arrived together, or a part of them, and the receiver of their results."""

    __slots__ = ("body_bytes", "broker_epoch", "callers", "operations", "requester", "steps")

    def __init__(
        self,
        operations: Sequence[Operation[Any]],
        callers: Sequence[str],
        broker_epoch: int | None,
        requester: Requester[Any],
    ) -> None:
        self.operations = operations
        self.callers = callers if callers and any(map(is_sampled, callers)) else ()
        """Trace contexts, one per operation; empty if none is traced."""
        self.broker_epoch = broker_epoch
        """None: not from a broker."""
        self.requester: Requester[Any] | None = requester
        """None once it was answered."""
        body_bytes, steps = 0, len(operations)
        for each in operations:
            if isinstance(each, AppendRuns):
                for append in each.appends:
                    body_bytes += len(append.body)
                steps += len(each.appends) - 1
            elif isinstance(each, AckReservations):
                steps += len(each.receipts) - 1
            elif isinstance(each, Append):
                body_bytes += len(each.body)
        self.body_bytes = body_bytes
        self.steps = steps
        """How many operations it counts for: some are for many runs or reservations."""

    def parts(self, steps_max: int) -> "Sequence[Frame]":
        """The frame, cut if it is too large for one commit."""
        if self.steps <= steps_max:
            return (self,)
        assert self.requester is not None
        operations_max = max(1, len(self.operations) * steps_max // self.steps)
        return [
            Frame(
                self.operations[start : start + operations_max],
                self.callers[start : start + operations_max],
                self.broker_epoch,
                self.requester,
            )
            for start in range(0, len(self.operations), operations_max)
        ]

    def answer(self, results: Sequence[Any]) -> None:
        requester, self.requester = self.requester, None
        if requester is not None:
            requester.answer(results)

    def fail(self, error: TidemarkError) -> None:
        requester, self.requester = self.requester, None
        if requester is not None:
            requester.fail(error)


class Awaited(Generic[R]):
    """A caller that awaits the results of all its operations together."""

    __slots__ = ("_expected", "_gathered", "results")

    def __init__(self, operations: int) -> None:
        self.results: asyncio.Future[list[R | TidemarkError]]
        self.results = asyncio.get_running_loop().create_future()
        self._expected = operations
        self._gathered: list[R | TidemarkError] = []

    def answer(self, results: "Sequence[R | TidemarkError]") -> None:
        self._gathered += results
        # The caller may have been cancelled.
        if len(self._gathered) == self._expected and not self.results.done():
            self.results.set_result(self._gathered)

    def fail(self, error: TidemarkError) -> None:
        """Also if a part has succeeded: whether all were applied is unknown then."""
        if not self.results.done():
            self.results.set_exception(error)
