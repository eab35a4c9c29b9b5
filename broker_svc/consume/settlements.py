"""Settlements: clients settle their deliveries, and storage carries that out.

Resolves tags to receipts, counts settlements under way on their queue, and drops a delivery once
storage has ended it. A settlement is answered after its commit, never before.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TypeAlias

from google.rpc.status_pb2 import Status
from opentelemetry.trace import Span

from broker_svc.consume.acks import Acks
from broker_svc.consume.deliveries import (
    Deliveries,
    DeliveryDirectory,
    HeldDelivery,
    ReservationKey,
    drop_refused,
)
from broker_svc.consume.dispatcher import Dispatcher
from broker_svc.links.partition_link import PartitionLink, refusal_of
from broker_svc.links.unanswered_operations import Answer
from tidemark import limits
from tidemark.api.broker.v1 import message_pb2
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.clock import Clock
from tidemark.errors import (
    CommitOutcomeUnknown,
    InvalidArgument,
    PartitionFaulty,
    PartitionNotFound,
    ShuttingDown,
    TidemarkError,
    Unavailable,
    UnknownDeliveryTag,
)
from tidemark.receipts import Receipt
from tidemark.rpc.statuses import from_status, to_status
from tidemark.telemetry import Tally, messaging, traceparent_of, tracer
from tidemark.telemetry.messaging import Messages, Step

Action: TypeAlias = exchange_pb2.SettleAction.ValueType
Done = Callable[[message_pb2.SettleResult], None]
"""Called exactly once for each settlement."""

_tracer = tracer(__name__)
_DETAIL_BYTES_MAX = 1024
_ACTIONS = {
    "ack": exchange_pb2.SETTLE_ACTION_ACK,
    "nack": exchange_pb2.SETTLE_ACTION_NACK,
    "dead_letter": exchange_pb2.SETTLE_ACTION_DEAD_LETTER,
    "extend": exchange_pb2.SETTLE_ACTION_EXTEND,
    "release": exchange_pb2.SETTLE_ACTION_RELEASE,
}
_AT_ONCE = (exchange_pb2.SETTLE_ACTION_NACK, exchange_pb2.SETTLE_ACTION_RELEASE)
"""Actions that make messages ready again, unless they ask for a delay."""

_UNDECIDED = (CommitOutcomeUnknown, PartitionFaulty, ShuttingDown, Unavailable)
"""Errors that leave the outcome of a settlement open."""


class Settlements:
    """All settling of a broker."""

    def __init__(
        self,
        links: Mapping[int, PartitionLink],
        directory: DeliveryDirectory,
        dispatcher: Dispatcher,
        clock: Clock,
    ) -> None:
        self._clock = clock
        self._links = links
        self._directory = directory
        self._dispatcher = dispatcher
        self.settled = Tally("action")
        """Messages that clients settled."""
        self.acks = Acks(links, self.settled)
        self._returning: dict[ReservationKey, tuple[HeldDelivery, Action]] = {}
        """Deliveries of clients that are gone, until storage has them back."""

    def submit(
        self,
        settlement: message_pb2.Settlement,
        client_id: str,
        deliveries: Deliveries | None,
        done: Done,
    ) -> None:
        """Settle for a client; `done` gets the result, after the commit.

        Tags refer to `deliveries`. A unary client has none: it settles by receipt.
        """
        try:
            operation = _operation(settlement)
            if settlement.WhichOneof("target") == "receipt":
                receipt = Receipt.decode(settlement.receipt)
                link = self._link(receipt.partition)
                key = (receipt.partition, receipt.reservation_id)
                holder = self._directory.holder(key)
                held = None if holder is None else holder.find(key)
                operation.settle.receipt = settlement.receipt
                operation.settle.owner_epoch = receipt.owner_epoch
            elif deliveries is None:
                raise UnknownDeliveryTag(
                    "delivery tags are numbers of a session; settle by receipt",
                    delivery_tag=str(settlement.delivery_tag),
                )
            else:
                held, holder = deliveries.get(settlement.delivery_tag), deliveries
                link = self._link(held.queue.partition)
                operation.settle.receipt = held.receipt
                operation.settle.owner_epoch = held.owner_epoch
        except TidemarkError as error:
            done(_failed(settlement, to_status(error)))
            return
        if operation.settle.owner_epoch:  # an exclusive queue: storage compares it with the owner
            operation.settle.client_id = client_id
        if held is not None:
            held.queue.pending_settlements += 1
            if operation.settle.action == exchange_pb2.SETTLE_ACTION_EXTEND:
                operation.settle.given_messages = held.given_messages
        span = None
        if held is not None and held.traceparent:
            span = _begin_span(settlement, held)
            operation.traceparent = held.traceparent if span is None else traceparent_of(span)
        answered = partial(self._answered, settlement, holder, held, span, done)
        link.ask(operation, answered)
        at_once = operation.settle.action in _AT_ONCE and not settlement.nack.delay_ms
        if held is not None and at_once:
            self._dispatcher.on_return_queued(held.feed_key)

    def _answered(
        self,
        settlement: message_pb2.Settlement,
        holder: Deliveries | None,
        held: HeldDelivery | None,
        span: Span | None,
        done: Done,
        result: exchange_pb2.OperationResult | TidemarkError,
    ) -> None:
        if held is not None:
            held.queue.pending_settlements -= 1
        if isinstance(result, TidemarkError):
            messaging.end(span, result.reason)
            done(_failed(settlement, to_status(result)))
            return
        if span is not None:
            messaging.end(span, refusal_of(result))
        if result.HasField("error"):
            # The client no longer holds deliveries that storage has ended, whatever it believes.
            if held is not None and holder is not None:
                drop_refused(holder, held, from_status(result.error))
            done(_failed(settlement, result.error))
            return
        settled = result.settle
        lmq_name = "" if held is None else held.queue.lmq_name
        self.settled.add(settled.messages, lmq_name, str(settlement.WhichOneof("action")))
        if held is not None and holder is not None:
            # As storage has it: the answer to an earlier settlement may have been lost.
            held.open_messages = settled.open_messages
            if settled.visibility_ms:  # extended
                held.deadline_ms = self._clock.monotonic_ms() + settled.visibility_ms
            if not held.open_messages:
                holder.drop(held.key)
        done(
            message_pb2.SettleResult(
                request_id=settlement.request_id,
                messages=settled.messages,
                visibility_ms=settled.visibility_ms,
                delivery_tag=settlement.delivery_tag,
            )
        )

    def give_back(self, held: Iterable[HeldDelivery], *, failed: bool) -> None:
        """Return the deliveries of a client at once (V6).

        If the client is gone, it is a failed attempt of the messages that the application was given
        (V8). When the broker is stopping, no attempt is counted.
        """
        gone, left = exchange_pb2.SETTLE_ACTION_DISCONNECT, exchange_pb2.SETTLE_ACTION_RELEASE
        for each in held:
            self._give_back(each, gone if failed else left)

    def link_up(self, partition: int) -> None:
        """Return deliveries that could not be returned while the link was down."""
        for each, action in list(self._returning.values()):
            if each.queue.partition == partition:
                self._give_back(each, action)

    def partition_left(self, partition: int) -> None:
        """Another broker holds the partition: what is on its way back runs out there."""
        for key in [key for key in self._returning if key[0] == partition]:
            del self._returning[key]

    def returning(self, partition: int) -> list[bytes]:
        """Receipts of what is on its way back: storage must not take them for lost."""
        held = (each for each, _ in self._returning.values())
        return [each.receipt for each in held if each.queue.partition == partition]

    def _give_back(self, held: HeldDelivery, action: Action) -> None:
        operation = exchange_pb2.Operation()
        operation.settle.receipt = held.receipt
        operation.settle.action = action
        operation.settle.owner_epoch = held.owner_epoch
        if action == exchange_pb2.SETTLE_ACTION_DISCONNECT:
            operation.settle.given_messages = held.given_messages
        held.queue.pending_settlements += 1
        self._returning[held.key] = held, action
        answer = self._links[held.queue.partition].send(operation)
        answer.add_done_callback(partial(self._returned, held))
        if action == exchange_pb2.SETTLE_ACTION_DISCONNECT:
            self._dispatcher.on_return_queued(held.feed_key)

    def _returned(self, held: HeldDelivery, answer: Answer) -> None:
        held.queue.pending_settlements -= 1
        error = answer.exception()
        if error is None and answer.result().HasField("error"):
            error = from_status(answer.result().error)
        if not isinstance(error, _UNDECIDED):
            self._returning.pop(held.key, None)

    def _link(self, partition: int) -> PartitionLink:
        link = self._links.get(partition)
        if link is None:
            raise PartitionNotFound(f"there is no partition {partition}", partition=str(partition))
        return link


def _operation(settlement: message_pb2.Settlement) -> exchange_pb2.Operation:
    kind = settlement.WhichOneof("action")
    if kind is None:
        raise InvalidArgument("a settlement requires an action", field="action")
    if settlement.WhichOneof("target") is None:
        raise InvalidArgument("a settlement requires a delivery tag or a receipt", field="target")
    operation = exchange_pb2.Operation()
    settle = operation.settle
    settle.action = _ACTIONS[kind]
    if kind == "nack":
        if settlement.nack.delay_ms > limits.NACK_DELAY_MS_MAX:
            raise InvalidArgument(f"at most {limits.NACK_DELAY_MS_MAX} ms", field="delay_ms")
        settle.duration_ms = settlement.nack.delay_ms
    elif kind == "extend":
        settle.duration_ms = settlement.extend.visibility_ms
    elif kind == "dead_letter":
        if len(settlement.dead_letter.reason.encode()) > _DETAIL_BYTES_MAX:
            raise InvalidArgument(f"at most {_DETAIL_BYTES_MAX} bytes", field="reason")
        settle.detail = settlement.dead_letter.reason
    if len(settlement.ranges) > limits.SETTLEMENT_RANGES_MAX:
        raise InvalidArgument(f"at most {limits.SETTLEMENT_RANGES_MAX} ranges", field="ranges")
    for each in settlement.ranges:
        settle.index_ranges.add(start=each.start, end=each.end)
    return operation


def _begin_span(settlement: message_pb2.Settlement, held: HeldDelivery) -> Span | None:
    count = sum(each.end - each.start for each in settlement.ranges) or held.open_messages
    messages = Messages(held.queue.lmq_name, count, held.group, held.queue.partition)
    step = Step(str(settlement.WhichOneof("action")), "settle")
    return messaging.begin(_tracer, step, messages, held.traceparent)


def _failed(settlement: message_pb2.Settlement, error: Status) -> message_pb2.SettleResult:
    return message_pb2.SettleResult(
        request_id=settlement.request_id, error=error, delivery_tag=settlement.delivery_tag
    )
