"""Sweeping in the model: what can be delivered no more is buried, unless it has moved on."""

from storage_svc.operations.dead_letters import Bury
from storage_svc.operations.operation import Acted, ActionOutcome
from storage_svc.operations.outbox import DeadReason
from tests.model.reference import outbox
from tests.model.reference.queue import Place, QueueModel
from tests.model.reference.state import STALE, ModelState, Refused
from tidemark.errors import PartitionFaulty


def bury(model: ModelState, asked: Bury, _: object) -> object:
    if model.time_is_suspicious:
        raise Refused(PartitionFaulty)
    queue = model.use_id(asked.queue_id, briefly=True)
    if queue is None:
        return STALE
    if asked.reason is DeadReason.TIME_TO_LIVE:
        return _bury_run(model, queue, asked)
    group = queue.groups.get(asked.group)
    end = None if group is None else group.buried.get(asked.first_offset)
    if group is None or end is None:
        return STALE
    standing = group.standings[asked.first_offset]
    if standing.attempts != asked.expected_attempts:
        return STALE
    del group.buried[asked.first_offset]
    for offset in range(asked.first_offset, end):
        group.standings[offset].place = Place.SETTLED
    late = 0 < standing.run.dead_deadline_ms <= model.now_ms
    exhausted = 0 < model.settings(queue).max_attempts <= standing.attempts
    reason = asked.reason if exhausted or not late else DeadReason.TIME_TO_LIVE
    outbox.dispose(model, queue, standing.run, asked.first_offset, end, reason)
    model.touched.add(queue.queue_id)
    model.delete_settled(queue, [standing.run])
    return Acted(ActionOutcome.DONE, end - asked.first_offset)


def _bury_run(model: ModelState, queue: QueueModel, asked: Bury) -> object:
    run = queue.runs.get(asked.first_offset)
    if run is None or queue.is_held(run):
        return STALE
    if not run.dead_deadline_ms == asked.expected_dead_deadline_ms <= model.now_ms:
        return STALE
    waiting = queue.waiting_spans(run)
    deaths = waiting
    if queue.groups and model.settings(queue).dead_letter_topic:
        groups = [queue.groups[name] for name in sorted(queue.groups)]
        deaths = [span for group in groups for span in group.dying(run)]
    queue.delete_run(run)
    model.touched.add(queue.queue_id)
    for start, end in deaths:
        outbox.dispose(model, queue, run, start, end, DeadReason.TIME_TO_LIVE)
    removed = sum(end - start for start, end in waiting)
    model.count_deleted(queue, len(run.payloads) - removed)  # settled, and kept for replay
    return Acted(ActionOutcome.DONE, removed)
