"""Appending in the model: runs at once or when they are due, each sequence once."""

from storage_svc.operations.operation import Acted, ActionOutcome, Removed
from storage_svc.operations.publish import Append, Appended
from storage_svc.operations.schedule import PromoteScheduled, Unschedule
from tests.model.reference.queue import Published
from tests.model.reference.state import DAY_MS, STALE, ModelProducer, ModelState, Refused
from tidemark.api.broker.v1.message_pb2 import MessageBatch
from tidemark.errors import RunNotScheduled, SequenceConflict, SequenceTooOld
from tidemark.limits import PRODUCER_SEQUENCES_MAX


def append(model: ModelState, asked: Append, answer: object) -> object:
    producer = model.producers.get(asked.producer_id, ModelProducer())
    highest = max(producer.answers, default=0)
    first = producer.answers.get(asked.sequence) if asked.sequence else None
    too_old = 0 < asked.sequence <= highest - PRODUCER_SEQUENCES_MAX
    if too_old and (first is None or isinstance(answer, SequenceTooOld)):
        raise Refused(SequenceTooOld)
    if first is not None:
        if (first[0].lmq_name, first[0].body) != (asked.lmq_name, asked.body):
            raise Refused(SequenceConflict)
        return first[1]._replace(duplicate=True)
    queue = model.get_or_create(asked.lmq_name)
    ttl_ms = asked.ttl_ms
    messages = MessageBatch.FromString(asked.body).messages
    run = Published(
        0,
        tuple(message.payload for message in messages),
        len(asked.body),
        asked.fairness_key,
        model.now_ms,
        model.now_ms + ttl_ms if ttl_ms else 0,
    )
    model.touched.add(queue.queue_id)
    if asked.delay_ms:
        model.schedule_id += 1
        queue.scheduled[model.schedule_id] = (model.now_ms + asked.delay_ms, run)
        appended = Appended(queue.queue_id, 0, model.schedule_id)
    else:
        appended = Appended(queue.queue_id, queue.append(run).first_offset)
    if asked.sequence:
        producer.answers[asked.sequence] = (asked, appended)
        producer.last_day = model.now_ms // DAY_MS
        model.producers[asked.producer_id] = producer
    return appended


def promote(model: ModelState, asked: PromoteScheduled, _: object) -> object:
    for queue in model.queues.values():
        if asked.schedule_id not in queue.scheduled:
            continue
        due_ms, run = queue.scheduled[asked.schedule_id]
        if due_ms == asked.expected_due_ms <= model.now_ms:
            model.find(queue.name, briefly=True)
            del queue.scheduled[asked.schedule_id]
            queue.append(run)
            model.touched.add(queue.queue_id)
            return Acted(ActionOutcome.DONE, run.messages)
    return STALE


def unschedule(model: ModelState, asked: Unschedule, _: object) -> object:
    queue = model.get(asked.lmq_name)
    if asked.schedule_id not in queue.scheduled:
        raise Refused(RunNotScheduled)
    if queue.scheduled[asked.schedule_id][0] <= model.now_ms:
        raise Refused(RunNotScheduled)  # due already, though not promoted yet
    run = queue.scheduled.pop(asked.schedule_id)[1]
    model.touched.add(queue.queue_id)
    return Removed(run.messages)
