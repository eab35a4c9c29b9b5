"""The outbox in the model: dead letters leave by it once, or are counted as deleted."""

from storage_svc.operations.operation import Acted, ActionOutcome
from storage_svc.operations.outbox import AppendFromOutbox, ClearOutbox, DeadReason
from tests.model.reference.queue import Published, QueueModel
from tests.model.reference.state import STALE, Dead, ModelState, Refused
from tidemark.api.broker.v1.message_pb2 import MessageBatch
from tidemark.errors import Unavailable


def dispose(
    model: ModelState,
    queue: QueueModel,
    run: Published,
    start: int,
    end: int,
    reason: DeadReason,
) -> None:
    """Messages leave their queue: for the dead-letter topic or, where there is none, for good."""
    if not model.settings(queue).dead_letter_topic:
        model.count_deleted(queue, end - start)
        return
    model.outbox_sequence += 1
    payloads = run.payloads_of(start, end)
    dead = Dead(payloads, queue.name, start, reason, run.fairness_key)
    model.outbox[model.outbox_sequence] = dead


def append_from(model: ModelState, asked: AppendFromOutbox, _: object) -> object:
    entry = asked.entry
    if entry.sequence <= model.high_water:
        return Acted(ActionOutcome.STALE, entry.messages)
    if entry.previous > model.high_water:
        raise Refused(Unavailable)
    model.high_water = entry.sequence
    queue = model.get_or_create(entry.destination_lmq_name, briefly=True)
    payloads = tuple(each.payload for each in MessageBatch.FromString(entry.body).messages)
    key = entry.fairness_key
    queue.append(Published(0, payloads, len(entry.body), key, model.now_ms, 0))
    model.touched.add(queue.queue_id)
    return Acted(ActionOutcome.DONE, entry.messages)


def clear(model: ModelState, asked: ClearOutbox, _: object) -> object:
    dead = model.outbox.pop(asked.sequence, None)
    return STALE if dead is None else Acted(ActionOutcome.DONE, len(dead.payloads))
