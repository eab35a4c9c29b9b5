"""Retention history: which messages left, when and why, in rows that outlive their queues (R6).

The commit that deletes writes one row per topic, type and pass, with the queues by name.
"""

from collections.abc import Mapping
from enum import Enum

from storage_svc.engines.engine import Row, Table
from storage_svc.engines.history_rows import index_keys, read_history
from storage_svc.partition.commit import CommitContext
from tidemark.names import topic_of


class RetentionType(Enum):
    """The kinds of removals in the history. Stored by value."""

    EXPIRED = "expired"
    COMPLETED = "completed"
    MAX_WAIT_TIME_EVICTION = "max_wait_time_eviction"
    INACTIVE_QUEUE = "inactive_queue"
    OLD_RECORDS = "old_records"
    TIME_TO_LIVE = "time_to_live"
    ATTEMPTS_EXHAUSTED = "attempts_exhausted"
    PURGE = "purge"
    ABANDONED_GROUP = "abandoned_group"


def write(
    commit: CommitContext,
    lmq_name: str,
    kind: RetentionType,
    pass_id: str,
    messages: int,
    body_bytes: int,
) -> None:
    """Count what this commit removes of a queue."""
    queues = commit.journal.removals_of(topic_of(lmq_name), kind.value, pass_id)
    before = queues.get(lmq_name, (0, 0))
    queues[lmq_name] = (before[0] + messages, before[1] + body_bytes)


def write_all(
    commit: CommitContext,
    topic: str,
    kind: RetentionType,
    pass_id: str,
    removed: Mapping[str, tuple[int, int]],
) -> None:
    """The same for queues of one topic: messages and bytes by their names."""
    queues = commit.journal.removals_of(topic, kind.value, pass_id)
    if queues.keys().isdisjoint(removed):
        queues.update(removed)
    else:
        for lmq_name, counts in removed.items():
            write(commit, lmq_name, kind, pass_id, *counts)


async def delete_old(commit: CommitContext, before: bytes, limit: int) -> list[Row]:
    """Delete rows older than a key; returns them."""
    found = await commit.engine.scan(Table.HISTORY, b"", before, limit=limit)
    old = [row for row in found if (Table.HISTORY, row[0]) not in commit.journal.erased_rows]
    for key, value in old:
        row = read_history(key, value)
        commit.journal.erase(Table.HISTORY, key)
        for index_key in index_keys(row.topic, row.pass_id, key):
            commit.journal.batch.delete(Table.HISTORY_INDEX, index_key)
    return old
