"""Loading and unloading queues at a broker's request (I2, I4, I9)."""

from storage_svc.operations import (
    Eviction,
    KeepHouse,
    Materialize,
    Materialized,
    Removed,
    Unmaterialize,
)
from storage_svc.partition.commit import CommitContext

UNLOADS_PER_COMMIT_MAX = 1000
PRODUCERS_PER_COMMIT_MAX = 100


async def materialize(commit: CommitContext, operation: Materialize) -> Materialized:
    """Load a queue for a broker, which tracks it from now on."""
    was_cold = commit.handles.peek(operation.lmq_name) is None
    queues = commit.counters.queues
    if operation.create:
        handle = await commit.queue_or_new(operation.lmq_name)
    else:
        handle = await commit.queue(operation.lmq_name)
    handle.tracked = True
    created = commit.counters.queues != queues
    return Materialized(handle.state.record.queue_id, handle.stamp, was_cold, created)


async def unmaterialize(commit: CommitContext, operation: Unmaterialize) -> Eviction:
    """Unload a queue that a broker has found idle."""
    return await _unload(commit, operation.lmq_name, operation.expected_activity_stamp)


async def keep_house(commit: CommitContext, _: KeepHouse) -> Removed:
    """Forget what nobody will ask to be forgotten; returns how many queues were unloaded."""
    idle = commit.handles.untracked(commit.now_ms)[:UNLOADS_PER_COMMIT_MAX]
    for lmq_name in idle:
        await _unload(commit, lmq_name)
    if commit.deletions_refused is None:
        await commit.state.producers.forget_old(
            commit.now_ms, PRODUCERS_PER_COMMIT_MAX, commit.journal.batch
        )
    return Removed(len(idle))


async def _unload(commit: CommitContext, lmq_name: str, expected_stamp: int = 0) -> Eviction:
    handle = commit.handles.peek(lmq_name)
    if handle is None:
        deleted = lmq_name in commit.journal.removed_names
        if deleted or not await commit.handles.exists(lmq_name):
            return Eviction.NOT_PRESENT
        return Eviction.NOT_MATERIALIZED
    if handle.state.has_inflight:
        return Eviction.HAS_INFLIGHT
    # What this commit changes is not in the engine yet: it could not be loaded again.
    changed = handle.queue_id in commit.journal.changed_queues
    if changed or expected_stamp not in (0, handle.stamp):
        return Eviction.RACE_LOST
    await commit.forget_lanes(handle.state)
    handle.state.prepare_to_unload(commit.journal)
    commit.handles.drop(lmq_name)
    return Eviction.EVICTED
