"""Rows of CATALOG: a queue, with the groups and reservations that have no separate row.

Here as in the other modules of rows: pure functions in pairs, one to write and one to read. The
catalogue of tables, with the meaning of each key and value, is in `engines/engine.py`. Values are
fixed numbers, then texts.
"""

from struct import Struct
from typing import NamedTuple

from storage_svc.engines.engine import Row
from storage_svc.engines.group_rows import GroupProgress, group_value, read_progress, with_settled
from storage_svc.engines.keys import name, prefix_end, read_text, read_u16, text, u16, u64
from storage_svc.engines.reservation_rows import reservation_value
from storage_svc.queue.record import QueueRecord
from storage_svc.queue.reservation import Reservation
from tidemark.name_caches import name_cache

GROUPS_INLINE_MAX = 4
"""Groups that share the row of their queue; once a queue has more, each has a separate row."""

HELD_INLINE_MAX = 4
"""Live reservations that share the row of their queue; others have a separate row, so that the row
of a queue with many consumers stays small."""

SPANS_INLINE_MAX = 8
"""Ranges of a reservation, open or ended, in the row of its queue."""

SETTLED_INLINE_MAX = 16
"""Settled reservations that gather in the row of their queue before they move to one of SETTLED."""

_QUEUE = Struct(">QQQQQQQQQQQ????????BB")
_COUNTS = Struct(">QQQQQQ")
_COUNTS_AT = 32  # messages, body_bytes, scheduled and the bounds


@name_cache
def catalog_key(lmq_name: str) -> bytes:
    topic, _, lite = lmq_name.encode().partition(b"/")
    return text(topic) + text(lite)


def topic_range(topic: str, lite_prefix: str = "") -> tuple[bytes, bytes]:
    """The catalog keys of a topic's queues, or of those whose lite part begins with a prefix."""
    start = text(topic.encode()) + lite_prefix.encode()
    return start, prefix_end(start)


def lmq_name_of(catalog_key: bytes) -> str:
    topic, at = read_text(catalog_key)
    lite, _ = read_text(catalog_key, at)
    return f"{topic.decode()}/{lite.decode()}" if lite else topic.decode()


def queue_value(record: QueueRecord) -> bytes:
    """The record, then its groups and reservations as far as they have no separate rows."""
    groups = () if record.groups_apart else record.groups.values()
    head = _QUEUE.pack(
        record.queue_id,
        record.create_time_ms,
        record.last_activity_ms,
        record.next_offset,
        record.messages,
        record.body_bytes,
        record.scheduled,
        record.waiting_since_ms,
        record.settled_since_ms,
        record.idle_since_ms,
        record.groups_since_ms,
        record.keyed,
        record.returned,
        record.reserved,
        record.addressed,
        record.kept,
        record.unordered,
        record.paused,
        record.groups_apart,
        len(groups),
        len(record.held),
    )
    parts = [head]
    for group in groups:
        part = group_value(group)
        parts += (name(group.name), u16(len(part)), part)
    for reservation in record.held.values():
        part = reservation_value(reservation)
        parts += (u64(reservation.reservation_id), u16(len(part)), part)
    parts.append(record.settled)
    return b"".join(parts)


def read_queue(lmq_name: str, value: bytes) -> QueueRecord:
    """The record without groups and reservations, which `read_inline` reads."""
    queue_id, *rest, _, _ = _QUEUE.unpack_from(value)
    record = QueueRecord(queue_id, lmq_name, *rest)
    record.indexed = record.bounds
    return record


def is_whole(value: bytes) -> bool:
    """Whether the queue can be loaded by its row alone."""
    *_, keyed, returned, reserved, _, _, _, _, groups_apart, _, held = _QUEUE.unpack_from(value)
    return not (keyed or returned or reserved or groups_apart or held)


class Inline(NamedTuple):
    """The parts of a queue's row that other queues have in separate tables."""

    groups: list[Row]  # as in GROUPS
    held: list[Row]  # as in RESERVATIONS
    settled: bytes  # as in SETTLED


def read_inline(value: bytes) -> Inline:
    queue, at = value[:8], _QUEUE.size
    groups: list[Row] = []
    held: list[Row] = []
    for _ in range(value[_QUEUE.size - 2]):
        name_at = at
        _, at = read_text(value, at)
        key = queue + value[name_at:at]
        part, at = _read_part(value, at)
        groups.append((key, part))
    for _ in range(value[_QUEUE.size - 1]):
        key = queue + value[at : at + 8]
        part, at = _read_part(value, at + 8)
        held.append((key, part))
    return Inline(groups, held, value[at:])


class ColdQueue(NamedTuple):
    """A row that can be changed without loading its queue."""

    queue_id: int
    last_activity_ms: int
    next_offset: int
    messages: int
    scheduled: int
    bounds: tuple[int, int, int, int]
    """Those of `QueueRecord`, in the order of their kinds."""
    kept: bool
    groups: tuple[tuple[int, GroupProgress], ...]
    """Where the groups lie in the row, and their progress."""

    def waiting_groups(self, run_end: int) -> int:
        """How many groups have not settled all messages before an offset."""
        return sum(max(each.base, each.position) < run_end for _, each in self.groups)


def read_cold(value: bytes) -> ColdQueue | None:
    """The row of a queue of which nothing is in flight; None if other rows have to be read.

    It has no fairness keys, no runs for one group alone, no reservations that are live or have
    separate rows, and nothing was given back: every message that a group was handed is settled.
    """
    head = _QUEUE.unpack_from(value)
    queue_id, _, last_activity_ms, next_offset, messages, _, scheduled = head[:7]
    keyed, returned, reserved, addressed, kept, _, _, groups_apart, count, held = head[11:]
    if keyed or returned or reserved or addressed or groups_apart or held:
        return None
    groups: tuple[tuple[int, GroupProgress], ...] = ()
    at = _QUEUE.size
    for _ in range(count):
        _, at = read_text(value, at)
        part, end = _read_part(value, at)
        groups += ((at + 2, read_progress(part)),)
        at = end
    bounds = head[7:11]
    return ColdQueue(
        queue_id, last_activity_ms, next_offset, messages, scheduled, bounds, kept, groups
    )


def emptied_value(value: bytes, cold: ColdQueue, idle_since_ms: int, run_end: int) -> bytes:
    """The row once all runs of the queue are deleted, which follow on each other to `run_end`."""
    run_start = run_end - cold.messages
    counts = _COUNTS.pack(0, 0, cold.scheduled, 0, 0, idle_since_ms)
    tail = value[_COUNTS_AT + _COUNTS.size :]
    if cold.groups:
        changed = bytearray(value)
        for at, progress in cold.groups:
            open_from = max(progress.base, progress.position, run_start)
            if open_from < run_end:
                with_settled(changed, at, progress.settled + run_end - open_from)
        tail = bytes(changed[_COUNTS_AT + _COUNTS.size :])
    return value[:_COUNTS_AT] + counts + tail


def _read_part(value: bytes, at: int) -> tuple[bytes, int]:
    start = at + 2
    end = start + read_u16(value, at)
    return value[start:end], end


def queue_range(queue_id: int) -> tuple[bytes, bytes]:
    """All keys of one queue, in every table that begins with the queue."""
    return u64(queue_id), u64(queue_id + 1)


def fits_inline(record: QueueRecord, reservation: Reservation) -> bool:
    """Whether a live reservation can be part of the row of its queue."""
    if reservation.apart or len(reservation.open) + len(reservation.done) > SPANS_INLINE_MAX:
        return False
    return len(record.held) < HELD_INLINE_MAX or reservation.reservation_id in record.held
