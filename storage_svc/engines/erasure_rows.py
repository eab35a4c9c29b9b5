"""Rows of ERASURES: rows that remain to be erased, and how far each erasure is.

An erasure has one row that moves with it, and a purge as many more as its spared spans need, which
never change.
"""

from collections.abc import Iterator, Sequence
from enum import IntEnum
from struct import Struct

from storage_svc.engines.engine import Row
from storage_svc.engines.keys import read_u64, u64

SPANS_PER_ROW_MAX = 1000

_KEY = Struct(">QBI")  # queue, kind, part
_MARK = Struct(">QQB")  # purged below, last schedule id, stage; then where the stage continues
_SPAN = Struct(">QQ")


class ErasureKind(IntEnum):
    """The part of a queue that is erased. Stored by value."""

    QUEUE = 0  # all its rows: it was deleted
    PURGE = 1  # rows that a purge covers
    SETTLED = 2  # runs that every group has settled, and retention no longer keeps


def erasure_key(queue_id: int, kind: ErasureKind, part: int = 0) -> bytes:
    return _KEY.pack(queue_id, kind, part)


def read_erasure_key(key: bytes) -> tuple[int, ErasureKind, int]:
    queue_id, kind, part = _KEY.unpack(key)
    return queue_id, ErasureKind(kind), part


def erasure_value(below: int, schedules_to: int, stage: int, cursor: bytes) -> bytes:
    return _MARK.pack(below, schedules_to, stage) + cursor


def read_erasure(value: bytes) -> tuple[int, int, int, bytes]:
    below, schedules_to, stage = _MARK.unpack_from(value)
    return below, schedules_to, stage, value[_MARK.size :]


def span_rows(queue_id: int, spans: Sequence[tuple[int, int]]) -> Iterator[Row]:
    """The spans that a purge spares, in parts from 1 on."""
    for part, at in enumerate(range(0, len(spans), SPANS_PER_ROW_MAX), 1):
        some = spans[at : at + SPANS_PER_ROW_MAX]
        key = erasure_key(queue_id, ErasureKind.PURGE, part)
        yield key, b"".join(_SPAN.pack(*span) for span in some)


def read_spans(value: bytes) -> Iterator[tuple[int, int]]:
    for at in range(0, len(value), _SPAN.size):
        yield read_u64(value, at), read_u64(value, at + 8)


def erasure_range(queue_id: int, kind: ErasureKind) -> tuple[bytes, bytes]:
    """All rows of one erasure."""
    return erasure_key(queue_id, kind), u64(queue_id) + bytes((kind + 1,))
