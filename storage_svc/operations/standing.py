"""Standing reserves: a commit that makes messages ready hands them out to the consumer that waits.

Applied at the end of a commit, so that what it appends, gives back or expires is delivered without
another operation. A standing reserve ends once it leaves anything ready or has used its messages,
and the broker gets one last result of it.
"""

from typing import NamedTuple

from storage_svc.operations.fields import group_name, queue_name
from storage_svc.operations.operation import ExchangeDecoders
from storage_svc.operations.reserve import Reserved, hand_out
from storage_svc.partition.commit import CommitContext
from tidemark.api.storage.v1 import exchange_pb2


class Recalled(NamedTuple):
    """The reserve stands no longer."""

    stood: bool

    def write_to(self, proto: exchange_pb2.OperationResult) -> None:
        proto.recall.stood = self.stood


class Recall(NamedTuple):
    """End a standing reserve: its consumer has left, or needs its credit elsewhere."""

    lmq_name: str
    group: str
    standing_id: int

    @classmethod
    def from_proto(cls, proto: exchange_pb2.Recall) -> "Recall":
        return cls(queue_name(proto.lmq_name), group_name(proto.group), proto.standing_id)

    async def apply(self, commit: CommitContext) -> Recalled:
        # A queue that is not loaded has none, and must not be loaded for this.
        handle = commit.handles.peek(self.lmq_name)
        group = None if handle is None else handle.state.groups.get(self.group)
        standing = None if group is None else group.standing
        if group is None or standing is None:
            return Recalled(False)
        if not standing.is_named(self.standing_id, commit.counters.broker_epoch):
            return Recalled(False)
        commit.end_standing(group)
        return Recalled(True)


async def hand_out_standing(commit: CommitContext) -> list[Reserved]:
    """Hand out what this commit has made ready; returns the results of standing reserves."""
    results = []
    for lmq_name, group_name_ in list(commit.journal.ready_queues):
        handle = commit.handles.peek(lmq_name)
        group = None if handle is None else handle.state.groups.get(group_name_)
        standing = None if group is None else group.standing
        if handle is None or group is None or standing is None:
            continue
        current = standing.broker_epoch == commit.counters.broker_epoch
        if not current or standing.owner_epoch != group.owner_epoch:
            commit.end_standing(group)
            continue
        reserved = await hand_out(commit, handle, group, standing)
        for each in reserved.slices:
            standing.messages_max -= each.messages
        left = 0 if reserved.more else standing.messages_max
        if not left:
            group.standing = None
        elif not reserved.slices:
            continue  # what became ready was not for delivery: it waits on
        results.append(Reserved(reserved.slices, reserved.more, left, standing.standing_id))
    results += (
        Reserved((), more=ask_again, standing_id=standing_id)
        for standing_id, ask_again in commit.ended_standing
    )
    return results


OPERATIONS: ExchangeDecoders = {"recall": Recall.from_proto}
