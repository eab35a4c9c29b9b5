"""Loading and unloading in the model: what is evicted, and when."""

from storage_svc import operations as op
from storage_svc.operations import Eviction, Result
from tests.conformance.model.state import DAY_MS, PartitionState
from tidemark.limits import PRODUCER_WINDOW_MS


def materialize(model: PartitionState, asked: op.Materialize, answer: Result | None) -> Result:
    existing = model.queues.get(asked.lmq_name)
    was_cold = existing is None or not existing.loaded
    queue = model.get_or_create(asked.lmq_name) if asked.create else model.get(asked.lmq_name)
    queue.tracked = True
    stamp = answer.activity_stamp if isinstance(answer, op.Materialized) else 0
    queue.stamps[stamp] = queue.uses
    return op.Materialized(queue.queue_id, stamp, was_cold, existing is None)


def unmaterialize(model: PartitionState, asked: op.Unmaterialize, _: Result | None) -> Result:
    queue = model.queues.get(asked.lmq_name)
    if queue is None:
        return Eviction.NOT_PRESENT
    if not queue.loaded:
        return Eviction.NOT_MATERIALIZED
    if queue.live:
        return Eviction.HAS_INFLIGHT
    stamp = asked.expected_activity_stamp
    if (stamp and queue.stamps.get(stamp) != queue.uses) or queue.queue_id in model.touched:
        return Eviction.RACE_LOST
    queue.evict()
    return Eviction.EVICTED


def keep_house(model: PartitionState, _: op.KeepHouse, __: Result | None) -> Result:
    idle = [
        queue
        for queue in model.queues.values()
        if queue.loaded
        and not queue.tracked
        and not queue.live
        and model.now_ms - queue.last_used_ms >= 2 * model.settings(queue).idle_after_ms
    ]
    for queue in idle:
        queue.evict()
    for name, producer in () if model.time_is_suspicious else list(model.producers.items()):
        if producer.last_day < (model.now_ms - PRODUCER_WINDOW_MS) // DAY_MS:
            del model.producers[name]
    return op.Removed(len(idle))
