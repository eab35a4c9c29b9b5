"""Cold queues: deletes the only run of queues that are not loaded, from their rows (R1, R2, R5).

Most queues that are due hold one message, and no client uses them. To load each of them, change its
state and unload it again costs several times what its rows do. So the rows of many queues are read
at once, and checked and changed as they are. The result is the same as that of `retention.py`,
which takes the queues of which more has to be known.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from storage_svc.engines import queue_rows, run_rows
from storage_svc.engines.engine import Table
from storage_svc.engines.queue_rows import ColdQueue
from storage_svc.engines.run_rows import PlainRun
from storage_svc.operations.history import RetentionType
from storage_svc.operations.retention_rules import Removal, RetentionRow, age_limit_s
from storage_svc.partition.commit import CommitContext
from storage_svc.turns import in_turns
from tidemark.names import topic_of
from tidemark.topics import MaxWaitAction, TopicSettings

TURN_ROWS_MAX = 128
"""Rows that one turn of the event loop reads and changes, at some 10 microseconds each."""


@dataclass(slots=True)
class Emptied:
    """What was removed by the names of the queues, and the rows that are left to be applied."""

    removed: dict[str, Removal] = field(default_factory=dict)
    stale: int = 0
    left: list[RetentionRow] = field(default_factory=list)


async def empty_cold_queues(
    commit: CommitContext, kind: RetentionType, rows: Sequence[RetentionRow]
) -> Emptied:
    """Delete the planned runs of queues that have no other, and whose rows show that it is due."""
    done = Emptied()
    cold_rows = []
    journal, erasures = commit.journal, commit.state.erasures
    for row in rows:
        queue_id = row.queue_id
        busy = queue_id in journal.changed_queues or queue_id in journal.removed_ids
        busy = busy or commit.handles.loaded_name(queue_id) is not None
        if busy or row.fairness_key or (erasures and erasures.concerns(queue_id)):
            done.left.append(row)
        else:
            cold_rows.append(row)
    rules: dict[str, _Rule] = {}
    async for some in in_turns(cold_rows, TURN_ROWS_MAX):
        topics = [topic_of(row.lmq_name) for row in some]
        for topic in set(topics) - rules.keys():
            rules[topic] = _Rule(commit, kind, topic)
        await _empty(commit, [rules[topic] for topic in topics], some, done)
    return done


async def _empty(
    commit: CommitContext, rules: Sequence["_Rule"], rows: Sequence[RetentionRow], done: Emptied
) -> None:
    journal = commit.journal
    keys = [queue_rows.catalog_key(row.lmq_name) for row in rows]
    header_keys = [run_rows.plain_run_key(row.queue_id, row.first_offset) for row in rows]
    with commit.engine.reader() as reader:  # a pass must not displace what is in use
        values = await reader.load(Table.CATALOG, keys)
        headers = await reader.load(Table.RUN_HEADERS, header_keys)
    for rule, row, key, value, header in zip(rules, rows, keys, values, headers, strict=True):
        cold = None if value is None or header is None else queue_rows.read_cold(value)
        if value is None or header is None or cold is None:
            done.left.append(row)
            continue
        run = run_rows.read_plain_run(header)
        another = cold.queue_id != row.queue_id or row.queue_id in journal.changed_queues
        if another or run.messages != cold.messages or rule.needs_state(cold, row):
            done.left.append(row)
        elif rule.is_due(cold, row, run):
            journal.empty_cold_queue(row.lmq_name, key, value, cold, row.first_offset, run)
            done.removed[row.lmq_name] = Removal(run.messages, run.body_bytes)
        else:
            done.stale += 1


class _Rule:
    """One rule for the queues of one topic, as its settings are now (R9)."""

    __slots__ = ("_completed", "_max_wait", "_settings", "_until_ms")

    def __init__(self, commit: CommitContext, kind: RetentionType, topic: str) -> None:
        found = commit.topics.find(topic)
        self._settings = TopicSettings() if found is None else found.settings
        limit_ms = 1000 * age_limit_s(self._settings, kind)
        self._completed = kind is RetentionType.COMPLETED
        self._max_wait = kind is RetentionType.MAX_WAIT_TIME_EVICTION and limit_ms > 0
        self._until_ms = commit.now_ms - limit_ms if limit_ms else -1
        """Runs published by then are due."""

    def needs_state(self, cold: ColdQueue, row: RetentionRow) -> bool:
        """Whether more than the run leaves, or only a part of it."""
        if cold.kept and not self._settings.retention_enabled:
            return True  # its first use drops what was kept
        if not self._max_wait:
            return False
        if self._settings.max_wait_action is MaxWaitAction.DEAD_LETTER:
            return True
        # A group that was handed nothing of it waits for all of it.
        handed_out = [max(each.base, each.position) > row.first_offset for _, each in cold.groups]
        return bool(handed_out) and all(handed_out)

    def is_due(self, cold: ColdQueue, row: RetentionRow, run: PlainRun) -> bool:
        if run.publish_time_ms > self._until_ms:
            return False
        if not self._completed:
            return True
        return bool(cold.groups) and not cold.waiting_groups(row.first_offset + run.messages)
