"""The rows of the index of ages: queues in the order of the age that retention measures.

Pure. A queue has at most one row per kind. A row's time is a lower bound, which the record of the
queue has as well: no message or group of that kind is older. So publishing and settling rarely
write to the index; a row whose time has come is compared with its queue, and moved if it is out of
date (`operations/ages.py`).

    waiting   "w", text topic, time, queue   messages that a group has not settled
    settled   "s", text topic, time, queue   messages that every group has settled, kept for replay
    idle      "i", time, queue               queues without messages, by their last activity
    groups    "g", text topic, time, queue   groups, by their last use
"""

from enum import StrEnum
from functools import lru_cache

from storage_svc.engines.engine import Batch, Table
from storage_svc.engines.keys import read_u64x2, text, u64, u64x2
from storage_svc.queue.record import QueueRecord
from tidemark.names import topic_of


class AgeKind(StrEnum):
    """The kinds of rows; the values begin their keys."""

    WAITING = "w"
    SETTLED = "s"
    IDLE = "i"
    GROUPS = "g"


_KINDS = tuple(AgeKind)  # in the order of the bounds in a record; an Enum is slow to walk over

Bounds = tuple[int, int, int, int]
"""The bounds of a queue, in the order of the kinds; 0: no row."""

NewAges = dict[tuple[AgeKind, str], int]
"""The earliest of the rows that were added, by kind and topic ("" for idle queues)."""


@lru_cache(maxsize=4096)
def age_prefix(kind: AgeKind, topic: str) -> bytes:
    """What the keys of a kind and topic begin with."""
    begin = kind.encode()
    return begin if kind is AgeKind.IDLE else begin + text(topic.encode())


def age_range(kind: AgeKind, topic: str, first_ms: int, last_ms: int) -> tuple[bytes, bytes]:
    """The keys of the rows from one time to another, both included."""
    prefix = age_prefix(kind, topic)
    return prefix + u64(max(0, first_ms)), prefix + u64(max(0, last_ms + 1))


def read_age(key: bytes) -> tuple[int, int]:
    """Time and queue."""
    time_ms, queue_id = read_u64x2(key, len(key) - 16)
    return time_ms, queue_id


def write_ages(record: QueueRecord, batch: Batch, new: NewAges) -> None:
    """Bring the rows of a queue to the bounds in its record; notes those that are new."""
    if not (record.messages or record.scheduled or record.idle_since_ms):
        record.idle_since_ms = max(1, record.last_activity_ms)
    bounds = record.bounds
    if bounds == record.indexed:
        return
    move_ages(topic_of(record.lmq_name), record.queue_id, record.indexed, bounds, batch, new)
    record.indexed = bounds


def move_ages(
    topic: str, queue_id: int, before: Bounds, after: Bounds, batch: Batch, new: NewAges
) -> None:
    """Replace the rows of a queue by others; notes those that are new."""
    for kind, before_ms, time_ms in zip(_KINDS, before, after, strict=True):
        if before_ms == time_ms:
            continue
        prefix = age_prefix(kind, topic)
        if before_ms:
            batch.delete(Table.AGES, prefix + u64x2(before_ms, queue_id))
        if time_ms:
            batch.put(Table.AGES, prefix + u64x2(time_ms, queue_id), b"")
            place = (kind, "" if kind is AgeKind.IDLE else topic)
            new[place] = min(time_ms, new.get(place, time_ms))


def delete_ages(record: QueueRecord, batch: Batch) -> None:
    """Delete the rows of a queue that is removed."""
    topic = topic_of(record.lmq_name)
    for kind, time_ms in zip(_KINDS, record.indexed, strict=True):
        if time_ms:
            batch.delete(Table.AGES, age_prefix(kind, topic) + u64x2(time_ms, record.queue_id))
    record.indexed = (0, 0, 0, 0)
