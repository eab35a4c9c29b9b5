"""Administering in the model: groups moved and removed, queues emptied and removed, topics put."""

from typing import Any

from storage_svc.operations.groups import GroupPlaced, PlaceGroup, RemoveGroup, Start, StartAt
from storage_svc.operations.operation import Removed
from storage_svc.operations.queues import Paused, PauseQueue, Purge, RemoveQueue
from storage_svc.operations.topics import PutTopic
from tests.model.reference import reservations
from tests.model.reference.queue import ModelGroup, QueueModel
from tests.model.reference.state import ModelState, Refused, check_owner
from tidemark.errors import QueueNotFound, TopicNotEmpty


def place_group(model: ModelState, asked: PlaceGroup, answer: Any) -> object:
    queue = model.get_or_create(asked.lmq_name)
    group = queue.groups.get(asked.group)
    created = group is None
    if group is None:
        group = model.add_group(queue, asked.group)
    if asked.owner_epoch:
        check_owner(group, asked.owner_epoch)
    model.note_use(queue, group)
    revoked: tuple[int, ...] = ()
    if asked.start is not None:
        revoked = reservations.revoke(model, queue, group)
        model.expired += revoked
        group = move(model, queue, group, asked.start)
    cursor = min([queue.next_offset, *group.unsettled])
    if isinstance(answer, GroupPlaced) and answer.cursor <= cursor:
        cursor = answer.cursor  # storage may know less, as long as it is on the safe side
    return GroupPlaced(cursor, created, revoked)


def remove_group(model: ModelState, asked: RemoveGroup, _: object) -> object:
    queue, group = model.get_group(asked.lmq_name, asked.group)
    model.expired += reservations.revoke(model, queue, group)
    queue.remove_group(group.name)
    model.end_standing(queue.name, group.name)
    model.touched.add(queue.queue_id)
    model.erase_settled(queue)
    return Removed(0)


def move(model: ModelState, queue: QueueModel, group: ModelGroup, start: Start) -> ModelGroup:
    base = {
        StartAt.EARLIEST: 0,
        StartAt.LATEST: queue.next_offset,
        StartAt.LAST: max(0, queue.next_offset - start.number),
        StartAt.OFFSET: min(queue.next_offset, start.number),
    }[start.at]
    queue.remove_group(group.name)
    moved = model.add_group(queue, group.name, base)
    moved.owner_client_id, moved.owner_epoch = group.owner_client_id, group.owner_epoch
    moved.waits = group.waits
    model.erase_settled(queue)
    return moved


def remove_queue(model: ModelState, asked: RemoveQueue, _: object) -> object:
    queue = model.get(asked.lmq_name)
    if asked.expected_queue_id not in (0, queue.queue_id):
        raise Refused(QueueNotFound)
    if asked.only_empty and (queue.runs or queue.scheduled):
        raise Refused(TopicNotEmpty)
    del model.queues[asked.lmq_name]
    model.end_standing(queue.name)
    model.expired += (each.reservation_id for each in queue.live)
    messages = queue.messages + sum(run.messages for _, run in queue.scheduled.values())
    model.count_deleted(queue, messages)
    return Removed(messages, sum(run.body_bytes for run in queue.runs.values()))


def purge(model: ModelState, asked: Purge, _: object) -> object:
    queue = model.get(asked.lmq_name)
    held = [run for run in queue.runs.values() if queue.is_held(run)]
    free = [run for run in queue.runs.values() if not queue.is_held(run)]
    for run in free:
        queue.delete_run(run)
        model.touched.add(queue.queue_id)
    messages = sum(run.messages for run in free)
    messages += sum(run.messages for _, run in queue.scheduled.values())
    if queue.scheduled:
        queue.scheduled.clear()
        model.touched.add(queue.queue_id)
    model.count_deleted(queue, messages)
    skipped = sum(run.messages for run in held)
    return Removed(messages, sum(run.body_bytes for run in free), skipped)


def put_topic(model: ModelState, asked: PutTopic, answer: object) -> object:
    model.topics[asked.topic.name] = asked.topic.settings
    return answer


def pause_queue(model: ModelState, asked: PauseQueue, _: object) -> object:
    queue = model.get_or_create(asked.lmq_name) if asked.paused else model.get(asked.lmq_name)
    changed = queue.paused != asked.paused
    queue.paused = asked.paused
    if changed:
        model.touched.add(queue.queue_id)
    return Paused(changed)
