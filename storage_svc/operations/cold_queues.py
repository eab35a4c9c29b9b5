"""Cold queues: deletes all runs of queues that are not loaded, from their rows (R1, R2, R5).

Most queues that are due hold one message or a few, and no client uses them. To load each of them,
change its state and unload it again costs several times what its rows do. So the rows of many
queues are read at once, and checked and changed as they are. The result is the same as that of
`retention.py`, which takes the queues of which more has to be known.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from storage_svc.engines import queue_rows, run_rows
from storage_svc.engines.age_rows import Bounds
from storage_svc.engines.engine import Reader, Row, Table
from storage_svc.engines.keys import read_u64, successor, u64x2, u64x3
from storage_svc.engines.queue_rows import ColdQueue
from storage_svc.engines.run_rows import RunNumbers
from storage_svc.operations import history
from storage_svc.operations.history import RetentionType
from storage_svc.operations.retention_rules import RetentionRow, age_limit_s
from storage_svc.partition.commit import CommitContext
from storage_svc.partition.journal import BatchJournal
from storage_svc.turns import give_way
from tidemark.names import topic_of
from tidemark.topics import MaxWaitAction, TopicSettings

TURN_RUNS_MAX = 128
"""Runs that one turn of the event loop reads and deletes, about, at some 10 microseconds each; a
row is not cut."""


@dataclass(slots=True)
class Emptied:
    """The removals, and the rows that are left to be applied."""

    messages: int = 0
    body_bytes: int = 0
    stale: int = 0
    left: list[RetentionRow] = field(default_factory=list)


async def empty_cold_queues(
    commit: CommitContext, kind: RetentionType, pass_id: str, rows: Sequence[RetentionRow]
) -> Emptied:
    """Delete the planned runs of queues that have no others, and whose rows show that they are due.

    The history counts what is removed.
    """
    done = Emptied()
    topics: dict[str, list[RetentionRow]] = {}
    journal, erasures = commit.journal, commit.state.erasures
    for row in rows:
        queue_id = row.queue_id
        busy = queue_id in journal.changed_queues or queue_id in journal.removed_ids
        busy = busy or commit.handles.loaded_name(queue_id) is not None
        if busy or row.fairness_key or (erasures and erasures.concerns(queue_id)):
            done.left.append(row)
        else:
            topics.setdefault(topic_of(row.lmq_name), []).append(row)
    first = True
    for topic, cold_rows in topics.items():
        rule = _Rule(commit, kind, topic)
        for some in _in_turns(cold_rows):
            if not first:
                await give_way()
            first = False
            removed = await _empty(commit, rule, topic, some, done)
            history.write_all(commit, topic, kind, pass_id, removed)
    return done


def _in_turns(rows: Sequence[RetentionRow]) -> Iterator[Sequence[RetentionRow]]:
    """Cut rows so that no turn takes long."""
    start = runs = 0
    for at, row in enumerate(rows):
        if runs >= TURN_RUNS_MAX:
            yield rows[start:at]
            start, runs = at, 0
        runs += row.planned_rows or 1
    yield rows[start:]


async def _empty(
    commit: CommitContext,
    rule: "_Rule",
    topic: str,
    rows: Sequence[RetentionRow],
    done: Emptied,
) -> dict[str, tuple[int, int]]:
    """Messages and bytes that were removed, by the names of their queues."""
    journal = commit.journal
    batch, changed = journal.batch, journal.changed_queues
    keys = [queue_rows.catalog_key(row.lmq_name) for row in rows]
    header_keys = [run_rows.plain_run_key(row.queue_id, row.first_offset) for row in rows]
    with commit.engine.reader() as reader:  # a pass must not displace what is in use
        values = await reader.load(Table.CATALOG, keys)
        headers = await reader.load(Table.RUN_HEADERS, header_keys)
        several = await _following(reader, rows, header_keys)
    removed: dict[str, tuple[int, int]] = {}
    deleted: list[bytes] = []
    moved: dict[tuple[Bounds, int], list[int]] = {}
    for row, key, header_key, value, header in zip(
        rows, keys, header_keys, values, headers, strict=True
    ):
        cold = None if value is None or header is None else queue_rows.read_cold(value)
        if value is None or header is None or cold is None:
            done.left.append(row)
            continue
        queue_id, first_offset = row.queue_id, row.first_offset
        run = run_rows.read_numbers(header)
        following: Sequence[Row] = ()
        all_runs: RunNumbers | None = run
        if row.planned_rows > 1:
            following = several[queue_id]
            all_runs = _all_of(first_offset, run, following, row.planned_rows)
        another = cold.queue_id != queue_id or queue_id in changed
        if another or all_runs is None or all_runs[0] != cold.messages:
            done.left.append(row)
            continue
        if rule.needs_state(cold, first_offset):
            done.left.append(row)
            continue
        messages, body_bytes, _, _ = all_runs
        if not rule.is_due(cold, first_offset, all_runs):
            if following:
                done.left.append(row)  # some of them may be
            else:
                done.stale += 1
            continue
        lmq_name = row.lmq_name
        deleted.append(header_key)
        _delete_rest(journal, queue_id, first_offset, run)
        for following_key, following_header in following:
            deleted.append(following_key)
            offset = read_u64(following_key, len(following_key) - 8)
            _delete_rest(journal, queue_id, offset, run_rows.read_numbers(following_header))
        idle_since_ms = cold.bounds[2] or (0 if cold.scheduled else max(1, cold.last_activity_ms))
        moved.setdefault((cold.bounds, idle_since_ms), []).append(queue_id)
        emptied = queue_rows.emptied_value(value, cold, idle_since_ms, first_offset + messages)
        batch.put(Table.CATALOG, key, emptied)
        journal.emptied = journal.emptied or {}
        journal.emptied[lmq_name] = emptied
        changed.add(queue_id)
        removed[lmq_name] = messages, body_bytes
        done.messages += messages
        done.body_bytes += body_bytes
        journal.messages -= messages
        journal.body_bytes -= body_bytes
    batch.delete_all(Table.RUN_HEADERS, deleted)
    journal.deleted.update(deleted)
    for (bounds, idle_since_ms), queue_ids in moved.items():
        after = (0, 0, idle_since_ms, bounds[3])
        journal.ages.move_all(topic, queue_ids, bounds, after)
    return removed


async def _following(
    reader: Reader, rows: Sequence[RetentionRow], first_keys: Sequence[bytes]
) -> dict[int, list[Row]]:
    """The headers behind the first one, by queue, where so many runs were planned."""
    found: dict[int, list[Row]] = {}
    for row, first_key in zip(rows, first_keys, strict=True):
        if row.planned_rows > 1:
            end = run_rows.plain_run_key(row.queue_id, row.end_offset)
            found[row.queue_id] = await reader.scan(
                Table.RUN_HEADERS, successor(first_key), end, limit=row.planned_rows
            )
    return found


def _all_of(
    first_offset: int, first: RunNumbers, following: Sequence[Row], planned: int
) -> RunNumbers | None:
    """The numbers of several runs: all messages and bytes, and the newest publish time.

    None unless they are those that were planned, and follow on each other.
    """
    if len(following) != planned - 1:
        return None
    numbers = [first, *(run_rows.read_numbers(header) for _, header in following)]
    messages, body_bytes, published_ms, _ = zip(*numbers, strict=True)
    last_key = following[-1][0]
    end = read_u64(last_key, len(last_key) - 8) + messages[-1]
    if end - first_offset != sum(messages):
        return None
    return sum(messages), sum(body_bytes), max(published_ms), 0


def _delete_rest(journal: BatchJournal, queue_id: int, first_offset: int, run: RunNumbers) -> None:
    """Delete the rows of a run beside its header."""
    _, body_bytes, _, dead_deadline_ms = run
    body = u64x2(queue_id, first_offset)
    journal.deleted_bodies.append(body)
    if body_bytes > run_rows.BODY_INLINE_BYTES_MAX:
        journal.batch.delete(Table.RUN_BODIES, body)
    if dead_deadline_ms:
        journal.batch.delete(Table.TTL, u64x3(dead_deadline_ms, queue_id, first_offset))


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

    def needs_state(self, cold: ColdQueue, first_offset: int) -> bool:
        """Whether more than the runs leaves, or only a part of them."""
        if cold.kept and not self._settings.retention_enabled:
            return True  # its first use drops what was kept
        if not self._max_wait:
            return False
        if self._settings.max_wait_action is MaxWaitAction.DEAD_LETTER:
            return True
        # A group that was handed nothing of it waits for all of it.
        handed_out = [max(each.base, each.position) > first_offset for _, each in cold.groups]
        return bool(handed_out) and all(handed_out)

    def is_due(self, cold: ColdQueue, first_offset: int, run: RunNumbers) -> bool:
        messages, _, publish_time_ms, _ = run
        if publish_time_ms > self._until_ms:
            return False
        if not self._completed:
            return True
        return bool(cold.groups) and not cold.waiting_groups(first_offset + messages)
