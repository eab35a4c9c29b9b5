"""Subscribers: each incarnation of each client, and the queues that it consumes, within quotas.

Bookkeeping in memory: a subscription begins and ends with its lease, its feed and its share of the
quotas. `subscriptions` decides who may subscribe and who is the owner.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from broker_svc.consume.consumer import Consumer
from broker_svc.consume.dispatcher import Dispatcher
from broker_svc.exclusive.ownership import ExclusiveQueue
from broker_svc.idle.activity_leases import Lease
from tidemark import limits
from tidemark.api.broker.v1 import subscription_pb2
from tidemark.errors import QuotaExceeded
from tidemark.names import topic_of
from tidemark.settings import BrokerSettings

SubscriptionKey = tuple[str, str]
"""Group and lmq_name."""


@dataclass(slots=True, eq=False)
class Subscription:
    """One queue that a subscriber consumes."""

    lease: Lease
    consumer: Consumer | None
    exclusive: ExclusiveQueue | None = None
    epoch: int = 0


@dataclass(slots=True, eq=False)
class Subscriber:
    """One incarnation of a client: a session, or a unary client until it falls silent."""

    client_id: str
    notify: Callable[[subscription_pb2.UnsubscribeNotice], None]
    subscriptions: dict[SubscriptionKey, Subscription] = field(default_factory=dict)
    joining: int = 0
    """Subscriptions in progress: they count towards the quotas."""


class Subscribers:
    """All incarnations of all clients of a broker."""

    def __init__(self, settings: BrokerSettings, dispatcher: Dispatcher) -> None:
        self._settings = settings
        self._dispatcher = dispatcher
        self._by_client: dict[str, dict[Subscriber, None]] = {}
        self._per_group: Counter[str] = Counter()
        self._joining: Counter[str] = Counter()

    @property
    def subscriptions(self) -> int:
        return self._per_group.total()

    # --- incarnations --------------------------------------------------------------------------

    def attach(self, subscriber: Subscriber) -> None:
        self._by_client.setdefault(subscriber.client_id, {})[subscriber] = None

    def detach(self, subscriber: Subscriber) -> bool:
        """Remove it and end its subscriptions; returns whether it was the last of its client."""
        for key in list(subscriber.subscriptions):
            self.end(subscriber, key)
        others = self._by_client.get(subscriber.client_id, {})
        others.pop(subscriber, None)
        if others:
            return False
        self._by_client.pop(subscriber.client_id, None)
        return True

    def of(self, client_id: str) -> list[Subscriber]:
        """The present incarnations of a client."""
        return list(self._by_client.get(client_id, ()))

    def holder(self, client_id: str, key: SubscriptionKey) -> Subscriber | None:
        """The incarnation with which a client consumes the queue."""
        for subscriber in self._by_client.get(client_id, ()):
            if key in subscriber.subscriptions:
                return subscriber
        return None

    def consuming(self, lmq_name: str) -> list[tuple[Subscriber, SubscriptionKey, Subscription]]:
        """All subscriptions to a queue, in any group. Iterates over all subscriptions of the
        broker."""
        return [
            (subscriber, key, subscription)
            for incarnations in self._by_client.values()
            for subscriber in incarnations
            for key, subscription in subscriber.subscriptions.items()
            if key[1] == lmq_name
        ]

    def of_partition(
        self, partition: int
    ) -> list[tuple[Subscriber, SubscriptionKey, Subscription]]:
        """All subscriptions to queues that live in a partition. Iterates over all of them."""
        return [
            (subscriber, key, subscription)
            for incarnations in self._by_client.values()
            for subscriber in incarnations
            for key, subscription in subscriber.subscriptions.items()
            if any(queue.partition == partition for queue in subscription.lease.queues)
        ]

    def owning(self, topic: str) -> list[tuple[str, ExclusiveQueue]]:
        """Exclusive queues of a topic, each with the client that consumes it."""
        return [
            (client_id, subscription.exclusive)
            for client_id, incarnations in self._by_client.items()
            for subscriber in incarnations
            for (_, lmq_name), subscription in subscriber.subscriptions.items()
            if subscription.exclusive is not None and topic_of(lmq_name) == topic
        ]

    # --- subscriptions -------------------------------------------------------------------------

    def begin(
        self, subscriber: Subscriber, key: SubscriptionKey, subscription: Subscription
    ) -> None:
        attached = subscriber in self._by_client.get(subscriber.client_id, ())
        consumer = subscription.consumer
        closed = consumer is not None and consumer.closed
        if key in subscriber.subscriptions or not attached or closed:
            subscription.lease.release()  # a duplicate, or the client or consumer is gone meanwhile
            return
        subscriber.subscriptions[key] = subscription
        self._per_group[key[0]] += 1
        if subscription.exclusive is not None:
            subscription.exclusive.subscriptions += 1
        if consumer is not None:
            self._dispatcher.subscribe(consumer, subscription.lease, subscription.epoch)

    def end(self, subscriber: Subscriber, key: SubscriptionKey) -> None:
        """End a subscription; does nothing if there is none."""
        subscription = subscriber.subscriptions.pop(key, None)
        if subscription is None:
            return
        self._per_group[key[0]] -= 1
        if not self._per_group[key[0]]:
            del self._per_group[key[0]]
        if subscription.consumer is not None:
            self._dispatcher.unsubscribe(subscription.consumer, key[1])
        subscription.lease.release()
        if subscription.exclusive is not None:
            subscription.exclusive.subscriptions -= 1
            subscription.exclusive.unused()

    # --- quotas --------------------------------------------------------------------------------

    @contextmanager
    def joins(self, subscriber: Subscriber, key: SubscriptionKey) -> Iterator[None]:
        """Subscribe within the quotas; subscriptions in progress count towards them."""
        group, _ = key
        if key in subscriber.subscriptions:
            yield
            return
        self._check_quotas(subscriber, group)
        subscriber.joining += 1
        self._joining[group] += 1
        try:
            yield
        finally:
            subscriber.joining -= 1
            self._joining[group] -= 1
            if not self._joining[group]:
                del self._joining[group]

    def has_room(self, subscriber: Subscriber, group: str) -> bool:
        """Whether the quotas allow one more subscription."""
        return self._exceeded(subscriber, group) is None

    def _check_quotas(self, subscriber: Subscriber, group: str) -> None:
        exceeded = self._exceeded(subscriber, group)
        if exceeded is not None:
            what, most = exceeded
            raise QuotaExceeded(f"at most {most} subscriptions per {what}", quota=what)

    def _exceeded(self, subscriber: Subscriber, group: str) -> tuple[str, int] | None:
        """The quota that allows no more subscriptions, and its size."""
        settings = self._settings
        of_client = len(subscriber.subscriptions) + subscriber.joining
        of_group = self._per_group[group] + self._joining[group]
        of_broker = self.subscriptions + self._joining.total()
        quotas = (
            ("client", of_client, limits.SUBSCRIPTIONS_PER_SESSION_MAX),
            ("group", of_group, settings.subscriptions_per_group_max),
            ("broker", of_broker, settings.subscriptions_per_broker_max),
        )
        for what, held, most in quotas:
            if held >= most:
                return what, most
        return None
