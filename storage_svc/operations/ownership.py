"""Owning: exclusive ownership of (group, queue), durable beside the queue (E8-E10).

Epochs come from one counter per partition that only grows, so a client that held the queue before
it was deleted and created again is fenced too. Taking ownership revokes in the same commit what the
old owner holds.
"""

from storage_svc.operations import ConfirmOwnership, DropOwnership, Ownership, TakeOwnership
from storage_svc.operations import administer as administering
from storage_svc.partition.commit import CommitContext


async def take(commit: CommitContext, operation: TakeOwnership) -> Ownership:
    """Make a client the owner; for the owner itself nothing changes (E7)."""
    handle = await commit.queue_or_new(operation.lmq_name)
    group = await administering.get_or_create_group(commit, handle, operation.group)
    if group.owner_client_id == operation.client_id and group.owner_epoch:
        return Ownership(group.owner_client_id, group.owner_epoch, matched=False)
    revoked = handle.state.revoke(group, commit.journal)
    if operation.start is not None:
        group = await administering.move(commit, handle, group, operation.start)
        await administering.erase_settled(commit, handle)
    commit.counters.owner_epoch += 1
    group.owner_client_id = operation.client_id
    group.owner_epoch = commit.counters.owner_epoch
    commit.journal.group_changed(handle.state.record, group)
    return Ownership(group.owner_client_id, group.owner_epoch, True, tuple(revoked))


async def confirm(commit: CommitContext, operation: ConfirmOwnership) -> Ownership:
    """Say who owns the queue, and whether that is who asks."""
    handle = await commit.queue(operation.lmq_name)
    group = handle.state.groups.get(operation.group)
    if group is None:
        return Ownership("", 0, matched=False)
    owner = (group.owner_client_id, group.owner_epoch)
    matched = bool(group.owner_client_id) and owner == (operation.client_id, operation.epoch)
    return Ownership(*owner, matched)


async def drop(commit: CommitContext, operation: DropOwnership) -> Ownership:
    """Give ownership up; what the owner holds goes back at once, and its epoch stays used."""
    handle = await commit.queue(operation.lmq_name)
    group = handle.state.group(operation.group)
    owner = (group.owner_client_id, group.owner_epoch)
    if owner != (operation.client_id, operation.epoch):
        return Ownership(*owner, matched=False)
    revoked = handle.state.revoke(group, commit.journal)
    commit.counters.owner_epoch += 1
    group.owner_client_id = ""
    group.owner_epoch = commit.counters.owner_epoch
    commit.journal.group_changed(handle.state.record, group)
    return Ownership("", group.owner_epoch, True, tuple(revoked))
