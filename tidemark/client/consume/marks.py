"""Marks: how each message of a batch was settled, as far as this client knows.

Pure. A message is marked when its settlement is handed over, so that it is settled once: in the
same way again is no error, in another way it is (V6). The marks of a batch are a byte for each of
its messages, and no object beside them: a client holds a batch for each of very many queues, and
the garbage collector visits every object that can refer to others.
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
    FAILED = 6
    """Its settlement failed, or was cancelled: it may be settled again, in any way."""


MARKS: Final[Mapping[type[Action], Mark]] = {
    Ack: Mark.ACKED,
    Nack: Mark.NACKED,
    DeadLetter: Mark.DEAD_LETTERED,
    Release: Mark.RELEASED,
}
"""By the action that settles. An extension settles nothing."""


def set_one(marks: bytearray, index: int, mark: Mark) -> Mark | None:
    """Mark a message that is open, or whose settlement failed; returns its mark if it had one."""
    before = marks[index]
    if not before:
        marks[index] = mark
        return None
    if before == Mark.FAILED:
        marks[index] = mark
    return Mark(before)


def set_open(marks: bytearray, mark: Mark, start: int, end: int) -> list[Range]:
    """Mark the open messages from `start` to `end`; returns them."""
    if marks.count(Mark.OPEN, start, end) == end - start > 0:
        ranges = [(start, end)]  # the usual case
    else:
        ranges = ranges_of(marks, Mark.OPEN, start, end)
    set_all(marks, mark, ranges)
    return ranges


def set_all(marks: bytearray, mark: Mark, ranges: Sequence[Range]) -> None:
    """Mark messages, whatever became of them before."""
    for first, last in ranges:
        marks[first:last] = bytes((mark,)) * (last - first)


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
