"""Keys and values of the tables: how the state of queues is laid out in an engine.

Pure functions, in pairs: what one writes the other reads. The catalogue of tables, with the meaning
of each key and value, is in `engines/engine.py`. Values are fixed numbers, then texts.
"""

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import NamedTuple

from storage_svc.engines.engine import Row
from storage_svc.engines.keys import (
    prefix_end,
    read_text,
    read_u16,
    read_u32,
    read_u64,
    read_u64x2,
    read_u64x3,
    text,
    u16,
    u32,
    u64,
    u64x2,
    u64x3,
)
from storage_svc.queue.group import Group, Returned, ReturnPlace
from storage_svc.queue.lane import Lane
from storage_svc.queue.record import QueueRecord
from storage_svc.queue.reservation import Ending, Reservation
from storage_svc.queue.retry import Turn
from storage_svc.queue.run import Run, Slice

BODY_INLINE_BYTES_MAX = 512
"""A body of this size or less is stored in the row of its header: a small run is one row. Larger
ones stay apart, so that scans of headers stay cheap."""

GROUPS_INLINE_MAX = 4
"""Groups that share the row of their queue; once a queue has more, each has a row of its own."""

HELD_INLINE_MAX = 4
"""Live reservations that share the row of their queue; others have a row of their own, so that the
row of a queue with many consumers stays small."""

SPANS_INLINE_MAX = 8
"""Ranges of a reservation, open or ended, in the row of its queue."""

SETTLED_INLINE_MAX = 16
"""Settled reservations that gather in the row of their queue before they move to one of SETTLED."""

_QUEUE = Struct(">QQQQQQQQQQ????????BB")
_RUN = Struct(">IQQQHH")
_GROUP = Struct(">QQQQQ")
_RETURNED = Struct(">QQIIQBQQ")
_RESERVATION = Struct(">QQQQIIQQHHI")
_SPAN = Struct(">QQ")
_DONE = Struct(">QQB")
_SETTLED = Struct(">QQIB")

# --- catalog --------------------------------------------------------------------------------------


def catalog_key(lmq_name: str) -> bytes:
    topic, _, lite = lmq_name.partition("/")
    return text(topic.encode()) + text(lite.encode())


def topic_range(topic: str, lite_prefix: str = "") -> tuple[bytes, bytes]:
    """The catalog keys of a topic's queues, or of those whose lite part begins with a prefix."""
    start = text(topic.encode()) + lite_prefix.encode()
    return start, prefix_end(start)


def lmq_name_of(catalog_key: bytes) -> str:
    topic, at = read_text(catalog_key)
    lite, _ = read_text(catalog_key, at)
    return f"{topic.decode()}/{lite.decode()}" if lite else topic.decode()


def queue_value(record: QueueRecord) -> bytes:
    """The record, then its groups and reservations as far as they have no rows of their own."""
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
        parts += (text(group.name.encode()), u16(len(part)), part)
    for reservation in record.held.values():
        part = reservation_value(reservation)
        parts += (u64(reservation.reservation_id), u16(len(part)), part)
    parts.append(record.settled)
    return b"".join(parts)


def read_queue(lmq_name: str, value: bytes) -> QueueRecord:
    """The record without groups and reservations, which `read_inline` reads."""
    queue_id, *rest = _QUEUE.unpack_from(value)
    record = QueueRecord(queue_id, lmq_name, *rest[:-2])
    record.indexed = (record.waiting_since_ms, record.settled_since_ms, record.idle_since_ms)
    return record


class Inline(NamedTuple):
    """The parts of a queue's row that other queues have in tables of their own."""

    groups: list[Row]  # as in GROUPS
    held: list[Row]  # as in RESERVATIONS
    settled: bytes  # as in SETTLED


def read_inline(value: bytes) -> Inline:
    queue, at = value[:8], _QUEUE.size
    *_, groups, held = _QUEUE.unpack_from(value)
    inline = Inline([], [], b"")
    for _ in range(groups):
        name_at = at
        _, at = read_text(value, at)
        key = queue + value[name_at:at]
        part, at = _read_part(value, at)
        inline.groups.append((key, part))
    for _ in range(held):
        key = queue + value[at : at + 8]
        part, at = _read_part(value, at + 8)
        inline.held.append((key, part))
    return inline._replace(settled=value[at:])


def _read_part(value: bytes, at: int) -> tuple[bytes, int]:
    start = at + 2
    end = start + read_u16(value, at)
    return value[start:end], end


def queue_range(queue_id: int) -> tuple[bytes, bytes]:
    """All keys of one queue, in every table that begins with the queue."""
    return u64(queue_id), u64(queue_id + 1)


# --- runs -----------------------------------------------------------------------------------------


def lane_prefix(queue_id: int, fairness_key: str) -> bytes:
    return u64(queue_id) + text(fairness_key.encode())


def run_key(queue_id: int, run: Run) -> bytes:
    return run_key_of(queue_id, run.fairness_key, run.first_offset)


def run_key_of(queue_id: int, fairness_key: str, first_offset: int) -> bytes:
    return lane_prefix(queue_id, fairness_key) + u64(first_offset)


def has_inline_body(run: Run) -> bool:
    return run.body_bytes <= BODY_INLINE_BYTES_MAX


def run_value(run: Run, body: bytes) -> bytes:
    """The header, with the body where that is small."""
    traceparent, group = run.traceparent.encode(), run.group.encode()
    head = _RUN.pack(
        run.messages,
        run.body_bytes,
        run.publish_time_ms,
        run.dead_deadline_ms,
        len(traceparent),
        len(group),
    )
    return head + traceparent + group + (body if has_inline_body(run) else b"")


def inline_body(value: bytes) -> bytes:
    """The body in the row of a header."""
    traceparent_bytes, group_bytes = _RUN.unpack_from(value)[4:]
    return value[_RUN.size + traceparent_bytes + group_bytes :]


def read_run(key: bytes, value: bytes) -> Run:
    fairness_key, at = read_text(key, 8)
    return _run(read_u64(key, at), fairness_key.decode(), value)


def read_lane_runs(page: Sequence[Row]) -> list[Run]:
    """Runs of one lane; their common key prefix is decoded once."""
    if not page:
        return []
    encoded, _ = read_text(page[0][0], 8)
    fairness_key = encoded.decode()
    return [_run(read_u64(key, len(key) - 8), fairness_key, value) for key, value in page]


def _run(first_offset: int, fairness_key: str, value: bytes) -> Run:
    messages, body_bytes, published, dead, traceparent_bytes, group_bytes = _RUN.unpack_from(value)
    group_at = _RUN.size + traceparent_bytes
    traceparent = value[_RUN.size : group_at].decode()
    group = value[group_at : group_at + group_bytes].decode() if group_bytes else ""
    return Run(
        first_offset, messages, body_bytes, published, dead, fairness_key, traceparent, group
    )


def body_key(queue_id: int, run: Run) -> bytes:
    return u64x2(queue_id, run.first_offset)


def ttl_key(queue_id: int, run: Run) -> bytes:
    return u64x3(run.dead_deadline_ms, queue_id, run.first_offset)


# --- groups ---------------------------------------------------------------------------------------


def group_key(queue_id: int, group: str) -> bytes:
    return u64(queue_id) + text(group.encode())


def group_value(group: Group) -> bytes:
    """Includes the mark of the lane without a key, the only lane that most queues have."""
    lane = group.lanes.get("")
    mark = lane.mark if lane is not None else (group.base, group.base)
    return (
        _GROUP.pack(group.base, group.settled, group.owner_epoch, *mark)
        + group.owner_client_id.encode()
    )


def read_group(key: bytes, value: bytes) -> tuple[Group, tuple[int, int]]:
    """The group, without lanes and weights, and the mark of its lane without a key."""
    name, _ = read_text(key, 8)
    base, settled, owner_epoch, run_start, position = _GROUP.unpack_from(value)
    group = Group(name.decode(), base, {})
    group.settled = settled
    group.owner_epoch = owner_epoch
    group.owner_client_id = value[_GROUP.size :].decode()
    return group, (run_start, position)


def lane_key(queue_id: int, group: str, fairness_key: str) -> bytes:
    return group_key(queue_id, group) + text(fairness_key.encode())


def lane_value(lane: Lane) -> bytes:
    return u64x2(*lane.mark)


def read_lane(key: bytes, value: bytes) -> tuple[str, str, tuple[int, int]]:
    """Group, fairness key and mark."""
    group, at = read_text(key, 8)
    fairness_key, _ = read_text(key, at)
    run_start, position = read_u64x2(value)
    return group.decode(), fairness_key.decode(), (run_start, position)


# --- returned slices ------------------------------------------------------------------------------


def returned_key(queue_id: int, group: str, start: int) -> bytes:
    return group_key(queue_id, group) + u64(start)


def returned_value(returned: Returned) -> bytes:
    slice_ = returned.slice
    return (
        _RETURNED.pack(
            slice_.end,
            slice_.run.first_offset,
            slice_.attempts,
            slice_.deliveries,
            returned.not_before_ms,
            returned.place,
            *returned.turn,
        )
        + slice_.run.fairness_key.encode()
    )


def returned_run_key(key: bytes, value: bytes) -> bytes:
    """The key of the run header of a returned slice."""
    return key[:8] + text(value[_RETURNED.size :]) + value[8:16]


def read_returned(key: bytes, value: bytes, run: Run) -> tuple[str, Returned]:
    """Group, and the returned slice."""
    group, at = read_text(key, 8)
    end, _, attempts, deliveries, not_before_ms, place, *turn = _RETURNED.unpack_from(value)
    slice_ = Slice(read_u64(key, at), end, run, attempts, deliveries)
    return group.decode(), Returned(slice_, not_before_ms, ReturnPlace(place), Turn(*turn))


def returned_facts(value: bytes) -> tuple[int, str]:
    """Attempts and fairness key, without the run."""
    return int(_RETURNED.unpack_from(value)[2]), value[_RETURNED.size :].decode()


def delay_key(queue_id: int, group: str, start: int, not_before_ms: int) -> bytes:
    return u64(not_before_ms) + returned_key(queue_id, group, start)


# --- reservations ---------------------------------------------------------------------------------


def reservation_key(queue_id: int, reservation_id: int) -> bytes:
    return u64x2(queue_id, reservation_id)


def deadline_key(queue_id: int, reservation: Reservation) -> bytes:
    return deadline_key_of(reservation.deadline_ms, queue_id, reservation.reservation_id)


def deadline_key_of(deadline_ms: int, queue_id: int, reservation_id: int) -> bytes:
    return u64x3(deadline_ms, queue_id, reservation_id)


def reservation_value(reservation: Reservation) -> bytes:
    slice_ = reservation.slice
    head = _RESERVATION.pack(
        slice_.run.first_offset,
        slice_.start,
        slice_.end,
        reservation.deadline_ms,
        slice_.attempts,
        slice_.deliveries,
        reservation.owner_epoch,
        reservation.broker_incarnation,
        len(reservation.open),
        len(reservation.done),
        reservation.given_messages,
    )
    spans = b"".join(_SPAN.pack(*span) for span in reservation.open)
    done = b"".join(_DONE.pack(*span) for span in reservation.done)
    names = text(reservation.group.encode()) + slice_.run.fairness_key.encode()
    return head + spans + done + names


def reservation_run_key(key: bytes, value: bytes) -> bytes:
    """The key of the run header of a reservation."""
    _, at = read_text(value, _names_at(value))
    return key[:8] + text(value[at:]) + value[:8]


def read_reservation(key: bytes, value: bytes, run: Run) -> Reservation:
    (
        _,
        start,
        end,
        deadline_ms,
        attempts,
        deliveries,
        owner_epoch,
        broker_incarnation,
        open_spans,
        done,
        given_messages,
    ) = _RESERVATION.unpack_from(value)
    at = _RESERVATION.size
    spans = [_SPAN.unpack_from(value, at + n * _SPAN.size) for n in range(open_spans)]
    at += open_spans * _SPAN.size
    endings = [_DONE.unpack_from(value, at + n * _DONE.size) for n in range(done)]
    group, _ = read_text(value, _names_at(value))
    return Reservation(
        read_u64(key, 8),
        group.decode(),
        Slice(start, end, run, attempts, deliveries),
        deadline_ms,
        owner_epoch=owner_epoch,
        broker_incarnation=broker_incarnation,
        given_messages=given_messages,
        open_spans=spans,
        done=[(begin, stop, Ending(how)) for begin, stop, how in endings],
    )


def fits_inline(record: QueueRecord, reservation: Reservation) -> bool:
    """Whether a live reservation can be part of the row of its queue."""
    if len(reservation.open) + len(reservation.done) > SPANS_INLINE_MAX or reservation.apart:
        return False
    return len(record.held) < HELD_INLINE_MAX or reservation.reservation_id in record.held


def settled_entry(reservation: Reservation) -> bytes:
    """A reservation whose messages all ended in the same way: what a repeat has to match."""
    slice_ = reservation.slice
    ending = reservation.done[0][2]
    head = _SETTLED.pack(reservation.reservation_id, slice_.start, slice_.messages, ending)
    return head + text(reservation.group.encode())


def read_settled(value: bytes, run: Run) -> Iterator[Reservation]:
    """Settled reservations of one row; their runs may be gone, so that any stands for them."""
    at = 0
    while at < len(value):
        reservation_id, start, messages, how = _SETTLED.unpack_from(value, at)
        group, at = read_text(value, at + _SETTLED.size)
        end = start + messages
        yield Reservation(
            reservation_id,
            group.decode(),
            Slice(start, end, run),
            deadline_ms=0,
            open_spans=(),
            done=((start, end, Ending(how)),),
        )


def is_live(reservation_value: bytes) -> bool:
    """Whether any message of a stored reservation is open, without decoding the rest."""
    return int(_RESERVATION.unpack_from(reservation_value)[8]) > 0


def _names_at(value: bytes) -> int:
    head = _RESERVATION.unpack_from(value)
    return _RESERVATION.size + int(head[8]) * _SPAN.size + int(head[9]) * _DONE.size


# --- outbox ---------------------------------------------------------------------------------------


def outbox_prefix(destination: str) -> bytes:
    """What the keys of all entries for one destination begin with."""
    return text(destination.encode())


def outbox_key(destination: str, sequence: int) -> bytes:
    return outbox_prefix(destination) + u64(sequence)


def read_outbox_key(key: bytes) -> tuple[str, int]:
    """Destination and sequence."""
    destination, at = read_text(key)
    return destination.decode(), read_u64(key, at)


def outbox_partition(value: bytes) -> int:
    """The destination partition, with which the value begins."""
    return read_u32(value)


# --- records in time order ------------------------------------------------------------------------


class Consumed(NamedTuple):
    """A range of messages of one run that a group has settled."""

    queue_id: int
    start: int
    end: int
    publish_time_ms: int
    group: str
    lmq_name: str


def consumed_entry(
    record: QueueRecord, group: str, start: int, end: int, publish_time_ms: int
) -> bytes:
    """One settled range, as a part of a row."""
    names = text(group.encode()) + text(record.lmq_name.encode())
    return u64x3(record.queue_id, start, end) + u64(publish_time_ms) + names


def consumed_value(entries: Sequence[bytes]) -> bytes:
    """A row of settled ranges; begins with their number."""
    return u32(len(entries)) + b"".join(entries)


def consumed_ranges(value: bytes) -> int:
    """How many settled ranges a row holds."""
    return read_u32(value)


def read_consumed(value: bytes) -> Iterator[Consumed]:
    at = 4
    while at < len(value):
        queue_id, start, end = read_u64x3(value, at)
        published_ms = read_u64(value, at + 24)
        group, at = read_text(value, at + 32)
        lmq_name, at = read_text(value, at)
        yield Consumed(queue_id, start, end, published_ms, group.decode(), lmq_name.decode())
