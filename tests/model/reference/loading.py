"""Loading and unloading in the model: what is evicted, and when."""

from storage_svc.operations.loading import (
    Materialize,
    Materialized,
    RunHousekeeping,
    UnloadOutcome,
    Unmaterialize,
)
from storage_svc.operations.operation import Removed
from tests.model.reference.queue import QueueModel
from tests.model.reference.state import DAY_MS, ModelState
from tidemark.limits import PRODUCER_WINDOW_MS


def materialize(model: ModelState, asked: Materialize, _: object) -> object:
    existing = model.queues.get(asked.lmq_name)
    was_cold = existing is None or not existing.loaded
    queue = model.get_or_create(asked.lmq_name) if asked.create else model.get(asked.lmq_name)
    queue.tracked = True
    return Materialized(queue.queue_id, was_cold, existing is None)


def unmaterialize(model: ModelState, asked: Unmaterialize, answer: object) -> object:
    queue = model.queues.get(asked.lmq_name)
    if queue is None:
        return UnloadOutcome.NOT_PRESENT
    if not queue.loaded:
        return UnloadOutcome.NOT_MATERIALIZED
    if queue.live:
        return UnloadOutcome.HAS_INFLIGHT
    if queue.queue_id in model.touched:
        return UnloadOutcome.RACE_LOST
    if queue.queue_id in model.unloaded and answer is UnloadOutcome.RACE_LOST:
        return answer
    _evict(model, queue)
    return UnloadOutcome.EVICTED


def run_housekeeping(model: ModelState, _: RunHousekeeping, __: object) -> object:
    idle = [
        queue
        for queue in model.queues.values()
        if queue.loaded
        and not queue.tracked
        and not queue.live
        and model.now_ms - queue.last_used_ms >= 2 * model.settings(queue).idle_after_ms
    ]
    for queue in idle:
        _evict(model, queue)
    for name, producer in () if model.time_is_suspicious else list(model.producers.items()):
        if producer.last_day < (model.now_ms - PRODUCER_WINDOW_MS) // DAY_MS:
            del model.producers[name]
    return Removed(len(idle))


def _evict(model: ModelState, queue: QueueModel) -> None:
    queue.evict()
    model.unloaded.add(queue.queue_id)
    model.end_standing(queue.name)
