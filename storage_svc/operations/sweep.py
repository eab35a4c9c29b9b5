"""Sweeping: the storage half of what lifecycle plans (L5, L6, L8).

Each action names the state it was planned from; if that has moved on, it is a no-op. Nothing that a
live reservation holds is touched.
"""

from storage_svc.engines.engine import Table
from storage_svc.engines.keys import u64x3
from storage_svc.loading.handles import Handle
from storage_svc.operations import Acted, ActionOutcome, Bury, DeadReason, outbox
from storage_svc.operations.outbox import Death
from storage_svc.partition.commit import CommitContext
from storage_svc.queue.lane import Run, Slice
from storage_svc.queue.reservation import Span

_STALE = Acted(ActionOutcome.STALE)


async def bury(commit: CommitContext, operation: Bury) -> Acted:
    """Take messages away that must not be delivered any more."""
    if commit.deletions_refused is not None:
        raise commit.deletions_refused
    handle = await commit.queue_by_id(operation.queue_id)
    if handle is None:
        if operation.reason is DeadReason.TIME_TO_LIVE:
            _forget_ttl(commit, operation)
        return _STALE
    if operation.reason is DeadReason.ATTEMPTS_EXHAUSTED:
        return await _bury_slice(commit, handle, operation)
    return await _bury_run(commit, handle, operation)


async def _bury_slice(commit: CommitContext, handle: Handle, operation: Bury) -> Acted:
    """Attempts are exhausted in one group: its slice was buried when that happened."""
    group = handle.state.groups.get(operation.group)
    slice_ = None if group is None else group.buried.get(operation.first_offset)
    if group is None or slice_ is None or slice_.attempts != operation.expected_attempts:
        return _STALE
    body = await commit.body(handle.state.record.queue_id, slice_.run)
    handle.state.settle_buried(group, slice_.start, commit.journal)
    late = 0 < slice_.run.dead_deadline_ms <= commit.now_ms
    exhausted = 0 < handle.topic.settings.max_attempts <= slice_.attempts
    reason = DeadReason.TIME_TO_LIVE if late and not exhausted else DeadReason.ATTEMPTS_EXHAUSTED
    await outbox.dispose(commit, handle, slice_, body, Death(reason, group.name))
    return Acted(ActionOutcome.DONE, slice_.messages)


async def _bury_run(commit: CommitContext, handle: Handle, operation: Bury) -> Acted:
    """The time to live of a run has passed: it leaves in every group that has not settled it."""
    run = await commit.find_run(handle.queue_id, operation.fairness_key, operation.first_offset)
    if run is None:
        _forget_ttl(commit, operation)
        return _STALE
    if (
        run.dead_deadline_ms != operation.expected_dead_deadline_ms
        or run.dead_deadline_ms > commit.now_ms
        or handle.state.is_held(run)
    ):
        return _STALE
    return Acted(ActionOutcome.DONE, await remove_run(commit, handle, run, DeadReason.TIME_TO_LIVE))


async def remove_run(commit: CommitContext, handle: Handle, run: Run, reason: DeadReason) -> int:
    """Delete a run that nothing holds; what some group still waited for is disposed of.

    Returns how many messages that was.
    """
    waiting = waiting_spans(handle, run)
    groups = ",".join(
        group.name for group in handle.state.groups.values() if not group.has_settled(run)
    )
    body = await commit.body(handle.queue_id, run) if waiting else b""
    handle.state.delete_runs((run,), commit.journal)
    for start, end in waiting:
        await outbox.dispose(commit, handle, Slice(start, end, run), body, Death(reason, groups))
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


def _forget_ttl(commit: CommitContext, operation: Bury) -> None:
    """The run is gone, its entry in the index is left over."""
    key = u64x3(operation.expected_dead_deadline_ms, operation.queue_id, operation.first_offset)
    commit.journal.batch.delete(Table.TTL, key)
