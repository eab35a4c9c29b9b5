"""The rows of the index of ages: queues in the order of the age that retention measures.

Pure. A queue has at most one entry per kind. The time of an entry is a lower bound, which the
record of the queue has as well: no message or group of that kind is older. So publishing and
settling rarely write to the index; an entry whose time has come is compared with its queue, and
moved if it is out of date (`operations/ages.py`). Queues that get the same bound in one commit
share rows, so that the first messages of many queues cost a few rows (`partition/age_journal.py`).

    waiting   "w", text topic, time, number   messages that a group has not settled
    settled   "s", text topic, time, number   messages that every group has settled, kept for replay
    idle      "i", time, number               queues without messages, by their last activity
    groups    "g", text topic, time, number   groups, by their last use

The number makes a key unique, and is never used again; the value lists the queues.
"""

import sys
from array import array
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from storage_svc.engines.keys import read_u64, text, u64, u64x2
from tidemark.name_caches import name_cache


class AgeKind(StrEnum):
    """The kinds of rows; the values begin their keys."""

    WAITING = "w"
    SETTLED = "s"
    IDLE = "i"
    GROUPS = "g"


QUEUES_PER_ROW_MAX = 128
"""Queues that share a row: a review of one row is a part of one commit."""

Bounds = tuple[int, int, int, int]
"""The bounds of a queue, in the order of the kinds; 0: no entry."""


@name_cache
def age_prefix(kind: AgeKind, topic: str) -> bytes:
    """The prefix of the keys of a kind and topic."""
    begin = kind.encode()
    return begin if kind is AgeKind.IDLE else begin + text(topic.encode())


def age_range(kind: AgeKind, topic: str, first_ms: int, last_ms: int) -> tuple[bytes, bytes]:
    """The keys of the rows from one time to another, both included."""
    prefix = age_prefix(kind, topic)
    return prefix + u64(max(0, first_ms)), prefix + u64(max(0, last_ms + 1))


def age_key(kind: AgeKind, topic: str, time_ms: int, number: int) -> bytes:
    return age_prefix(kind, topic) + u64x2(time_ms, number)


def age_value(queue_ids: Sequence[int]) -> bytes:
    # Not by `struct`, which caches a format for each number of queues: see tidemark/name_caches.py.
    return _big_endian(array("Q", queue_ids)).tobytes()


class AgeRow(NamedTuple):
    """A time, and the queues that have it as their bound."""

    time_ms: int
    queue_ids: tuple[int, ...]


def read_age(key: bytes, value: bytes) -> AgeRow:
    return AgeRow(read_u64(key, len(key) - 16), tuple(_big_endian(array("Q", value))))


def _big_endian(numbers: "array[int]") -> "array[int]":
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers


def read_age_ms(key: bytes) -> int:
    """The time of a row."""
    return read_u64(key, len(key) - 16)
