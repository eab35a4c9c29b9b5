"""Standing reserves: a commit that makes messages ready hands them out to the consumer that waits.

Applied at the end of a commit, so that what it appends, gives back or expires is delivered without
another operation. A standing reserve ends once it leaves anything ready or has used its messages,
and the broker gets one last result of it.
"""

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Final, NamedTuple

from storage_svc.loading.handles import Handle
from storage_svc.operations.fields import group_name, queue_name
from storage_svc.operations.operation import ExchangeDecoders
from storage_svc.operations.reserve import (
    ANSWER_BYTES_MAX,
    HANDED_OUT_BYTES_MAX,
    Reserved,
    hand_out,
)
from storage_svc.partition.commit import CommitContext
from storage_svc.queue.group import Group
from storage_svc.queue.standing import Standing
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.receipts import encode_receipt

HAND_OUTS_PER_RESULT_MAX: Final = 256
"""Hand-outs in one result: frames take whole results."""


HandOut = tuple[int, int, int, bytes, int, int, bytes, int, int, int]
"""A plain hand-out: the columns of `HandOuts` in their order, from the standing id on."""

body_of_hand_out: Callable[[HandOut], bytes] = itemgetter(6)


class HandedOut(NamedTuple):
    """Plain hand-outs of standing reserves in one commit. Each reserve stands on, and has handed
    out one whole run that nobody was handed before."""

    hand_outs: Sequence[HandOut]

    def write_to(self, proto: exchange_pb2.OperationResult) -> None:
        write_hand_outs(proto.hand_outs, self.hand_outs)


def write_hand_outs(proto: exchange_pb2.HandOuts, hand_outs: Sequence[HandOut]) -> None:
    """At least one."""
    (
        standing_ids,
        standing_messages,
        reservation_ids,
        receipts,
        first_offsets,
        counts,
        bodies,
        visibility_ms,
        publish_times_ms,
        owner_epochs,
    ) = zip(*hand_outs, strict=True)
    proto.standing_ids.extend(standing_ids)
    proto.standing_messages.extend(standing_messages)
    proto.reservation_ids.extend(reservation_ids)
    proto.receipts.extend(receipts)
    proto.first_offsets.extend(first_offsets)
    proto.counts.extend(counts)
    proto.bodies.extend(bodies)
    proto.visibility_ms.extend(visibility_ms)
    proto.publish_times_ms.extend(publish_times_ms)
    proto.owner_epochs.extend(owner_epochs)


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


def hand_out_plain(commit: CommitContext) -> Sequence[HandedOut]:
    """Hand out what this commit has made ready where that is plain; returns the results of standing
    reserves. Queues that are left stay among those that are ready."""
    plain: list[HandOut] = []
    peek, broker_epoch = commit.handles.peek, commit.counters.broker_epoch
    for lmq_name, group_name_ in list(commit.journal.ready_queues):
        handle = peek(lmq_name)
        group = None if handle is None else handle.state.groups.get(group_name_)
        standing = None if group is None else group.standing
        if (
            handle is not None
            and group is not None
            and standing is not None
            and standing.broker_epoch == broker_epoch
            and standing.owner_epoch == group.owner_epoch
            and (handed_out := _hand_out_run(commit, handle, group, standing)) is not None
        ):
            plain.append(handed_out)
    if not plain:
        return ()
    if len(plain) > HAND_OUTS_PER_RESULT_MAX or commit.handed_out_bytes > ANSWER_BYTES_MAX:
        return list(_in_parts(plain))
    return (HandedOut(plain),)


async def hand_out_rest(commit: CommitContext) -> list[Reserved]:
    """Hand out what `hand_out_plain` has left; returns the results of standing reserves. Each is of
    another reserve, so that their order has no meaning."""
    results: list[Reserved] = []
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


def _in_parts(hand_outs: Sequence[HandOut]) -> Iterator[HandedOut]:
    """Many or large hand-outs, at least one, in results of which each fits a frame."""
    part: list[HandOut] = []
    part_bytes = 0
    for each in hand_outs:
        body_bytes = len(body_of_hand_out(each))
        if part and (
            len(part) == HAND_OUTS_PER_RESULT_MAX or part_bytes + body_bytes > ANSWER_BYTES_MAX
        ):
            yield HandedOut(part)
            part, part_bytes = [], 0
        part.append(each)
        part_bytes += body_bytes
    yield HandedOut(part)


def _hand_out_run(
    commit: CommitContext, handle: Handle, group: Group, standing: Standing
) -> HandOut | None:
    """Hand out as nearly always: one whole run, which is all that is ready, and the reserve stands
    on. None, without any change, if that is not so: then `hand_out` decides."""
    run = group.only_run()
    if run is None:
        return None
    state = handle.state
    messages, record, rules = run.messages, state.record, state.rules
    if (
        messages >= standing.messages_max
        or run.body_bytes > standing.bytes_max
        or run.dead_deadline_ms
        or run.fairness_key
        or run.traceparent
        or rules.max_attempts == 1
        or rules.paused
        or record.paused
        or commit.handed_out_bytes >= HANDED_OUT_BYTES_MAX
    ):
        return None
    queue_id = record.queue_id
    body = commit.cached_body(queue_id, run)
    if body is None:
        return None
    journal, counters, now_ms = commit.journal, commit.counters, commit.now_ms
    journal.cancel_ready(record, group)
    visibility_ms = standing.visibility_ms or handle.topic.settings.visibility_timeout_ms
    reservation_id = counters.reservation_id = counters.reservation_id + 1
    state.reserve_only(
        group,
        run,
        reservation_id,
        now_ms + visibility_ms,
        now_ms,
        journal,
        broker_incarnation=commit.state.claim.incarnation,
        given_messages=0 if standing.reports_hand_outs else None,
    )
    group.has_waiters = True
    counters.delivered += messages
    commit.handed_out_bytes += len(body)
    standing.messages_max -= messages
    return (
        standing.standing_id,
        standing.messages_max,
        reservation_id,
        encode_receipt(commit.partition, queue_id, reservation_id, group.owner_epoch),
        run.first_offset,
        messages,
        body,
        visibility_ms,
        run.publish_time_ms,
        group.owner_epoch,
    )


OPERATIONS: ExchangeDecoders = {"recall": Recall.from_proto}
