"""Cold queues: deletes the only run of queues that are not loaded, from their rows (R1, R2, R5).

Most queues that are due hold one message, and no client uses them. To load each of them, change its
state and unload it again costs several times what its rows do. So the rows of many queues are read
at once, and checked and changed as they are. The result is the same as that of `retention.py`,
which takes the queues of which more has to be known.
"""

from collections.abc import Sequence
from typing import NamedTuple

from storage_svc.engines import queue_rows, run_rows
from storage_svc.engines.engine import Table
from storage_svc.engines.queue_rows import ColdQueue
from storage_svc.engines.run_rows import PlainRun
from storage_svc.operations.history import RetentionType
from storage_svc.operations.retention_rules import Removal, RetentionRow, age_limit_s
from storage_svc.partition.commit import CommitContext
from tidemark.names import topic_of
from tidemark.topics import MaxWaitAction, TopicSettings


class Emptied(NamedTuple):
    """What was removed by the names of the queues, and the rows that are left to be applied."""

    removed: dict[str, Removal]
    stale: int
    left: list[RetentionRow]


async def empty_cold_queues(
    commit: CommitContext, kind: RetentionType, rows: Sequence[RetentionRow]
) -> Emptied:
    """Delete the planned runs of queues that have no other, and whose rows show that it is due."""
    journal, handles = commit.journal, commit.handles
    done = Emptied({}, 0, [])
    stale = 0
    cold_rows = []
    for row in rows:
        queue_id = row.queue_id
        busy = queue_id in journal.changed_queues or queue_id in journal.removed_ids
        busy = busy or commit.state.erasures.concerns(queue_id)
        if busy or row.fairness_key or handles.loaded_name(queue_id) is not None:
            done.left.append(row)
        else:
            cold_rows.append(row)
    with commit.engine.reader() as reader:  # a pass must not displace what is in use
        values = await reader.load(
            Table.CATALOG, [queue_rows.catalog_key(row.lmq_name) for row in cold_rows]
        )
        headers = await reader.load(
            Table.RUN_HEADERS,
            [run_rows.plain_run_key(row.queue_id, row.first_offset) for row in cold_rows],
        )
    rules: dict[str, _Rule] = {}
    for row, value, header in zip(cold_rows, values, headers, strict=True):
        topic = topic_of(row.lmq_name)
        rule = rules.get(topic)
        if rule is None:
            rule = rules[topic] = _Rule(commit, kind, topic)
        cold = None if value is None else queue_rows.read_cold(value)
        if value is None or header is None or cold is None:
            done.left.append(row)
            continue
        run = run_rows.read_plain_run(header)
        another = cold.queue_id != row.queue_id or row.queue_id in journal.changed_queues
        if another or run.messages != cold.messages or rule.needs_state(cold, row, run):
            done.left.append(row)
        elif rule.is_due(cold, row, run):
            journal.empty_cold_queue(row.lmq_name, value, cold, row.first_offset, run)
            done.removed[row.lmq_name] = Removal(run.messages, run.body_bytes)
        else:
            stale += 1
    return done._replace(stale=stale)


class _Rule:
    """One rule for the queues of one topic, as its settings are now (R9)."""

    __slots__ = ("_kind", "_limit_ms", "_now_ms", "_settings")

    def __init__(self, commit: CommitContext, kind: RetentionType, topic: str) -> None:
        found = commit.topics.find(topic)
        self._settings = TopicSettings() if found is None else found.settings
        self._kind = kind
        self._limit_ms = 1000 * age_limit_s(self._settings, kind)
        self._now_ms = commit.now_ms

    def needs_state(self, cold: ColdQueue, row: RetentionRow, run: PlainRun) -> bool:
        """Whether more than the run leaves, or only a part of it."""
        if cold.kept and not self._settings.retention_enabled:
            return True  # its first use drops what was kept
        if self._kind is not RetentionType.MAX_WAIT_TIME_EVICTION or not self._limit_ms:
            return False
        if self._settings.max_wait_action is MaxWaitAction.DEAD_LETTER:
            return True
        # A group that was handed nothing of it waits for all of it.
        handed_out = [max(each.base, each.position) > row.first_offset for _, each in cold.groups]
        return bool(handed_out) and all(handed_out)

    def is_due(self, cold: ColdQueue, row: RetentionRow, run: PlainRun) -> bool:
        if not self._limit_ms or run.publish_time_ms > self._now_ms - self._limit_ms:
            return False
        if self._kind is not RetentionType.COMPLETED:
            return True
        return bool(cold.groups) and not cold.waiting_groups(row.first_offset + run.messages)
