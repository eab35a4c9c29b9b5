"""Due work: the scans of phase one of a sweep, beside the writer and never through it (L2).

Each kind of due work has an index; a scan starts at its low-water mark and stops at the first entry
that is not due, so that its cost depends on due entries, not on stored ones.
"""

from enum import Enum
from typing import NamedTuple

from storage_svc.engines import group_rows, outbox_rows
from storage_svc.engines.engine import Reader, Row, Table
from storage_svc.engines.keys import (
    prefix_end,
    read_text,
    read_u64,
    read_u64x2,
    read_u64x3,
    successor,
    u64,
)
from storage_svc.operations import outbox
from storage_svc.operations.dead_letters import Bury
from storage_svc.operations.expire import ExpireReservation, ReadyDelayed
from storage_svc.operations.operation import Action
from storage_svc.operations.outbox import AppendFromOutbox, DeadReason
from storage_svc.operations.schedule import PromoteScheduled
from storage_svc.partition.commit import report_unreadable
from storage_svc.partition.partition import Partition
from tidemark.errors import DataCorrupt

OUTBOX_PAGE_MAX = 64
OUTBOX_BYTES_MAX = 8 * 1024 * 1024
"""Outbox entries carry their messages, so a page of them is short."""


class ScanKind(Enum):
    """The kinds of due work."""

    EXPIRED_RESERVATIONS = "EXPIRED_RESERVATIONS"
    DELAYS_OVER = "DELAYS_OVER"
    SCHEDULES_DUE = "SCHEDULES_DUE"
    DEAD_DEADLINES = "DEAD_DEADLINES"
    ATTEMPTS_EXHAUSTED = "ATTEMPTS_EXHAUSTED"
    OUTBOX = "OUTBOX"
    OUTBOX_DESTINATIONS = "OUTBOX_DESTINATIONS"


class Due(NamedTuple):
    """One entry that is due, as the action that deals with it."""

    action: Action
    due_ms: int


class Page(NamedTuple):
    """One page of a scan."""

    due: list[Due]
    next_token: bytes  # empty: the last page
    next_due_ms: int | None  # the earliest entry that is not yet due
    now_ms: int
    outbox_partitions: tuple[int, ...] = ()


_BY_TIME = {
    ScanKind.EXPIRED_RESERVATIONS: Table.DEADLINES,
    ScanKind.DELAYS_OVER: Table.DELAYS,
    ScanKind.SCHEDULES_DUE: Table.SCHEDULE,
    ScanKind.DEAD_DEADLINES: Table.TTL,
}


_DELETING = (ScanKind.DEAD_DEADLINES, ScanKind.ATTEMPTS_EXHAUSTED)

_TABLES = {
    **_BY_TIME,
    ScanKind.ATTEMPTS_EXHAUSTED: Table.BURIED,
    ScanKind.OUTBOX_DESTINATIONS: Table.OUTBOX,
}


async def scan(
    partition: Partition,
    kind: ScanKind,
    token: bytes,
    limit: int,
    destination_partition: int | None = None,
) -> Page:
    """A page of due work, earliest first."""
    now_ms = partition.now_ms()
    if kind is ScanKind.OUTBOX:
        with partition.reader() as reader:
            due = await _scan_outbox(partition, reader, destination_partition, limit, now_ms)
        return Page(due, b"", None, now_ms)
    if kind in _DELETING and partition.deletions_suspended:
        return Page([], b"", None, now_ms)  # it would be refused, again and again
    table = _TABLES[kind]
    if not token:
        partition.lifecycle.wakeups.scan_begins(table)
    with partition.reader() as reader:
        if kind in _BY_TIME:
            page = await _scan_index(partition, reader, kind, token, limit, now_ms)
        elif kind is ScanKind.OUTBOX_DESTINATIONS:
            outbox_index = partition.state.outbox
            waiting = tuple(outbox_index.partitions(now_ms))
            page = Page([], b"", outbox_index.next_retry_ms(), now_ms, waiting)
        else:
            page = await _scan_buried(partition, reader, token, limit, now_ms)
    partition.lifecycle.wakeups.scan_ended(table, page.next_due_ms)
    return page


async def _scan_buried(
    partition: Partition, reader: Reader, token: bytes, limit: int, now_ms: int
) -> Page:
    found = await reader.scan(Table.BURIED, token, None, limit=limit)
    exceptions = await reader.load(Table.RETURNED, [key for key, _ in found])
    left_out = partition.state.left_out
    due = [
        _exhausted(key, value, now_ms)
        for (key, _), value in zip(found, exceptions, strict=True)
        if value is not None and not left_out.includes(Table.BURIED, key, now_ms)
    ]
    return Page(due, _next_token(found, limit), None, now_ms)


async def _scan_outbox(
    partition: Partition,
    reader: Reader,
    destination_partition: int | None,
    limit: int,
    now_ms: int,
) -> list[Due]:
    """Entries in the order of each destination, as many as one answer can carry."""
    index = partition.state.outbox
    limit = min(limit, OUTBOX_PAGE_MAX)
    numbers = index.partitions(now_ms)
    if destination_partition is not None:
        numbers = [each for each in numbers if each == destination_partition]
    due: list[Due] = []
    body_bytes = 0
    for number in numbers:
        for name, first in index.take_turns(number, limit, now_ms):
            end = prefix_end(outbox_rows.outbox_prefix(name))
            found = await reader.scan(
                Table.OUTBOX, outbox_rows.outbox_key(name, first), end, limit=limit - len(due)
            )
            if found:
                index.begins(name, outbox_rows.read_outbox_key(found[0][0])[1])
            previous = 0
            for key, value in found:
                body = await _outbox_body(partition, reader, key)
                if body is None:
                    break  # those behind it must not arrive before it
                body_bytes += len(body)
                entry = outbox.decode(key, value, body, previous)
                previous = entry.sequence
                due.append(Due(AppendFromOutbox(partition.number, entry), entry.create_time_ms))
                if len(due) == limit or body_bytes > OUTBOX_BYTES_MAX:
                    return due
    return due


async def _outbox_body(partition: Partition, reader: Reader, key: bytes) -> bytes | None:
    """The messages of an entry; None if it was cleared meanwhile, or cannot be read now.

    One that cannot be read holds back its own destination and nothing else (V3, L11).
    """
    name, sequence = outbox_rows.read_outbox_key(key)
    why = "it is missing"
    try:
        (body,) = await reader.load(Table.OUTBOX_BODIES, [u64(sequence)])
        if body is not None or (await reader.load(Table.OUTBOX, [key]))[0] is None:
            return body
    except DataCorrupt as error:
        why = str(error)
    retry_ms = partition.state.outbox.postpone(name, partition.now_ms())
    if retry_ms is not None:
        partition.lifecycle.due(Table.OUTBOX, retry_ms)
    report_unreadable(Table.OUTBOX_BODIES, u64(sequence), name, why)
    return None


async def _scan_index(
    partition: Partition, reader: Reader, kind: ScanKind, token: bytes, limit: int, now_ms: int
) -> Page:
    table = _BY_TIME[kind]
    due_indexes = partition.state.due
    start = token or u64(due_indexes.mark_ms(table))
    found = await reader.scan(table, start, u64(now_ms + 1), limit=limit)
    left_out = partition.state.left_out
    due = [_READERS[kind](*row) for row in found if not left_out.includes(table, row[0], now_ms)]
    next_due_ms = None
    if len(found) < limit:
        later = await reader.scan(table, u64(now_ms + 1), None, limit=1)
        next_due_ms = read_u64(later[0][0]) if later else None
        if not found and not token and table in (Table.SCHEDULE, Table.TTL):
            due_indexes.scanned(table, now_ms + 1 if next_due_ms is None else next_due_ms)
    return Page(due, _next_token(found, limit), next_due_ms, now_ms)


def _next_token(found: list[Row], limit: int) -> bytes:
    return successor(found[-1][0]) if len(found) == limit else b""


def _expired(key: bytes, _: bytes) -> Due:
    return Due(ExpireReservation.from_index(key), read_u64(key))


def _delay_over(key: bytes, _: bytes) -> Due:
    return Due(ReadyDelayed.from_index(key), read_u64(key))


def _scheduled(key: bytes, _: bytes) -> Due:
    due_ms, schedule_id = read_u64x2(key)
    return Due(PromoteScheduled(schedule_id, due_ms), due_ms)


def _dead(key: bytes, fairness_key: bytes) -> Due:
    dead_ms, queue_id, first_offset = read_u64x3(key)
    reason = DeadReason.TIME_TO_LIVE
    bury = Bury(queue_id, "", fairness_key.decode(), first_offset, reason, 0, dead_ms)
    return Due(bury, dead_ms)


_READERS = {
    ScanKind.EXPIRED_RESERVATIONS: _expired,
    ScanKind.DELAYS_OVER: _delay_over,
    ScanKind.SCHEDULES_DUE: _scheduled,
    ScanKind.DEAD_DEADLINES: _dead,
}


def _exhausted(key: bytes, value: bytes, now_ms: int) -> Due:
    group, at = read_text(key, 8)
    attempts, fairness_key = group_rows.returned_facts(value)
    reason = DeadReason.ATTEMPTS_EXHAUSTED
    bury = Bury(read_u64(key), group.decode(), fairness_key, read_u64(key, at), reason, attempts)
    return Due(bury, now_ms)
