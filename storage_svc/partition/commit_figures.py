"""The figures of commits as metrics: recorded once for all that become durable together.

The journal of a node makes the commits of its partitions durable with one sync, and all of them end
in one turn of the event loop. A measurement for each partition would be a cost that grows with
them, so that all of them are one (ADR 36).
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from tidemark.clock import Clock
from tidemark.telemetry import histogram, seconds
from tidemark.telemetry.metrics import BYTES, COUNTS

_seconds = seconds("tidemark.storage.commit.duration", "From applying to durable")
_operations = histogram(
    "tidemark.storage.commit.operations", "Operations that gathered for a commit", COUNTS
)
_bytes = histogram("tidemark.storage.commit.size", "What a commit writes", BYTES, unit="By")


class CommitFigure(NamedTuple):
    """The measurements of a commit."""

    duration_ns: int
    """Of several commits that of the longest."""
    operations: int
    written_bytes: int


def record(figure: CommitFigure) -> None:
    """Record a measurement of each metric."""
    _seconds.record(figure.duration_ns / 1e9)
    _operations.record(figure.operations)
    _bytes.record(figure.written_bytes)


class CommitFigures:
    """Those of the partitions of one node."""

    __slots__ = ("_clock", "_ended", "_record")

    def __init__(self, clock: Clock, record: Callable[[CommitFigure], None] = record) -> None:
        self._clock = clock
        self._record = record
        self._ended: list[tuple[int, int, int]] = []
        """Commits that have ended in this turn: when they began, operations and bytes."""

    def add(self, started_ns: int, operations: int, written_bytes: int) -> None:
        """A commit of one partition is durable."""
        if not self._ended:
            asyncio.get_running_loop().call_soon(self._record_turn)
        self._ended.append((started_ns, operations, written_bytes))

    def _record_turn(self) -> None:
        started_ns, operations, written = zip(*self._ended, strict=True)
        self._ended.clear()
        duration_ns = self._clock.monotonic_ns() - min(started_ns)
        self._record(CommitFigure(duration_ns, sum(operations), sum(written)))
