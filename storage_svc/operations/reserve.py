"""Reserving: messages of a queue are handed to a consumer until a deadline.

Owns the bounds of a hand-out and the receipts; what a reservation means is the subject of
`queue/reservation.py`, whose turn it is that of `queue/group.py`.
"""

from typing import NamedTuple

from storage_svc.loading.handles import Handle
from storage_svc.operations.fields import group_name, queue_name
from storage_svc.operations.groups import new_group
from storage_svc.operations.operation import ExchangeDecoders
from storage_svc.partition.commit import CommitContext
from storage_svc.queue import bodies
from storage_svc.queue.group import PASSED_MAX, Group
from storage_svc.queue.reservation import Reservation
from storage_svc.queue.run import Slice
from storage_svc.queue.standing import Standing
from storage_svc.turns import give_way
from tidemark import limits
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.errors import Fenced, RecordUnreadable
from tidemark.field_checks import check_range, check_visibility
from tidemark.limits import RETURNED_SLICES_MAX, RUN_BYTES_MAX
from tidemark.receipts import Receipt

ANSWER_BYTES_MAX = 2 * RUN_BYTES_MAX
"""Bytes of one hand-out: the answer must fit one frame, and any run fits an answer."""

HANDED_OUT_BYTES_MAX = 32 * 1024 * 1024
"""Bodies that one commit hands out; later reserves of the commit get nothing and are asked again.
All of them are in memory until they are sent, however many consumers ask at once."""

TURN_SLICES_MAX = 256
"""Slices of a large hand-out that one turn of the event loop works on."""

TURN_PAGES_MAX = 4
"""Pages of a lane that one turn reads; most hand-outs read one."""

UNREADABLE_DELAY_MS = 60_000
"""After which messages whose body could not be read are tried again."""


class ReservedSlice(NamedTuple):
    """A run, or a part of one, that is reserved."""

    reservation_id: int
    receipt: bytes
    queue_id: int
    first_offset: int
    messages: int
    body: bytes
    attempt_count: int
    delivery_count: int
    owner_epoch: int
    visibility_ms: int
    publish_time_ms: int
    fairness_key: str
    traceparent: str
    last_attempt: bool

    def write_to(self, proto: exchange_pb2.ReservedSlice) -> None:
        proto.reservation_id = self.reservation_id
        proto.receipt = self.receipt
        proto.queue_id = self.queue_id
        proto.first_offset = self.first_offset
        proto.count = self.messages
        proto.body = self.body
        proto.delivery_count = self.delivery_count
        proto.visibility_ms = self.visibility_ms
        proto.publish_time_ms = self.publish_time_ms
        # Of most slices these are empty, and an assignment costs more than the question.
        if self.attempt_count:
            proto.attempt_count = self.attempt_count
        if self.owner_epoch:
            proto.owner_epoch = self.owner_epoch
        if self.fairness_key:
            proto.fairness_key = self.fairness_key
        if self.traceparent:
            proto.traceparent = self.traceparent
        if self.last_attempt:
            proto.last_attempt = True


class Reserved(NamedTuple):
    """The messages that were handed out; there may be none."""

    slices: tuple[ReservedSlice, ...]
    more: bool = False
    standing_messages: int = 0  # that the reserve may still hand out; 0: it does not stand
    standing_id: int = 0  # in a result that answers no operation

    def write_to(self, proto: exchange_pb2.OperationResult) -> None:
        reserve = proto.reserve
        reserve.SetInParent()
        for each in self.slices:
            each.write_to(reserve.slices.add())
        if self.more:
            reserve.more = True
        if self.standing_messages:
            reserve.standing_messages = self.standing_messages
        if self.standing_id:
            reserve.standing_id = self.standing_id


class Reserve(NamedTuple):
    """Hand out messages of one queue to one group, which is created if it does not exist."""

    lmq_name: str
    group: str
    messages_max: int
    bytes_max: int = 4 * 1024 * 1024
    visibility_ms: int = 0  # 0: the topic's
    owner_epoch: int = 0
    strict_bytes: bool = False  # whether a first message beyond the bytes stays where it is
    reports_hand_outs: bool = False  # whether it is reported what the application was given
    standing_id: int = 0  # 0: it does not stand
    standing_messages: int = 0
    standing_bytes: int = 0
    replaces: int = 0  # a standing reserve, whose messages are added

    @classmethod
    def from_proto(cls, proto: exchange_pb2.Reserve) -> "Reserve":
        check_range("max_messages", proto.max_messages, 1, limits.PULL_MESSAGES_MAX)
        check_visibility(proto.visibility_ms)
        return cls(
            queue_name(proto.lmq_name),
            group_name(proto.group),
            proto.max_messages,
            min(proto.max_bytes or RUN_BYTES_MAX, RUN_BYTES_MAX),
            proto.visibility_ms,
            proto.owner_epoch,
            proto.strict_bytes,
            proto.reports_hand_outs,
            proto.standing_id,
            proto.standing_messages,
            min(proto.standing_bytes or RUN_BYTES_MAX, RUN_BYTES_MAX),
            proto.replaces,
        )

    async def apply(self, commit: CommitContext) -> Reserved:
        """Hand out messages; a hand-out that falls short makes the group wait for more.

        It ends the reserve that stood before: all consumers of a group are those of one broker,
        which decides whose turn it is.
        """
        handle = await commit.queue(self.lmq_name)
        state = handle.state
        group = state.groups.get(self.group)
        if handle.topic.settings.exclusive and (group is None or not group.owner_client_id):
            raise Fenced("the queue has no owner: subscribe first", epoch="0")
        if group is None:
            group = await new_group(commit, handle, self.group, 0)
        group.check_owner(self.owner_epoch)
        state.note_use(group, commit.now_ms, commit.journal)
        bounds, before = self, group.standing
        if before is not None and before.is_named(self.replaces, commit.counters.broker_epoch):
            bounds = self._replace(messages_max=self.messages_max + before.messages_max)
            group.standing = None
        commit.end_standing(group)
        reserved = await hand_out(commit, handle, group, bounds)
        left = bounds.messages_max - sum(each.messages for each in reserved.slices)
        messages_max = min(self.standing_messages, left)
        if not self.standing_id or not messages_max or reserved.more:
            return reserved
        group.standing = Standing(
            self.standing_id,
            commit.counters.broker_epoch,
            messages_max,
            self.standing_bytes,
            self.visibility_ms,
            self.owner_epoch,
            reports_hand_outs=self.reports_hand_outs,
        )
        return reserved._replace(standing_messages=messages_max)


async def hand_out(
    commit: CommitContext, handle: Handle, group: Group, bounds: Reserve | Standing
) -> Reserved:
    """Reserve what is ready, within the bounds of a reserve."""
    state = handle.state
    commit.journal.cancel_ready(state.record, group)
    if state.paused:
        group.has_waiters = True
        return Reserved(())
    taken, too_large = await _take(commit, handle, group, bounds)
    taken, taken_bodies = await _readable(commit, handle, group, taken)
    visibility_ms = bounds.visibility_ms or handle.topic.settings.visibility_timeout_ms
    counters = commit.counters
    slices: list[ReservedSlice] = []
    # Not `in_turns`: most hand-outs are of one slice, which costs less than an asynchronous loop.
    for start in range(0, len(taken), TURN_SLICES_MAX):
        if start:
            await give_way()
        part = taken[start : start + TURN_SLICES_MAX]
        reservations = state.reserve(
            group,
            part,
            counters.reservation_id + 1,
            commit.now_ms + visibility_ms,
            commit.now_ms,
            commit.journal,
            broker_incarnation=commit.state.claim.incarnation,
            given_messages=0 if bounds.reports_hand_outs else None,
        )
        counters.reservation_id += len(part)
        for at, reservation in enumerate(reservations, start):
            body = taken_bodies[at]
            slices.append(_reserved(commit, handle, reservation, visibility_ms, body))
            counters.delivered += reservation.slice.messages
            commit.handed_out_bytes += len(body)
    # A key that is still active was held back only by the bounds of the request.
    group.has_waiters = not group.ring or not (taken or too_large)
    if len(group.lanes) > group.lanes_max:
        await commit.forget_lanes(state)
    return Reserved(tuple(slices), not group.has_waiters)


async def _take(
    commit: CommitContext, handle: Handle, group: Group, bounds: Reserve | Standing
) -> tuple[list[Slice], bool]:
    """Take messages from the lanes, reading the next page where a lane has run dry.

    Also returns whether the bytes allowed for no more, though there was more.
    """
    taken: list[Slice] = []
    messages_max, bytes_max = bounds.messages_max, bounds.bytes_max
    room_bytes, measured, pages = ANSWER_BYTES_MAX, 0, 0
    if len(group.delayed) + len(group.buried) >= RETURNED_SLICES_MAX:
        return taken, False  # what was returned must go first, or it would grow without end
    if commit.handed_out_bytes >= HANDED_OUT_BYTES_MAX:
        return taken, True
    while messages_max > 0:
        found = group.take(
            messages_max,
            bytes_max,
            commit.now_ms,
            max_attempts=handle.state.rules.max_attempts,
            at_least_one=not taken and not bounds.strict_bytes,
            room_bytes=room_bytes,
        )
        if found.passed:
            handle.state.bury(group, found.passed, commit.journal)
        for slice_ in found.slices:
            messages_max -= slice_.messages
            bytes_max -= slice_.messages * slice_.run.message_bytes
            room_bytes -= slice_.run.body_bytes
        taken += found.slices
        if len(found.passed) == PASSED_MAX:
            commit.journal.ready(handle.state.record, group)  # there may be more: ask again
        if found.answer_full and found.slices:
            for slice_ in taken[measured:]:
                body = await _body(commit, handle, slice_)
                room_bytes += slice_.run.body_bytes - (0 if body is None else len(body))
            measured = len(taken)
            continue
        if found.needs_page is None:
            return taken, found.too_large or found.answer_full
        await commit.read_lane(handle.state, group, found.needs_page)
        pages += 1
        if pages % TURN_PAGES_MAX == 0:
            await give_way()
    return taken, False


async def _readable(
    commit: CommitContext, handle: Handle, group: Group, taken: list[Slice]
) -> tuple[list[Slice], list[bytes]]:
    """Those of the slices whose bodies can be read, and the bodies.

    The others stay in the queue and are tried again after a delay: one unreadable record must not
    keep its queue from being consumed, nor its partition from serving (V3).
    """
    readable: list[Slice] = []
    found: list[bytes] = []
    unreadable: list[Slice] = []
    queue_id = handle.state.record.queue_id
    for number, slice_ in enumerate(taken, 1):
        body = None
        if slice_.end - slice_.start == slice_.run.messages:  # nearly all, without a coroutine
            body = commit.cached_body(queue_id, slice_.run)
        if body is None:
            body = await _body(commit, handle, slice_)
        if body is None:
            unreadable.append(slice_)
        else:
            readable.append(slice_)
            found.append(body)
        if number % TURN_SLICES_MAX == 0:
            await give_way()
    if unreadable:
        not_before_ms = commit.now_ms + UNREADABLE_DELAY_MS
        handle.state.postpone(group, unreadable, not_before_ms, commit.journal)
        commit.journal.ready(handle.state.record, group)  # there may be more: ask again
    return readable, found


def _reserved(
    commit: CommitContext,
    handle: Handle,
    reservation: Reservation,
    visibility_ms: int,
    body: bytes,
) -> ReservedSlice:
    slice_ = reservation.slice
    run = slice_.run
    state = handle.state
    queue_id = state.record.queue_id
    reservation_id, owner_epoch = reservation.reservation_id, reservation.owner_epoch
    return ReservedSlice(
        reservation_id,
        Receipt(commit.partition, queue_id, reservation_id, owner_epoch).encode(),
        queue_id,
        slice_.start,
        slice_.end - slice_.start,
        body,
        slice_.attempts,
        slice_.deliveries,
        owner_epoch,
        visibility_ms,
        run.publish_time_ms,
        run.fairness_key,
        run.traceparent,
        slice_.attempts + 1 == state.rules.max_attempts,
    )


async def _body(commit: CommitContext, handle: Handle, slice_: Slice) -> bytes | None:
    """The messages of a slice; None if they cannot be read."""
    run = slice_.run
    queue_id = handle.state.record.queue_id
    body = commit.cached_body(queue_id, run)
    if body is None:
        try:
            body = await commit.body(queue_id, run)
        except RecordUnreadable:
            return None
    if slice_.messages == run.messages:
        return body
    return bodies.cut(body, slice_.start - run.first_offset, slice_.end - run.first_offset)


OPERATIONS: ExchangeDecoders = {"reserve": Reserve.from_proto}
