"""The consumers of a session: opened, given credit and closed, and the deliveries of each.

Owns the deliveries of the client by delivery tag, and how many of their messages the client has
reported as handed out to its application (K1). The dispatcher reserves, not this module.
"""

from collections.abc import Sequence
from functools import partial
from typing import Final

from broker_svc.api.session_output import SessionOutput
from broker_svc.components import BrokerComponents
from broker_svc.consume.consumer import Consumer, Feed, HandedOut, Slices
from broker_svc.consume.deliveries import Deliveries, HeldDelivery, fill_delivery
from broker_svc.consume.hand_outs import HandOuts
from broker_svc.exclusive.registry import Subscriber
from tidemark import limits
from tidemark.api.broker.v1 import broker_pb2
from tidemark.errors import InvalidArgument, QuotaExceeded, TidemarkError
from tidemark.field_checks import check_visibility
from tidemark.names import validate_group
from tidemark.rpc.statuses import to_status

CONSUMERS_MAX: Final = 1000
DEFAULT_GROUP: Final = "default"
_UNCONFIRMED_MAX: Final = 1000
"""Confirmations of hand-outs that wait for another reason to send a frame."""


class SessionConsumers:
    """All consumers of one client's connection."""

    def __init__(self, components: BrokerComponents, output: SessionOutput) -> None:
        self.deliveries = Deliveries(components.directory)
        self._components = components
        self._output = output
        self._consumers: dict[int, Consumer] = {}

    def get(self, consumer_id: int) -> Consumer:
        consumer = self._consumers.get(consumer_id)
        if consumer is None:
            raise InvalidArgument(f"there is no consumer {consumer_id}", field="consumer_id")
        return consumer

    def open(self, opened: broker_pb2.OpenConsumer) -> None:
        if opened.consumer_id in self._consumers or not opened.consumer_id:
            raise InvalidArgument("consumer_id must be above 0 and not in use", field="consumer_id")
        if len(self._consumers) >= CONSUMERS_MAX:
            raise QuotaExceeded(f"at most {CONSUMERS_MAX} consumers a session")
        group = opened.group or DEFAULT_GROUP
        validate_group(group)
        check_visibility(opened.visibility_ms)
        consumer = Consumer(
            opened.consumer_id,
            group,
            opened.visibility_ms,
            self._deliver,
            partial(self._refuse, opened.consumer_id),
            self._output.room,
            HandOuts() if opened.reports_hand_outs else None,
            deliver_many=self._deliver_many if opened.takes_arrays else None,
        )
        self._consumers[opened.consumer_id] = consumer
        consumer.credit = min(opened.credit, limits.CREDIT_MAX)

    def give_credit(self, subscriber: Subscriber, given: broker_pb2.ConsumerCredit) -> None:
        """Give a consumer of the subscriber credit, stop it, or close it."""
        consumer = self.get(given.consumer_id)
        if given.close:
            self._components.subscriptions.close_consumer(subscriber, consumer)
            self._components.dispatcher.close(consumer)
            del self._consumers[given.consumer_id]
            return
        consumer.stopped = given.stop
        credit_max = limits.CREDIT_MAX - consumer.standing_credit
        consumer.credit = min(consumer.credit + given.messages, credit_max)
        self._components.dispatcher.reserve_for(consumer)

    def report_hand_outs(self, report: broker_pb2.HandOuts) -> None:
        """Note how far the client hands out, and confirm it."""
        consumer = self.get(report.consumer_id)
        if consumer.hand_outs is None:
            raise InvalidArgument("the consumer reports no hand-outs", field="reports_hand_outs")
        consumer.hand_outs.report(report.messages, report.deliveries, report.first_attempts)
        confirmations = self._output.frame.hand_outs
        confirmations.append(report)
        if report.urgent or len(confirmations) >= _UNCONFIRMED_MAX:
            self._output.wakeup.set()

    def close(self) -> None:
        """Nothing more is delivered; the client keeps its deliveries."""
        for consumer in self._consumers.values():
            self._components.dispatcher.close(consumer)

    def _refuse(self, consumer_id: int, error: TidemarkError) -> None:
        self._output.frame.errors.add(error=to_status(error), consumer_id=consumer_id)
        self._output.wakeup.set()

    def _deliver(self, consumer: Consumer, feed: Feed, slices: Slices) -> None:
        now_ms = self._components.clock.monotonic_ms()
        for each in slices:
            held = HeldDelivery.of(each, feed.queue, feed.group, consumer.hand_outs, now_ms)
            delivery = self._output.add_delivery(len(each.body))
            fill_delivery(delivery, each, feed.lmq_name, feed.group, feed.partition)
            delivery.consumer_id = consumer.consumer_id
            delivery.delivery_tag = self.deliveries.add(held)
            if held.place is not None:
                held.ended = partial(self._ended, consumer.consumer_id)
                self._components.given_notes.watch(self.deliveries, held)
        self._output.wakeup.set()

    def _deliver_many(self, consumer: Consumer, handed_out: Sequence[HandedOut]) -> None:
        """Plain slices at their first delivery, in columns."""
        now_ms = self._components.clock.monotonic_ms()
        hand_outs, group = consumer.hand_outs, consumer.group
        ended = None if hand_outs is None else partial(self._ended, consumer.consumer_id)
        tags = []
        soonest: HeldDelivery | None = None
        for each in handed_out:
            messages, visibility_ms = each.messages, each.visibility_ms
            held = HeldDelivery(
                each.reservation_id,
                each.receipt,
                each.feed.queue,
                messages,
                messages,
                each.owner_epoch,
                "",
                group,
                each.first_offset,
                visibility_ms,
                now_ms + visibility_ms,
                None if hand_outs is None else hand_outs.place(messages, 0, last_attempt=False),
            )
            held.ended = ended
            tags.append(self.deliveries.add(held))
            if soonest is None or visibility_ms < soonest.visibility_ms:
                soonest = held
        self._output.add_deliveries(consumer.consumer_id, group, tags, handed_out)
        if soonest is not None and hand_outs is not None:
            self._components.given_notes.watch(self.deliveries, soonest)
        self._output.wakeup.set()

    def _ended(self, consumer_id: int, delivery_tag: int) -> None:
        """A client that did not notice the time must not hand it out any more (K1)."""
        self._output.frame.ended.add(consumer_id=consumer_id, delivery_tag=delivery_tag)
        self._output.wakeup.set()
