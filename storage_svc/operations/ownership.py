"""Ownership of exclusive queues: the durable owner of (group, queue) and its epoch (E8-E10).

Epochs come from one counter per partition that only grows, so a client that owned the queue before
it was deleted and created again is fenced as well. Taking ownership revokes in the same commit what
the previous owner holds.
"""

from typing import NamedTuple

from storage_svc.operations.fields import group_name, queue_name
from storage_svc.operations.groups import Start, erase_settled, group_or_new, move_group
from storage_svc.operations.operation import ExchangeDecoders
from storage_svc.partition.commit import CommitContext
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.names import validate_client_id


class Ownership(NamedTuple):
    """The owner of (group, queue) after the operation."""

    client_id: str
    epoch: int
    matched: bool
    revoked: tuple[int, ...] = ()

    def write_to(self, proto: exchange_pb2.OperationResult) -> None:
        proto.ownership.client_id = self.client_id
        proto.ownership.epoch = self.epoch
        proto.ownership.matched = self.matched
        proto.ownership.revoked_reservation_ids.extend(self.revoked)


class TakeOwnership(NamedTuple):
    """Make a client the owner under a new epoch; for the owner itself nothing changes (E7, E9).

    The owner presents its epoch. Without it, the client is another process under the same id, and
    the epoch is raised so that the first one is fenced.
    """

    lmq_name: str
    group: str
    client_id: str
    start: Start | None = None
    epoch: int = 0

    @classmethod
    def from_proto(cls, proto: exchange_pb2.TakeOwnership) -> "TakeOwnership":
        validate_client_id(proto.client_id)
        start = Start.from_proto(proto.start) if proto.HasField("start") else None
        lmq_name, group = queue_name(proto.lmq_name), group_name(proto.group)
        return cls(lmq_name, group, proto.client_id, start, proto.epoch)

    async def apply(self, commit: CommitContext) -> Ownership:
        handle = await commit.queue_or_new(self.lmq_name)
        group = await group_or_new(commit, handle, self.group)
        handle.state.note_use(group, commit.now_ms, commit.journal)
        owner = (group.owner_client_id, group.owner_epoch)
        if owner == (self.client_id, self.epoch):
            return Ownership(*owner, matched=False)
        commit.end_standing(group)
        revoked = handle.state.revoke(group, commit.journal)
        if self.start is not None:
            group = await move_group(commit, handle, group, self.start)
            await erase_settled(commit, handle)
        commit.counters.owner_epoch += 1
        group.owner_client_id = self.client_id
        group.owner_epoch = commit.counters.owner_epoch
        commit.journal.group_changed(handle.state.record, group)
        return Ownership(group.owner_client_id, group.owner_epoch, True, tuple(revoked))


class ConfirmOwnership(NamedTuple):
    """Compare (client, epoch) with what is stored; changes nothing (E7)."""

    lmq_name: str
    group: str
    client_id: str = ""
    epoch: int = 0

    @classmethod
    def from_proto(cls, proto: exchange_pb2.ConfirmOwnership) -> "ConfirmOwnership":
        return cls(
            queue_name(proto.lmq_name), group_name(proto.group), proto.client_id, proto.epoch
        )

    async def apply(self, commit: CommitContext) -> Ownership:
        handle = await commit.queue(self.lmq_name)
        group = handle.state.groups.get(self.group)
        if group is None:
            return Ownership("", 0, matched=False)
        owner = (group.owner_client_id, group.owner_epoch)
        matched = bool(group.owner_client_id) and owner == (self.client_id, self.epoch)
        return Ownership(*owner, matched)


class DropOwnership(NamedTuple):
    """Give ownership up, if (client, epoch) is what is stored; its epoch is never used again."""

    lmq_name: str
    group: str
    client_id: str
    epoch: int

    @classmethod
    def from_proto(cls, proto: exchange_pb2.DropOwnership) -> "DropOwnership":
        return cls(
            queue_name(proto.lmq_name), group_name(proto.group), proto.client_id, proto.epoch
        )

    async def apply(self, commit: CommitContext) -> Ownership:
        handle = await commit.queue(self.lmq_name)
        group = handle.state.group(self.group)
        owner = (group.owner_client_id, group.owner_epoch)
        if owner != (self.client_id, self.epoch):
            return Ownership(*owner, matched=False)
        commit.end_standing(group)
        revoked = handle.state.revoke(group, commit.journal)
        commit.counters.owner_epoch += 1
        group.owner_client_id = ""
        group.owner_epoch = commit.counters.owner_epoch
        commit.journal.group_changed(handle.state.record, group)
        return Ownership("", group.owner_epoch, True, tuple(revoked))


OPERATIONS: ExchangeDecoders = {
    "take_ownership": TakeOwnership.from_proto,
    "confirm_ownership": ConfirmOwnership.from_proto,
    "drop_ownership": DropOwnership.from_proto,
}
