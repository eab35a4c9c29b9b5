"""Owning in the model: exclusive ownership of (group, queue), by an epoch that only grows."""

from typing import Any

from storage_svc.operations.ownership import (
    ConfirmOwnership,
    DropOwnership,
    Ownership,
    TakeOwnership,
)
from tests.model.reference import administration, reservations
from tests.model.reference.queue import ModelGroup, QueueModel
from tests.model.reference.state import ModelState


def take(model: ModelState, asked: TakeOwnership, answer: Any) -> object:
    queue = model.get_or_create(asked.lmq_name)
    group = queue.groups.get(asked.group)
    if group is None:
        group = model.add_group(queue, asked.group)
    model.note_use(queue, group)
    if (group.owner_client_id, group.owner_epoch) == (asked.client_id, asked.epoch):
        return Ownership(group.owner_client_id, group.owner_epoch, matched=False)
    model.end_standing(queue.name, group.name)
    revoked = reservations.revoke(model, queue, group)
    if asked.start is not None:
        group = administration.move(model, queue, group, asked.start)
    return _owned(model, queue, group, asked.client_id, revoked)


def confirm(model: ModelState, asked: ConfirmOwnership, _: object) -> object:
    group = model.get(asked.lmq_name).groups.get(asked.group)
    if group is None:
        return Ownership("", 0, matched=False)
    owner = (group.owner_client_id, group.owner_epoch)
    matched = bool(owner[0]) and owner == (asked.client_id, asked.epoch)
    return Ownership(*owner, matched)


def drop(model: ModelState, asked: DropOwnership, _: object) -> object:
    queue, group = model.get_group(asked.lmq_name, asked.group)
    owner = (group.owner_client_id, group.owner_epoch)
    if owner != (asked.client_id, asked.epoch):
        return Ownership(*owner, matched=False)
    model.end_standing(queue.name, group.name)
    return _owned(model, queue, group, "", reservations.revoke(model, queue, group))


def _owned(
    model: ModelState,
    queue: QueueModel,
    group: ModelGroup,
    client_id: str,
    revoked: tuple[int, ...],
) -> object:
    model.owner_epoch += 1
    group.owner_client_id, group.owner_epoch = client_id, model.owner_epoch
    model.touched.add(queue.queue_id)
    return Ownership(client_id, group.owner_epoch, True, revoked)
