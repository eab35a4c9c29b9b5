"""Marks: how each message of a batch was settled, as far as this client knows.

Pure. A message is marked when its settlement is handed over, so that it is settled once: in the
same way again is no error, in another way it is (V6).
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Final

from tidemark.api.broker.v1.message_pb2 import Ack, DeadLetter, Nack, Release
from tidemark.client.transport.codec import Action, Range


class Mark(IntEnum):
    """How a message was settled."""

    OPEN = 0
    ACKED = 1
    NACKED = 2
    DEAD_LETTERED = 3
    RELEASED = 4
    LAPSED = 5
    """Held for longer than `max_lease_ms`: it went back as a failed attempt."""


MARKS: Final[Mapping[type[Action], Mark]] = {
    Ack: Mark.ACKED,
    Nack: Mark.NACKED,
    DeadLetter: Mark.DEAD_LETTERED,
    Release: Mark.RELEASED,
}
"""By the action that settles. An extension settles nothing."""


class Marks:
    """The marks of one batch."""

    __slots__ = ("_count", "_marks", "open")

    def __init__(self, count: int) -> None:
        self.open = count
        """How many messages are not settled yet."""
        self._count = count
        self._marks: bytearray | None = None

    def set_one(self, index: int, mark: Mark) -> Mark | None:
        """Mark an open message; returns how it was settled before, if it was."""
        marks = self._marks
        if marks is None:
            marks = self._marks = bytearray(self._count)
        before = marks[index]
        if before:
            return Mark(before)
        marks[index] = mark
        self.open -= 1
        return None

    def set_open(self, mark: Mark, start: int, end: int) -> list[Range]:
        """Mark the open messages from `start` to `end`; returns them."""
        if self._marks is None and not start and end == self._count:
            self._marks = bytearray((mark,)) * end  # the usual case: all at once
            self.open = 0
            return [(0, end)] if end else []
        ranges = self.find(Mark.OPEN, start, end)
        if self._marks is None:
            self._marks = bytearray(self._count)
        for first, last in ranges:
            self._marks[first:last] = bytes((mark,)) * (last - first)
            self.open -= last - first
        return ranges

    def find(self, mark: Mark, start: int, end: int) -> list[Range]:
        """The messages from `start` to `end` with a mark."""
        if self._marks is None:
            return [(start, end)] if mark is Mark.OPEN and start < end else []
        return ranges_of(self._marks, mark, start, end)


def ranges_of(marks: bytearray, number: int, start: int, end: int) -> list[Range]:
    """Stretches of a number, as (first, last + 1)."""
    ranges: list[Range] = []
    while (first := marks.find(number, start, end)) >= 0:
        last = first
        while last < end and marks[last] == number:
            last += 1
        ranges.append((first, last))
        start = last
    return ranges


def merge(ranges: Sequence[Range]) -> list[Range]:
    """The same messages in as few ranges as there can be."""
    merged: list[Range] = []
    for start, end in sorted(ranges):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged
