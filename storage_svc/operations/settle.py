"""Settling: messages of a reservation are acked, given back or dead-lettered, or get more time.

Owns the way from a receipt to its reservation; what an ending means for the messages is the subject
of `queue/queue.py`.
"""

from typing import NamedTuple

from storage_svc.loading.handles import Handle
from storage_svc.operations.dead_letters import Death, dispose
from storage_svc.operations.operation import ExchangeDecoders
from storage_svc.operations.outbox import DeadReason
from storage_svc.partition.commit import CommitContext
from storage_svc.queue.reservation import Ending, Reservation, Span
from tidemark import limits
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.errors import InvalidArgument, ReservationNotFound
from tidemark.field_checks import check_range, check_visibility
from tidemark.receipts import Receipt
from tidemark.telemetry import is_in_trace_of, is_sampled, messaging, tracer
from tidemark.telemetry.messaging import Messages

_tracer = tracer(__name__)
_ENDINGS = {
    exchange_pb2.SETTLE_ACTION_ACK: Ending.ACK,
    exchange_pb2.SETTLE_ACTION_NACK: Ending.NACK,
    exchange_pb2.SETTLE_ACTION_DEAD_LETTER: Ending.DEAD_LETTER,
    exchange_pb2.SETTLE_ACTION_RELEASE: Ending.RELEASE,
    exchange_pb2.SETTLE_ACTION_DISCONNECT: Ending.DISCONNECT,
}

_BY_BROKER = (Ending.RELEASE, Ending.DISCONNECT)
"""Actions of a broker itself on deliveries of its clients: it returns them."""


class Settled(NamedTuple):
    """The settlement or extension is on disk."""

    messages: int
    open_messages: int
    """Messages of the reservation that are left."""
    visibility_ms: int = 0

    def write_to(self, proto: exchange_pb2.OperationResult) -> None:
        settle = proto.settle
        settle.messages = self.messages
        if self.open_messages:
            settle.open_messages = self.open_messages
        if self.visibility_ms:
            settle.visibility_ms = self.visibility_ms


class Settle(NamedTuple):
    """End messages of a reservation; all that are open, if no ranges are given."""

    receipt: bytes
    ending: Ending
    index_ranges: tuple[Span, ...] = ()
    delay_ms: int = 0
    detail: str = ""
    owner_epoch: int = 0
    client_id: str = ""  # none: the broker itself
    given_messages: int | None = None  # of a consumer that is gone; None: all

    async def apply(self, commit: CommitContext) -> Settled:
        """End the messages, or repeat the answer that was given before (V6)."""
        by_broker = self.ending in _BY_BROKER and not self.client_id
        handle, reservation = await find_by_receipt(
            commit, self.receipt, self.owner_epoch, self.client_id, by_broker=by_broker
        )
        dead = self.ending is Ending.DEAD_LETTER and reservation.live
        queue_id = handle.state.record.queue_id
        # Read before the settlement, which may be the last and erase the run.
        body = await commit.body(queue_id, reservation.slice.run) if dead else b""
        given_messages = None
        if self.ending is Ending.DISCONNECT:
            given = self.given_messages
            given_messages = reservation.slice.messages if given is None else given
        changed = handle.state.settle(
            reservation,
            reservation.spans(self.index_ranges),
            self.ending,
            commit.now_ms,
            commit.journal,
            delay_ms=self.delay_ms,
            chance=0.0 if self.ending is Ending.ACK else commit.chance(),
            given_messages=given_messages,
        )
        if dead:
            for start, end in changed:
                slice_ = reservation.slice._replace(start=start, end=end)
                death = Death(DeadReason.REJECTED, reservation.group, self.detail)
                await dispose(commit, handle, slice_, body, death)
        messages = 0
        for start, end in changed:
            messages += end - start
        if reservation.slice.run.traceparent:
            self._trace(handle, reservation, messages, commit.partition)
        if self.ending is Ending.ACK:
            commit.counters.acked += messages
        return Settled(messages, reservation.open_messages)

    def _trace(
        self, handle: Handle, reservation: Reservation, messages: int, partition: int
    ) -> None:
        """Show the end of messages to their publisher where its trace does not: the broker settled
        by a receipt alone, or gave back what a client held that is gone."""
        publisher = reservation.slice.run.traceparent
        if messages and is_sampled(publisher) and not is_in_trace_of(publisher):
            step = messaging.Step(self.ending.name.lower(), "settle")
            lmq_name = handle.state.record.lmq_name
            ended = Messages(lmq_name, messages, reservation.group, partition)
            messaging.moment(_tracer, step, ended, publisher)


class Extend(NamedTuple):
    """Give a reservation more time, from now; 0 stands for the topic's visibility timeout."""

    receipt: bytes
    visibility_ms: int = 0
    owner_epoch: int = 0
    client_id: str = ""
    given_messages: int | None = None  # None: as many as were noted before

    async def apply(self, commit: CommitContext) -> Settled:
        handle, reservation = await find_by_receipt(
            commit, self.receipt, self.owner_epoch, self.client_id
        )
        visibility_ms = self.visibility_ms or handle.topic.settings.visibility_timeout_ms
        reservation.check_live()
        if self.given_messages is not None:  # it may run out sooner than before
            reservation.note_given(self.given_messages)
        handle.state.extend(reservation, commit.now_ms + visibility_ms, commit.journal)
        return Settled(reservation.open_messages, reservation.open_messages, visibility_ms)


def settlement_from_proto(proto: exchange_pb2.SettleReservation) -> Settle | Extend:
    given_messages = proto.given_messages if proto.HasField("given_messages") else None
    if proto.action == exchange_pb2.SETTLE_ACTION_EXTEND:
        check_visibility(proto.duration_ms)
        return Extend(
            proto.receipt, proto.duration_ms, proto.owner_epoch, proto.client_id, given_messages
        )
    ending = _ENDINGS.get(proto.action)
    if ending is None:
        raise InvalidArgument("a settlement without an action", field="action")
    check_range("duration_ms", proto.duration_ms, 0, limits.NACK_DELAY_MS_MAX)
    ranges = tuple((each.start, each.end) for each in proto.index_ranges)
    return Settle(
        proto.receipt,
        ending,
        ranges,
        proto.duration_ms,
        proto.detail,
        proto.owner_epoch,
        proto.client_id,
        given_messages,
    )


async def ack(commit: CommitContext, receipt: bytes, client_id: str) -> int:
    """Acknowledge what is open of a reservation; returns how many messages that was."""
    # As `find_by_receipt` does, without the cost of another coroutine.
    named = _decoded(commit, receipt)
    handle = commit.loaded_by_id(named.queue_id) or await commit.queue_by_id(named.queue_id)
    handle, reservation = _settleable(handle, named, 0, client_id)
    changed = handle.state.settle(reservation, (), Ending.ACK, commit.now_ms, commit.journal)
    messages = 0
    for start, end in changed:
        messages += end - start
    commit.counters.acked += messages
    return messages


async def find_by_receipt(
    commit: CommitContext,
    encoded: bytes,
    owner_epoch: int,
    client_id: str,
    *,
    by_broker: bool = False,
) -> tuple[Handle, Reservation]:
    """The reservation of a receipt; raises if the caller may not settle it (E8)."""
    receipt = _decoded(commit, encoded)
    handle = commit.loaded_by_id(receipt.queue_id) or await commit.queue_by_id(receipt.queue_id)
    return _settleable(handle, receipt, owner_epoch, client_id, by_broker=by_broker)


def _decoded(commit: CommitContext, encoded: bytes) -> Receipt:
    receipt = Receipt.decode(encoded)
    if receipt.partition != commit.partition:
        raise ReservationNotFound(f"the receipt is of partition {receipt.partition}")
    return receipt


def _settleable(
    handle: Handle | None,
    receipt: Receipt,
    owner_epoch: int,
    client_id: str,
    *,
    by_broker: bool = False,
) -> tuple[Handle, Reservation]:
    """The handle, which must be there, and the reservation, if the caller may settle it."""
    if handle is None:
        raise ReservationNotFound("the queue of the receipt is gone")
    reservation = handle.state.find(receipt.reservation_id)
    group = handle.state.groups.get(reservation.group)
    if group is not None and group.owner_epoch:
        # The epoch of the caller, or that of the receipt where the caller named none.
        owner_epoch = owner_epoch or receipt.owner_epoch
        if by_broker:
            group.check_owner(owner_epoch)
        else:
            group.check_settler(owner_epoch, client_id)
    return handle, reservation


OPERATIONS: ExchangeDecoders = {"settle": settlement_from_proto}
