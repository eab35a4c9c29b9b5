"""Sweeping: the storage half of what lifecycle plans (L5, L6, L8).

Each action names the state it was planned from; if that has moved on, it is a no-op. Nothing that a
live reservation holds is touched.
"""

from storage_svc.engines import rows
from storage_svc.engines.engine import Table
from storage_svc.engines.keys import u64x3
from storage_svc.loading.handles import Handle
from storage_svc.operations import Acted, ActionOutcome, Bury, DeadReason, outbox
from storage_svc.operations.outbox import Death
from storage_svc.partition.commit import Unit
from storage_svc.queue.lane import Run, Slice
from storage_svc.queue.reservation import Span

_STALE = Acted(ActionOutcome.STALE)


async def bury(unit: Unit, operation: Bury) -> Acted:
    """Take messages away that must not be delivered any more."""
    if unit.deletions_refused is not None:
        raise unit.deletions_refused
    handle = await unit.memory.handles.by_id(operation.queue_id, unit.journal)
    if handle is None:
        if operation.reason is DeadReason.TIME_TO_LIVE:
            _forget_ttl(unit, operation)
        return _STALE
    if operation.reason is DeadReason.ATTEMPTS_EXHAUSTED:
        return await _bury_slice(unit, handle, operation)
    return await _bury_run(unit, handle, operation)


async def _bury_slice(unit: Unit, handle: Handle, operation: Bury) -> Acted:
    """Attempts are exhausted in one group: its slice was buried when that happened."""
    group = handle.state.groups.get(operation.group)
    slice_ = None if group is None else group.buried.get(operation.first_offset)
    if group is None or slice_ is None or slice_.attempts != operation.expected_attempts:
        return _STALE
    body = await unit.body(handle.state.record.queue_id, slice_.run)
    handle.state.settle_buried(group, slice_.start, unit.journal)
    late = 0 < slice_.run.dead_deadline_ms <= unit.now_ms
    exhausted = 0 < handle.topic.settings.max_attempts <= slice_.attempts
    reason = DeadReason.TIME_TO_LIVE if late and not exhausted else DeadReason.ATTEMPTS_EXHAUSTED
    await outbox.dispose(unit, handle, slice_, body, Death(reason, group.name))
    return Acted(ActionOutcome.DONE, slice_.messages)


async def _bury_run(unit: Unit, handle: Handle, operation: Bury) -> Acted:
    """The time to live of a run has passed: it leaves in every group that has not settled it."""
    run = await find_run(unit, handle, operation.fairness_key, operation.first_offset)
    if run is None:
        _forget_ttl(unit, operation)
        return _STALE
    if (
        run.dead_deadline_ms != operation.expected_dead_deadline_ms
        or run.dead_deadline_ms > unit.now_ms
        or handle.state.is_held(run)
    ):
        return _STALE
    return Acted(ActionOutcome.DONE, await remove_run(unit, handle, run, DeadReason.TIME_TO_LIVE))


async def remove_run(unit: Unit, handle: Handle, run: Run, reason: DeadReason) -> int:
    """Delete a run that nothing holds; what some group still waited for is disposed of.

    Returns how many messages that was.
    """
    waiting = waiting_spans(handle, run)
    groups = ",".join(
        group.name for group in handle.state.groups.values() if not group.has_settled(run)
    )
    body = await unit.body(handle.queue_id, run) if waiting else b""
    handle.state.delete_runs((run,), unit.journal)
    for start, end in waiting:
        await outbox.dispose(unit, handle, Slice(start, end, run), body, Death(reason, groups))
    return sum(end - start for start, end in waiting)


def waiting_spans(handle: Handle, run: Run) -> list[Span]:
    """The messages of a run that some group has not settled; all of them without any group."""
    groups = handle.state.groups.values()
    if not groups:
        return [(run.first_offset, run.end)]
    merged: list[Span] = []
    for start, end in sorted(span for group in groups for span in group.unsettled_spans(run)):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


async def find_run(unit: Unit, handle: Handle, fairness_key: str, first_offset: int) -> Run | None:
    """The header of a run as it is after the commit under way; None if it is gone."""
    queue_id = handle.state.record.queue_id
    for run in unit.journal.appended.get(queue_id, ()):
        if run.first_offset == first_offset:
            return run
    key = rows.run_key_of(queue_id, fairness_key, first_offset)
    (value,) = await unit.memory.engine.load(Table.RUN_HEADERS, [key])
    return None if value is None or key in unit.journal.deleted else rows.read_run(key, value)


def _forget_ttl(unit: Unit, operation: Bury) -> None:
    """The run is gone, its entry in the index is left over."""
    key = u64x3(operation.expected_dead_deadline_ms, operation.queue_id, operation.first_offset)
    unit.journal.batch.delete(Table.TTL, key)
