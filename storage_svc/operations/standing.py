"""Standing reserves: a commit that makes messages ready hands them out to the consumer that waits.

Applied at the end of a commit, so that what it appends, gives back or expires is delivered without
another operation. A standing reserve ends once it leaves anything ready or has used its messages,
and the broker gets one last result of it.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from storage_svc.operations.fields import group_name, queue_name
from storage_svc.operations.operation import ExchangeDecoders
from storage_svc.operations.reserve import Reserved, hand_out
from storage_svc.partition.commit import CommitContext
from tidemark.api.storage.v1 import exchange_pb2

HAND_OUTS_PER_RESULT_MAX: Final = 256
"""Hand-outs in one result: frames take whole results."""


class HandedOut(NamedTuple):
    """The hand-outs of standing reserves in one commit, in columns: a plain slice each."""

    results: tuple[Reserved, ...]

    def write_to(self, proto: exchange_pb2.OperationResult) -> None:
        write_hand_outs(proto.hand_outs, self.results)


def write_hand_outs(hand_outs: exchange_pb2.HandOuts, results: Sequence[Reserved]) -> None:
    """Results of standing reserves with nothing but a plain slice, at least one."""
    # As columns of the tuples: most commits of one of many partitions hand out a single slice.
    _, _, standing_messages, standing_ids = zip(*results, strict=True)
    (
        reservation_ids,
        receipts,
        _queue_ids,
        first_offsets,
        counts,
        bodies,
        _attempt_counts,
        _delivery_counts,
        owner_epochs,
        visibility_ms,
        publish_times_ms,
        *_,
    ) = zip(*[each.slices[0] for each in results], strict=True)
    hand_outs.standing_ids.extend(standing_ids)
    hand_outs.standing_messages.extend(standing_messages)
    hand_outs.reservation_ids.extend(reservation_ids)
    hand_outs.receipts.extend(receipts)
    hand_outs.first_offsets.extend(first_offsets)
    hand_outs.counts.extend(counts)
    hand_outs.bodies.extend(bodies)
    hand_outs.visibility_ms.extend(visibility_ms)
    hand_outs.publish_times_ms.extend(publish_times_ms)
    hand_outs.owner_epochs.extend(owner_epochs)


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


def in_columns(results: Sequence[Reserved]) -> list[Reserved | HandedOut]:
    """Results of standing reserves, with those together that have nothing but a plain slice.

    Each is of another reserve, so that their order has no meaning.
    """
    plain: list[Reserved] = []
    others: list[Reserved] = []
    for each in results:
        (plain if _is_plain(each) else others).append(each)
    arrays = [
        HandedOut(tuple(plain[start : start + HAND_OUTS_PER_RESULT_MAX]))
        for start in range(0, len(plain), HAND_OUTS_PER_RESULT_MAX)
    ]
    return [*arrays, *others]


def _is_plain(result: Reserved) -> bool:
    if len(result.slices) != 1 or not result.standing_messages or result.more:
        return False
    (slice_,) = result.slices
    return slice_.delivery_count == 1 and not (
        slice_.attempt_count or slice_.fairness_key or slice_.traceparent or slice_.last_attempt
    )


OPERATIONS: ExchangeDecoders = {"recall": Recall.from_proto}
