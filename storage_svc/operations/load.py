"""Loading and unloading queues at a broker's request (I2, I4, I9)."""

from storage_svc.operations import (
    Eviction,
    KeepHouse,
    Materialize,
    Materialized,
    Removed,
    Unmaterialize,
)
from storage_svc.partition.commit import Unit

UNLOADS_PER_COMMIT_MAX = 1000
PRODUCERS_PER_COMMIT_MAX = 100


async def materialize(unit: Unit, operation: Materialize) -> Materialized:
    """Load a queue for a broker, which tracks it from now on."""
    handles = unit.memory.handles
    was_cold = handles.peek(operation.lmq_name) is None
    queues = unit.memory.counters.queues
    if operation.create:
        handle = await handles.get_or_create(operation.lmq_name, unit.journal)
    else:
        handle = await handles.get(operation.lmq_name, unit.journal)
    handle.tracked = True
    created = unit.memory.counters.queues != queues
    return Materialized(handle.state.record.queue_id, handle.stamp, was_cold, created)


async def unmaterialize(unit: Unit, operation: Unmaterialize) -> Eviction:
    """Unload a queue that a broker has found idle."""
    return await unit.memory.handles.unload(
        operation.lmq_name, operation.expected_activity_stamp, unit.journal
    )


async def keep_house(unit: Unit, _: KeepHouse) -> Removed:
    """Forget what nobody will ask to be forgotten; returns how many queues were unloaded."""
    idle = unit.memory.handles.untracked(unit.now_ms)[:UNLOADS_PER_COMMIT_MAX]
    for lmq_name in idle:
        await unit.memory.handles.unload(lmq_name, 0, unit.journal)
    if unit.deletions_refused is None:
        await unit.memory.producers.forget_old(
            unit.now_ms, PRODUCERS_PER_COMMIT_MAX, unit.journal.batch
        )
    return Removed(len(idle))
