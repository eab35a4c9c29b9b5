"""Retention history: which messages left, when and why, in rows that outlive their queues (R6).

A row is written in the same commit as the deletion that it counts.
"""

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from storage_svc.engines.engine import Row, Table
from storage_svc.engines.keys import read_text, read_u64, read_u64x2, text, u64x2
from storage_svc.partition.commit import CommitContext


class RetentionType(Enum):
    """What a row of the history counts. Stored by value."""

    EXPIRED = "expired"
    COMPLETED = "completed"
    MAX_WAIT_TIME_EVICTION = "max_wait_time_eviction"
    INACTIVE_QUEUE = "inactive_queue"
    OLD_RECORDS = "old_records"
    TIME_TO_LIVE = "time_to_live"
    ATTEMPTS_EXHAUSTED = "attempts_exhausted"
    PURGE = "purge"


class HistoryRow(NamedTuple):
    """One row of `retention_history`."""

    lmq_name: str
    type: RetentionType
    pass_id: str
    messages: int
    body_bytes: int
    executed_at_ms: int


def write(
    commit: CommitContext,
    lmq_name: str,
    kind: RetentionType,
    pass_id: str,
    messages: int,
    body_bytes: int,
) -> bytes:
    """Write a row of its own; returns its key."""
    key = commit.journal.record_key()
    row = HistoryRow(lmq_name, kind, pass_id, messages, body_bytes, commit.now_ms)
    commit.journal.batch.put(Table.HISTORY, key, _value(row))
    return key


async def add(
    commit: CommitContext, kind: RetentionType, pass_id: str, totals: Mapping[str, tuple[int, int]]
) -> None:
    """Count messages and bytes by queue into the one row of (queue, type, pass) each.

    A row that an earlier call of the pass has written is replaced.
    """
    passes = commit.journal.passes
    index = {name: _pass_key(pass_id, kind, name) for name in totals}
    await _read_counted(commit, [key for key in index.values() if key not in passes])
    for name, (messages, body_bytes) in totals.items():
        counted = passes.get(index[name])
        if counted is None:
            key = write(commit, name, kind, pass_id, messages, body_bytes)
            commit.journal.batch.put(Table.PASSES, index[name], key)
        else:
            key, messages, body_bytes = counted[0], counted[1] + messages, counted[2] + body_bytes
            row = HistoryRow(name, kind, pass_id, messages, body_bytes, commit.now_ms)
            commit.journal.batch.put(Table.HISTORY, key, _value(row))
        passes[index[name]] = (key, messages, body_bytes)


async def _read_counted(commit: CommitContext, index: list[bytes]) -> None:
    """Fill the journal with what earlier commits of the pass have counted."""
    keys = await commit.engine.load(Table.PASSES, index)
    found = {each: key for each, key in zip(index, keys, strict=True) if key is not None}
    rows = await commit.engine.load(Table.HISTORY, list(found.values()))
    for (each, key), stored in zip(found.items(), rows, strict=True):
        if stored is not None:  # else it was deleted as an old record
            before = read(key, stored)
            commit.journal.passes[each] = (key, before.messages, before.body_bytes)


async def delete_old(commit: CommitContext, before: bytes, limit: int) -> list[Row]:
    """Delete rows older than a key; returns them."""
    found = await commit.engine.scan(Table.HISTORY, b"", before, limit=limit)
    old = [row for row in found if (Table.HISTORY, row[0]) not in commit.journal.erased_rows]
    for key, value in old:
        row = read(key, value)
        commit.journal.erase(Table.HISTORY, key)
        commit.journal.batch.delete(Table.PASSES, _pass_key(row.pass_id, row.type, row.lmq_name))
    return old


def _pass_key(pass_id: str, kind: RetentionType, lmq_name: str) -> bytes:
    return text(pass_id.encode()) + text(kind.value.encode()) + lmq_name.encode()


def _value(row: HistoryRow) -> bytes:
    return (
        u64x2(row.messages, row.body_bytes)
        + text(row.type.value.encode())
        + text(row.pass_id.encode())
        + row.lmq_name.encode()
    )


def read(key: bytes, value: bytes) -> HistoryRow:
    messages, body_bytes = read_u64x2(value)
    kind, at = read_text(value, 16)
    pass_id, at = read_text(value, at)
    return HistoryRow(
        value[at:].decode(),
        RetentionType(kind.decode()),
        pass_id.decode(),
        messages,
        body_bytes,
        read_u64(key),
    )
