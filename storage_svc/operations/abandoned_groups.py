"""Abandoned groups: removed once no consumer has used them for the time of their topic (R14).

A group keeps what it has not settled, so that one that is forgotten keeps everything. Its last use
is stored now and then, with rows that change anyway. The broker reports the groups of which it has
a consumer or an owner; their last use is the time of the last review, which comes several times
within the expiry, so that a broker that is gone leaves no group behind that looks unused.
"""

import logging
from collections.abc import Iterable
from typing import NamedTuple

from storage_svc.loading.handles import Handle
from storage_svc.operations.fields import group_name, queue_name
from storage_svc.operations.groups import delete_group, erase_settled
from storage_svc.operations.operation import ExchangeDecoders
from storage_svc.operations.retention_rules import Removal, RetentionRow
from storage_svc.partition.commit import CommitContext
from storage_svc.partition.state import PartitionState
from storage_svc.queue.group import Group
from storage_svc.queue.queue import QueueState
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.topics import Topic

_REVIEWS = 4
"""How often a group in use is reviewed within its expiry, at least."""

_log = logging.getLogger(__name__)


def expiry_ms(topic: Topic) -> int:
    """How long a group of the topic may be unused; 0: forever."""
    return 1000 * topic.settings.group_expiry_seconds


def unused_since_ms(topic: Topic, group: Group) -> int:
    """The time that the age of a group counts from: the last at which it may have been used.

    Uses that follow closely on one that was noted are not noted. Not before the topic was changed:
    with another expiry, uses were noted less often.
    """
    return max(group.last_used_ms + expiry_ms(topic) // _REVIEWS, topic.update_time_ms)


def is_in_use(state: PartitionState, queue: QueueState, group: Group, now_ms: int) -> bool:
    """Whether a group stays whatever its age: it has a consumer or an owner, or might have."""
    if group.live or queue.paused or not state.hold.knows_clients(now_ms):
        return True
    handle = state.handles.peek(queue.record.lmq_name)
    return handle is not None and group.name in handle.consumers


def review_groups(commit: CommitContext, handle: Handle, last_ms: int) -> bool:
    """Whether a group of a queue is abandoned; otherwise its bound moves on."""
    queue, topic = handle.state, handle.topic
    times_ms = []
    for group in queue.groups.values():
        if is_in_use(commit.state, queue, group, commit.now_ms):
            times_ms.append(note_consumer(commit, handle, group))
            continue
        since_ms = unused_since_ms(topic, group)
        if since_ms <= last_ms:
            return True
        times_ms.append(since_ms)
    queue.record.groups_since_ms = max(1, min(times_ms)) if times_ms else 0
    commit.journal.queue_changed(queue.record)
    return False


def note_consumer(commit: CommitContext, handle: Handle, group: Group) -> int:
    """A group has a consumer now; returns the bound with which it is reviewed again in time."""
    handle.state.note_use(group, commit.now_ms, commit.journal)
    return commit.now_ms - expiry_ms(handle.topic) * (_REVIEWS - 1) // _REVIEWS


def join_groups(commit: CommitContext, handle: Handle, names: Iterable[str]) -> None:
    """The broker has consumers or owners of these groups of a queue."""
    handle.consumers |= frozenset(names)
    record = handle.state.record
    for group in map(handle.state.groups.get, names):
        if group is not None and expiry_ms(handle.topic):
            before_ms = record.groups_since_ms
            record.note_group(note_consumer(commit, handle, group))
            if record.groups_since_ms != before_ms:
                commit.journal.queue_changed(record)


class Joined(NamedTuple):
    """The group has a consumer or an owner."""

    def write_to(self, proto: exchange_pb2.OperationResult) -> None:
        proto.join_group.SetInParent()


class JoinGroup(NamedTuple):
    """The broker has a consumer or an owner of a group, in queues that it has loaded."""

    lmq_names: tuple[str, ...]
    group: str

    @classmethod
    def from_proto(cls, proto: exchange_pb2.JoinGroup) -> "JoinGroup":
        return cls(tuple(map(queue_name, proto.lmq_names)), group_name(proto.group))

    async def apply(self, commit: CommitContext) -> Joined:
        names = (self.group,)
        for lmq_name in self.lmq_names:
            handle = await commit.find_queue(lmq_name)
            if handle is not None:
                commit.handles.track(lmq_name)
                join_groups(commit, handle, names)
        return Joined()


class Left(NamedTuple):
    """The group has no consumer and no owner any more."""

    def write_to(self, proto: exchange_pb2.OperationResult) -> None:
        proto.leave_group.SetInParent()


class LeaveGroup(NamedTuple):
    """The broker has no consumer and no owner of a group any more, in these queues: its age counts
    from now, and no consumer waits there."""

    lmq_names: tuple[str, ...]
    group: str

    @classmethod
    def from_proto(cls, proto: exchange_pb2.LeaveGroup) -> "LeaveGroup":
        return cls(tuple(map(queue_name, proto.lmq_names)), group_name(proto.group))

    async def apply(self, commit: CommitContext) -> Left:
        left = {self.group}
        for lmq_name in self.lmq_names:
            # A queue that is not loaded has no consumers, and must not be loaded for this.
            handle = commit.handles.peek(lmq_name)
            if handle is None:
                continue
            handle.consumers -= left
            group = handle.state.groups.get(self.group)
            if group is not None:
                group.standing = None  # the broker has ended it with its subscription
                handle.state.note_use(group, commit.now_ms, commit.journal)
        return Left()


async def remove_abandoned(commit: CommitContext, row: RetentionRow) -> Removal | None:
    """Remove a group, and drop what only it kept; None if it is not abandoned any longer.

    What a large queue drops leaves in later commits, and is not part of the result.
    """
    handle = await commit.queue_by_id(row.queue_id, briefly=True)
    group = None if handle is None else handle.state.groups.get(row.group)
    if handle is None or group is None or not _is_abandoned(commit, handle, group, row.before_ms):
        return None
    record = handle.state.record
    messages, body_bytes = record.messages, record.body_bytes
    await delete_group(commit, handle, group)
    await erase_settled(commit, handle)
    _log.info(
        "an abandoned group was removed",
        extra={"queue": record.lmq_name, "group": group.name},
    )
    return Removal(messages - record.messages, body_bytes - record.body_bytes)


def _is_abandoned(commit: CommitContext, handle: Handle, group: Group, planned_ms: int) -> bool:
    """Whether a group is due by the rule of the topic as it is now, and unused since the plan."""
    age_ms = expiry_ms(handle.topic)
    if not age_ms or is_in_use(commit.state, handle.state, group, commit.now_ms):
        return False
    if group.last_used_ms > planned_ms:
        return False
    return unused_since_ms(handle.topic, group) <= commit.now_ms - age_ms


OPERATIONS: ExchangeDecoders = {
    "join_group": JoinGroup.from_proto,
    "leave_group": LeaveGroup.from_proto,
}
