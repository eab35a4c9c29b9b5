"""Evictions: how a client loses an exclusive queue, and how it is notified.

A client that another one preempts is marked before it is notified (E2), and notified again for as
long as it reports the queue (E5). A client that another incarnation of its own id preempts was
replaced: it gets a notice and no marker, because a marker would block the new incarnation as well.
"""

from typing import Final, TypeAlias

from broker_svc.consume.dispatcher import Dispatcher
from broker_svc.exclusive.markers import EvictionMarkers
from broker_svc.exclusive.ownership import ExclusiveQueue
from broker_svc.exclusive.registry import Subscriber, Subscribers, SubscriptionKey
from broker_svc.exclusive.takeover import Owner
from tidemark.api.broker.v1 import subscription_pb2
from tidemark.errors import QuotaExceeded

State: TypeAlias = subscription_pb2.SubscriptionState.ValueType
Notice: TypeAlias = subscription_pb2.UnsubscribeNotice

EVICTED: Final = subscription_pb2.SUBSCRIPTION_STATE_EVICTED
REPLACED: Final = subscription_pb2.SUBSCRIPTION_STATE_REPLACED
RESYNC_REQUIRED: Final = subscription_pb2.SUBSCRIPTION_STATE_RESYNC_REQUIRED


class Evictions:
    """Ends subscriptions to exclusive queues that their clients have lost."""

    def __init__(
        self, markers: EvictionMarkers, subscribers: Subscribers, dispatcher: Dispatcher
    ) -> None:
        self._markers = markers
        self._subscribers = subscribers
        self._dispatcher = dispatcher

    def evict(self, queue: ExclusiveQueue, old: Owner, by: Subscriber | None = None) -> None:
        """Write the marker, then end the old owner's subscription, then notify it (E2).

        `by` is the subscriber that is the owner now, if it is known.
        """
        owner = queue.owner
        if owner is not None and owner.client_id == old.client_id:
            self._replace(queue, owner, by)
            return
        epoch = 0 if owner is None else owner.epoch
        self._mark(old.client_id, (queue.group, queue.lmq_name), epoch)
        self.end_all(queue, old.client_id, EVICTED)

    def end_all(self, queue: ExclusiveQueue, client_id: str, why: State) -> None:
        """Every incarnation of the client has lost the queue: end and notify each."""
        owner = queue.owner
        epoch = 0 if owner is None or owner.client_id == client_id else owner.epoch
        key = (queue.group, queue.lmq_name)
        self._dispatcher.evict(queue.key)
        for subscriber in self._subscribers.of(client_id):
            self._subscribers.end(subscriber, key)
            subscriber.notify(_notice(key, why, epoch))

    def refute(
        self, subscriber: Subscriber, key: SubscriptionKey, owner_client_id: str, epoch: int
    ) -> State:
        """A resync claimed ownership that storage does not confirm: notify the client."""
        self._subscribers.end(subscriber, key)
        state = REPLACED if owner_client_id == subscriber.client_id else EVICTED
        if state == EVICTED:
            self.check_room(subscriber.client_id, key)
            self._mark(subscriber.client_id, key, epoch)
        subscriber.notify(_notice(key, state, epoch))
        return state

    def notice_again(
        self, subscriber: Subscriber, group: str, entry: subscription_pb2.SubscriptionEntry
    ) -> Notice | None:
        """The notice for a client that reports a queue; None if it does consume it."""
        key = (group, entry.lmq_name)
        evicted_by = self._markers.epoch(subscriber.client_id, *key)
        if evicted_by is not None:
            return _notice(key, EVICTED, evicted_by)
        if key in subscriber.subscriptions:
            return None
        holder = self._subscribers.holder(subscriber.client_id, key)
        if holder is not None and (epoch := holder.subscriptions[key].epoch) > entry.epoch:
            return _notice(key, REPLACED, epoch)
        return _notice(key, RESYNC_REQUIRED, 0)

    def check_room(self, client_id: str, key: SubscriptionKey) -> None:
        """Bound the markers of a client: beyond the limit, it must do a full resync first."""
        if not self._markers.may_add(client_id, *key):
            raise QuotaExceeded(
                "evicted from too many queues since the last full resync", quota="markers"
            )

    def _replace(self, queue: ExclusiveQueue, owner: Owner, by: Subscriber | None) -> None:
        """Another incarnation of the client is the owner: notify the one that consumed."""
        key = (queue.group, queue.lmq_name)
        self._dispatcher.evict(queue.key)
        for subscriber in self._subscribers.of(owner.client_id):
            if key in subscriber.subscriptions:
                self._subscribers.end(subscriber, key)
                if subscriber is not by:
                    subscriber.notify(_notice(key, REPLACED, owner.epoch))

    def _mark(self, client_id: str, key: SubscriptionKey, epoch: int) -> None:
        """A disconnected client needs no marker, and nothing would remove it."""
        if self._subscribers.of(client_id):
            self._markers.add(client_id, *key, epoch)


def _notice(key: SubscriptionKey, state: State, epoch: int) -> Notice:
    group, lmq_name = key
    return Notice(group=group, lmq_name=lmq_name, state=state, epoch=epoch)
