"""Retention: deletes what a pass has planned, after checking each row again (R1-R6, R9).

A row names a run by its queue, lane and offset. What changed since the plan was made is left alone;
what is deleted is counted in the history row of its queue, type and pass, in the same commit. A
pass may repeat itself: what is gone already is counted as stale, not twice.
"""

from storage_svc import administering, history, sweeping
from storage_svc.engines.engine import Table
from storage_svc.engines.keys import u64
from storage_svc.handles import Handle
from storage_svc.lanes import Run
from storage_svc.operations import (
    ApplyRetention,
    DeadReason,
    RetentionApplied,
    RetentionRow,
    RetentionType,
)
from storage_svc.unit import Unit
from tidemark.errors import InvalidArgument
from tidemark.topics import MaxWaitAction, TopicSettings

RECORDS_PER_ROW_MAX = 10_000
"""Old records that one planned row removes; what is left is due again in the next pass."""

_OF_PASSES = (
    RetentionType.EXPIRED,
    RetentionType.COMPLETED,
    RetentionType.MAX_WAIT_TIME_EVICTION,
    RetentionType.INACTIVE_QUEUE,
    RetentionType.OLD_RECORDS,
)
_RECORD_TABLES = {"messages_consumed": Table.CONSUMED, "system_metrics": Table.METRICS}


async def apply(unit: Unit, operation: ApplyRetention) -> RetentionApplied:
    """Delete the planned rows that are still due."""
    if unit.deletions_refused is not None:
        raise unit.deletions_refused
    _check(operation)
    messages = body_bytes = queues = stale = 0
    totals: dict[str, tuple[int, int]] = {}
    for row in operation.rows:
        match operation.type:
            case RetentionType.OLD_RECORDS:
                removed = await _old_records(unit, row)
            case RetentionType.INACTIVE_QUEUE:
                removed = await _inactive_queue(unit, row)
                queues += removed is not None
            case _:
                removed = await _run(unit, row, operation.type)
        if removed is None:
            stale += 1
            continue
        messages += removed[0]
        body_bytes += removed[1]
        name = row.lmq_name or row.table
        before = totals.get(name, (0, 0))
        totals[name] = (before[0] + removed[0], before[1] + removed[1])
    for name, total in totals.items():
        await history.add(unit, name, operation.type, operation.pass_id, *total)
    return RetentionApplied(messages, body_bytes, queues, stale)


def _check(operation: ApplyRetention) -> None:
    """Refuse all of a call that could not be done whole."""
    if operation.type not in _OF_PASSES:
        raise InvalidArgument(f"{operation.type.value} is not the business of a pass", field="type")
    if operation.type is RetentionType.OLD_RECORDS:
        for row in operation.rows:
            if row.table != "history" and row.table not in _RECORD_TABLES:
                raise InvalidArgument(f"{row.table!r} is not a table of records", field="table")


async def _run(unit: Unit, row: RetentionRow, kind: RetentionType) -> tuple[int, int] | None:
    handle = await unit.memory.handles.by_id(row.queue_id, unit.journal)
    if handle is None:
        return None
    run = await sweeping.find_run(unit, handle, row.fairness_key, row.first_offset)
    if run is None or not _is_due(unit, handle, run, kind):
        return None
    settings = handle.topic.settings
    if kind is not RetentionType.MAX_WAIT_TIME_EVICTION:
        handle.state.delete_run(run, unit.journal)
        return run.messages, run.body_bytes
    if settings.max_wait_action is MaxWaitAction.DEAD_LETTER:
        messages = await sweeping.remove_run(unit, handle, run, DeadReason.MAX_WAIT_TIME)
    else:
        messages = sum(end - start for start, end in sweeping.waiting_spans(handle, run))
        handle.state.delete_run(run, unit.journal)
    return messages, run.body_bytes


def _is_due(unit: Unit, handle: Handle, run: Run, kind: RetentionType) -> bool:
    """The rule of the topic as it is now, on the run as it is now (R9)."""
    settings = handle.topic.settings
    if handle.state.is_held(run):
        return False
    age_ms = unit.now_ms - run.publish_time_ms
    limit_s = _age_limit_s(settings, kind)
    if not limit_s or age_ms < limit_s * 1000:
        return False
    settled = not sweeping.waiting_spans(handle, run)
    if kind is RetentionType.COMPLETED:
        return settled
    return kind is RetentionType.EXPIRED or not settled


def _age_limit_s(settings: TopicSettings, kind: RetentionType) -> int:
    if kind is RetentionType.MAX_WAIT_TIME_EVICTION:
        return settings.max_wait_time_seconds
    if not settings.retention_enabled:
        return 0
    if kind is RetentionType.EXPIRED:
        return settings.retention_seconds
    return settings.completed_retention_seconds


async def _inactive_queue(unit: Unit, row: RetentionRow) -> tuple[int, int] | None:
    handle = await unit.memory.handles.by_id(row.queue_id, unit.journal)
    if handle is None:
        return None
    record = handle.state.record
    if record.messages or record.scheduled or record.last_activity_ms > row.before_ms:
        return None
    await administering.delete_queue(unit, handle)
    return 0, 0


async def _old_records(unit: Unit, row: RetentionRow) -> tuple[int, int] | None:
    before = u64(row.before_ms)
    if row.table == "history":
        old = await history.forget(unit, before, RECORDS_PER_ROW_MAX)
    else:
        table = _RECORD_TABLES[row.table]
        old = await unit.memory.engine.scan(table, b"", before, limit=RECORDS_PER_ROW_MAX)
        old = [row for row in old if (table, row[0]) not in unit.journal.gone]
        for key, _ in old:
            unit.journal.erase(table, key)
    body_bytes = sum(len(key) + len(value) for key, value in old)
    return (len(old), body_bytes) if old else None
