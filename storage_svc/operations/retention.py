"""Retention: deletes what a pass has planned, after checking each run again (R1-R6, R9).

A row names runs by their queue, lane and offsets. Rows that changed since the plan was made are
left alone; deletions are counted by the history row of their topic, type and pass, in the same
commit. A pass may repeat itself: rows that are gone already count as stale, not twice.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from storage_svc.engines import run_rows
from storage_svc.engines.engine import Table
from storage_svc.engines.history_rows import read_history
from storage_svc.engines.keys import u64
from storage_svc.loading.handles import Handle
from storage_svc.loading.stored_runs import scan_runs
from storage_svc.operations import history
from storage_svc.operations.abandoned_groups import remove_abandoned
from storage_svc.operations.cold_queues import Emptied, empty_cold_queues
from storage_svc.operations.dead_letters import dispose_waiting
from storage_svc.operations.history import RetentionType
from storage_svc.operations.outbox import DeadReason
from storage_svc.operations.queues import delete_queue
from storage_svc.operations.retention_rules import (
    OF_MESSAGES,
    Removal,
    RetentionRow,
    age_limit_s,
)
from storage_svc.operations.runs import waiting_spans
from storage_svc.partition.commit import CommitContext
from storage_svc.queue.run import Run
from storage_svc.turns import give_way
from tidemark.errors import RecordUnreadable
from tidemark.telemetry import counter
from tidemark.topics import MaxWaitAction

RECORDS_PER_ROW_MAX = 2_000
"""Old records that one planned row removes; the result has `more` set if there are more."""

GATHERED_ROWS_MAX = 500
"""The same for rows of consumption and history, each of which holds what a commit has settled or
removed."""

COMMIT_SHARES = 512
"""Planned rows of one message that go into one commit; other rows have several shares of it."""

ROW_SHARES = 16
"""The shares of a row of which the queue may have to be loaded: one with more than a few messages,
or one of a queue or a group."""

SMALL_ROW_MESSAGES = 10

RUNS_PER_ROW_MAX = 1_000
"""Runs that one planned row removes, which is then all that its commit removes."""

TURN_RUNS_MAX = 256
"""Runs that one turn of the event loop removes, about; a row is not cut."""

OF_PASSES = (
    *OF_MESSAGES,
    RetentionType.INACTIVE_QUEUE,
    RetentionType.OLD_RECORDS,
    RetentionType.ABANDONED_GROUP,
)
OF_AGE = (RetentionType.INACTIVE_QUEUE, RetentionType.OLD_RECORDS)
"""Those whose age is a setting of the pass; the others are limits of the topic."""

RECORD_TABLES = {
    "messages_consumed": Table.CONSUMED,
    "system_metrics": Table.METRICS,
    "history": Table.HISTORY,
}

_removed = counter(
    "tidemark.storage.retention_removed",
    "Messages, records, queues and groups that passes removed, by type",
    zeros=[{"type": kind.value} for kind in OF_PASSES],
)
_Headers = Mapping[bytes, bytes]
"""Headers that were read ahead, by their keys."""


class RetentionApplied(NamedTuple):
    """The counts of a deletion."""

    messages: int = 0
    body_bytes: int = 0
    queues: int = 0
    stale: int = 0
    more: bool = False
    groups: int = 0


class ApplyRetention(NamedTuple):
    """Delete planned rows; each is checked again in the commit that deletes it (R9)."""

    pass_id: str
    type: RetentionType
    rows: tuple[RetentionRow, ...]

    async def apply(self, commit: CommitContext) -> RetentionApplied:
        if commit.deletions_refused is not None:
            raise commit.deletions_refused
        totals: dict[str, Removal] = {}
        emptied = Emptied(left=list(self.rows))
        if self.type in OF_MESSAGES:
            emptied = await empty_cold_queues(commit, self.type, self.pass_id, self.rows)
        stale, left = emptied.stale, emptied.left
        queues = groups = 0
        more = False
        headers = await self._read_ahead(commit, left)
        turn_runs = 0
        for row in left:
            if turn_runs >= TURN_RUNS_MAX:
                await give_way()
                turn_runs = 0
            turn_runs += _runs_at_most(row)
            removed: Removal | None
            match self.type:
                case RetentionType.OLD_RECORDS:
                    removed, is_cut = await _old_records(commit, row)
                    more |= is_cut
                case RetentionType.INACTIVE_QUEUE:
                    removed = await _inactive_queue(commit, row)
                    queues += removed is not None
                case RetentionType.ABANDONED_GROUP:
                    removed = await remove_abandoned(commit, row)
                    groups += removed is not None
                case _:
                    removed = await _runs(commit, row, self.type, headers)
            if removed is None:
                stale += 1
                continue
            name = row.lmq_name or row.table
            before = totals.get(name, Removal(0, 0))
            totals[name] = Removal(
                before.messages + removed.messages, before.body_bytes + removed.body_bytes
            )
        for name, removed in totals.items():
            history.write(commit, name, self.type, self.pass_id, *removed)
        messages = emptied.messages + sum(removed.messages for removed in totals.values())
        body_bytes = emptied.body_bytes + sum(removed.body_bytes for removed in totals.values())
        _removed.add(groups or messages + queues, {"type": self.type.value})
        return RetentionApplied(messages, body_bytes, queues, stale, more, groups)

    async def _read_ahead(self, commit: CommitContext, rows: Sequence[RetentionRow]) -> _Headers:
        """Read queues, and the headers of first runs, for many rows at once."""
        if not rows or self.type is RetentionType.OLD_RECORDS:
            return {}
        await commit.prefetch([row.queue_id for row in rows])
        if self.type not in OF_MESSAGES:
            return {}
        keys = [row.first_key for row in rows]
        found = await commit.engine.load(Table.RUN_HEADERS, keys)
        return {key: value for key, value in zip(keys, found, strict=True) if value is not None}


def in_commits(
    operations: Sequence[ApplyRetention],
) -> Iterator[list[tuple[int, ApplyRetention]]]:
    """Cut operations so that no commit takes long; small ones share a commit.

    Each part comes with the place of the operation that it belongs to.
    """
    together: list[tuple[int, ApplyRetention]] = []
    left = COMMIT_SHARES
    for place, operation in enumerate(operations):
        rows, start = operation.rows, 0
        for at, shares in enumerate(map(partial(_shares, operation.type), rows)):
            if shares > left:
                if start < at:
                    together.append((place, operation._replace(rows=rows[start:at])))
                if together:
                    yield together
                together, left, start = [], COMMIT_SHARES, at
            left -= shares
        together.append((place, operation._replace(rows=rows[start:])))
    if together:
        yield together


def _shares(kind: RetentionType, row: RetentionRow) -> int:
    """How much of a commit a row may take."""
    if kind is RetentionType.OLD_RECORDS:
        return COMMIT_SHARES
    messages = row.end_offset - row.first_offset
    if messages == 1:  # most rows
        return 1
    shares = -(-COMMIT_SHARES * _runs_at_most(row) // RUNS_PER_ROW_MAX)
    return shares if 0 < messages <= SMALL_ROW_MESSAGES else max(ROW_SHARES, shares)


async def _runs(
    commit: CommitContext, row: RetentionRow, kind: RetentionType, headers: _Headers
) -> Removal | None:
    """Delete the runs of a row that are due by the rule of the topic as it is now (R9)."""
    handle = await commit.queue_by_id(row.queue_id, briefly=True)
    if handle is None:
        return None
    # A loaded queue that outlives its topic keeps the settings, but no limit applies any more.
    topic = commit.topics.find(handle.topic.name)
    limit_ms = 1000 * age_limit_s(topic.settings, kind) if topic is not None else 0
    if not limit_ms:
        return None
    state = handle.state
    published_by_ms = commit.now_ms - limit_ms
    due = [
        run for run in await _stored(commit, row, headers) if run.publish_time_ms <= published_by_ms
    ]
    if state.has_inflight:
        due = [run for run in due if not state.is_held(run)]
    exhausted = state.exhausted_runs()
    if exhausted:
        due = [run for run in due if run.first_offset not in exhausted]  # a sweep takes them
    if kind is RetentionType.COMPLETED:
        due = [run for run in due if state.is_settled(run)]
    if kind is RetentionType.MAX_WAIT_TIME_EVICTION:
        return await _evict(commit, handle, due, _runs_at_most(row))
    due = due[: _runs_at_most(row)]
    if not due:
        return None
    _delete_runs(commit, handle, due)
    return Removal(sum(run.messages for run in due), sum(run.body_bytes for run in due))


async def _evict(
    commit: CommitContext, handle: Handle, runs: list[Run], runs_max: int
) -> Removal | None:
    """Remove the messages of runs that still wait, of so many runs (R5).

    A run of which all messages wait is deleted. Otherwise its other messages may be kept for
    replay, so that only the waiting ones are settled.
    """
    waiting = {run: messages for run in runs if (messages := _waiting(handle, run))}
    dead_letters = handle.topic.settings.max_wait_action is MaxWaitAction.DEAD_LETTER
    whole = []
    messages = body_bytes = 0
    for run in list(waiting)[:runs_max]:
        if dead_letters:
            try:
                await dispose_waiting(commit, handle, run, DeadReason.MAX_WAIT_TIME)
            except RecordUnreadable:  # it stays, and the others leave (V3)
                continue
        messages += waiting[run]
        if waiting[run] == run.messages:
            whole.append(run)
            body_bytes += run.body_bytes
        else:
            handle.state.settle_rest(run, commit.journal)
            body_bytes += waiting[run] * run.message_bytes
    if whole:
        _delete_runs(commit, handle, whole)
    return Removal(messages, body_bytes) if messages else None


def _delete_runs(commit: CommitContext, handle: Handle, runs: list[Run]) -> None:
    handle.state.delete_runs(runs, commit.journal)
    record = handle.state.record
    if not record.messages:  # its entries in the index of ages would be reviewed for nothing
        record.waiting_since_ms = record.settled_since_ms = 0


async def _stored(commit: CommitContext, row: RetentionRow, headers: _Headers) -> list[Run]:
    """The runs that a row names, as far as they are there after the commit under way."""
    start = row.first_key
    purge = commit.state.erasures.purge_of(row.queue_id)
    header = headers.get(start)
    if header is not None and start not in commit.journal.deleted:
        run = run_rows.read_run(start, header)
        if run.end >= row.end_offset and purge is None:  # the only one, as in most queues
            return [run]
    end = run_rows.run_key_of(row.queue_id, row.fairness_key, row.end_offset)
    found = await scan_runs(commit.engine, purge, start, end, limit=RUNS_PER_ROW_MAX)
    gone = commit.journal.deleted
    return run_rows.read_lane_runs(
        [each for each in found if each[0] not in gone] if gone else found
    )


def _runs_at_most(row: RetentionRow) -> int:
    """The runs that a row may remove: as many as were planned. A run has at least one message."""
    messages = row.end_offset - row.first_offset
    return max(1, min(messages, row.planned_rows or messages, RUNS_PER_ROW_MAX))


def _waiting(handle: Handle, run: Run) -> int:
    return sum(end - start for start, end in waiting_spans(handle.state, run))


async def _inactive_queue(commit: CommitContext, row: RetentionRow) -> Removal | None:
    handle = await commit.queue_by_id(row.queue_id, briefly=True)
    if handle is None:
        return None
    record = handle.state.record
    newest_ms = min(row.before_ms, commit.now_ms - row.age_ms)
    if record.messages or record.scheduled or record.last_activity_ms > newest_ms:
        return None
    if record.paused or commit.state.is_in_use(record.lmq_name, commit.now_ms):
        return None
    await delete_queue(commit, handle)
    return Removal(0, 0)


async def _old_records(commit: CommitContext, row: RetentionRow) -> tuple[Removal | None, bool]:
    """The removals, and whether there may be more."""
    limit = RECORDS_PER_ROW_MAX if row.table == "system_metrics" else GATHERED_ROWS_MAX
    before = u64(max(0, commit.now_ms - row.age_ms + 1))
    if row.table == "history":
        old = await history.delete_old(commit, before, limit)
    else:
        table = RECORD_TABLES[row.table]
        old = await commit.engine.scan(table, b"", before, limit=limit)
        old = [each for each in old if (table, each[0]) not in commit.journal.erased_rows]
        for key, _ in old:
            commit.journal.erase(table, key)
    body_bytes = sum(len(key) + len(value) for key, value in old)
    records = len(old)
    if row.table == "messages_consumed":
        records = sum(run_rows.consumed_ranges(value) for _, value in old)
    elif row.table == "history":
        records = sum(len(read_history(*each).queues) for each in old)
    return Removal(records, body_bytes) if old else None, len(old) == limit
