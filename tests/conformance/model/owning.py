"""Owning in the model: exclusive ownership of (group, queue), by an epoch that only grows."""

from typing import Any

from storage_svc.operations.ownership import (
    ConfirmOwnership,
    DropOwnership,
    Ownership,
    TakeOwnership,
)
from tests.conformance.model import administering, delivering
from tests.conformance.model.queue import ModelGroup, QueueModel
from tests.conformance.model.state import PartitionState


def take(model: PartitionState, asked: TakeOwnership, answer: Any) -> object:
    queue = model.get_or_create(asked.lmq_name)
    group = queue.groups.get(asked.group)
    if group is None:
        group = queue.add_group(asked.group)
        model.touched.add(queue.queue_id)
    if (group.owner_client_id, group.owner_epoch) == (asked.client_id, asked.epoch):
        return Ownership(group.owner_client_id, group.owner_epoch, matched=False)
    revoked = delivering.revoke(model, queue, group)
    if asked.start is not None:
        group = administering.move(model, queue, group, asked.start)
    return _owned(model, queue, group, asked.client_id, revoked)


def confirm(model: PartitionState, asked: ConfirmOwnership, _: object) -> object:
    group = model.get(asked.lmq_name).groups.get(asked.group)
    if group is None:
        return Ownership("", 0, matched=False)
    owner = (group.owner_client_id, group.owner_epoch)
    matched = bool(owner[0]) and owner == (asked.client_id, asked.epoch)
    return Ownership(*owner, matched)


def drop(model: PartitionState, asked: DropOwnership, _: object) -> object:
    queue, group = model.get_group(asked.lmq_name, asked.group)
    owner = (group.owner_client_id, group.owner_epoch)
    if owner != (asked.client_id, asked.epoch):
        return Ownership(*owner, matched=False)
    return _owned(model, queue, group, "", delivering.revoke(model, queue, group))


def _owned(
    model: PartitionState,
    queue: QueueModel,
    group: ModelGroup,
    client_id: str,
    revoked: tuple[int, ...],
) -> object:
    model.owner_epoch += 1
    group.owner_client_id, group.owner_epoch = client_id, model.owner_epoch
    model.touched.add(queue.queue_id)
    return Ownership(client_id, group.owner_epoch, True, revoked)
