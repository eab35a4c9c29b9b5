"""Subscriptions: which client consumes which queue, for shared and for exclusive topics.

Broker-local, in memory; sessions and unary clients use the same code. A new subscriber of an
exclusive queue preempts the old one; its marker is written before it is notified (E2). A full
resync or a heartbeat confirms ownership and never takes it (E7). `evictions` notifies clients that
have lost a queue.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from broker_svc.consume.consumer import Consumer, FeedKey
from broker_svc.consume.dispatcher import Dispatcher
from broker_svc.exclusive.evictions import EVICTED, RESYNC_REQUIRED, Evictions, State
from broker_svc.exclusive.markers import EvictionMarkers
from broker_svc.exclusive.ownership import ExclusiveQueue, Ownerships
from broker_svc.exclusive.registry import Subscriber, Subscribers, Subscription, SubscriptionKey
from broker_svc.exclusive.takeover import Transferring
from broker_svc.idle.activity_leases import ActivityLeases, Lease
from broker_svc.links.link_state import LinkState
from broker_svc.links.partition_link import PartitionLink
from broker_svc.links.topic_cache import TopicCache
from tidemark import limits
from tidemark.api.broker.v1 import subscription_pb2
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.errors import (
    InvalidArgument,
    NotOwner,
    QuotaExceeded,
    TidemarkError,
    TopicNotFound,
    Unavailable,
)
from tidemark.names import LmqName, topic_of
from tidemark.rpc.statuses import to_status
from tidemark.settings import BrokerSettings
from tidemark.topics import Topic, partitions_of
from tidemark.turns import NEXT_TURN

Entry: TypeAlias = subscription_pb2.SubscriptionEntry

ACTIVE = subscription_pb2.SUBSCRIPTION_STATE_ACTIVE
NOT_SUBSCRIBED = subscription_pb2.SUBSCRIPTION_STATE_NOT_SUBSCRIBED
TRANSFERRING = subscription_pb2.SUBSCRIPTION_STATE_TRANSFERRING

ENTRIES_PER_TURN_MAX: Final = 512
"""Entries of a sync that one turn of the event loop carries out: other sessions wait meanwhile."""

_NOT_HERE = (NotOwner, TopicNotFound)
"""The queue is gone or held by another broker: it can be neither consumed nor dropped here."""

Change: TypeAlias = Callable[
    [Subscriber, str, Entry, Consumer | None, Topic], Coroutine[Any, Any, tuple[State, int]]
]


class Subscriptions:
    """All subscriptions of a broker."""

    def __init__(
        self,
        settings: BrokerSettings,
        links: Mapping[int, PartitionLink],
        topics: TopicCache,
        leases: ActivityLeases,
        dispatcher: Dispatcher,
        ownerships: Ownerships,
        subscribers: Subscribers,
        markers: EvictionMarkers,
        evictions: Evictions,
    ) -> None:
        self._settings = settings
        self._links = links
        self._topics = topics
        self._leases = leases
        self._dispatcher = dispatcher
        self.ownerships = ownerships
        self._markers = markers
        self._subscribers = subscribers
        self._evictions = evictions

    def __len__(self) -> int:
        return self._subscribers.subscriptions

    @property
    def eviction_markers(self) -> int:
        """Eviction markers of all clients."""
        return len(self._markers)

    # --- subscribers come and go ---------------------------------------------------------------

    def attach(self, subscriber: Subscriber) -> None:
        self._subscribers.attach(subscriber)

    def detach(self, subscriber: Subscriber) -> None:
        """Disconnect or timeout: end its subscriptions; the last one also removes the markers."""
        with self._leases.reporting_together():
            was_last = self._subscribers.detach(subscriber)
        if was_last:
            self._markers.remove_client(subscriber.client_id)

    def close_consumer(self, subscriber: Subscriber, consumer: Consumer) -> None:
        """A consumer of a session is closed: end its subscriptions."""
        with self._leases.reporting_together():
            for key, subscription in list(subscriber.subscriptions.items()):
                if subscription.consumer is consumer:
                    self._subscribers.end(subscriber, key)

    async def topic_changed(self, topic: Topic) -> None:
        """Let consumers of a plain queue draw from partitions that were added.

        An exclusive queue has only one.
        """
        partitions = partitions_of(topic.name, topic, self._settings.partitions)
        for subscriber, key, narrow in self._subscribers.consuming(topic.name):
            if len(narrow.lease.queues) < len(partitions):
                lease = await self._leases.acquire(topic.name, topic, key[0])
                if subscriber.subscriptions.get(key) is not narrow:
                    lease.release()  # it has ended meanwhile
                    continue
                self._subscribers.end(subscriber, key)
                self._subscribers.begin(subscriber, key, Subscription(lease, narrow.consumer))

    def topic_deleted(self, name: str) -> None:
        """Ownership is deleted with the queues. After half a deletion, owners resync to confirm."""
        for client_id, queue in self._subscribers.owning(name):
            self._evictions.end_all(queue, client_id, RESYNC_REQUIRED)

    def partition_left(self, partition: int) -> None:
        """End the subscriptions to queues that live in no partition of this broker any more.

        Their clients follow to the new holder, and confirm their ownership there with their epochs.
        """
        for subscriber, key, subscription in self._subscribers.of_partition(partition):
            queues = subscription.lease.queues
            if all(self._links[each.partition].state is LinkState.AWAY for each in queues):
                self._subscribers.end(subscriber, key)
        self.ownerships.partition_left(partition)

    # --- syncs ---------------------------------------------------------------------------------

    async def sync(
        self,
        subscriber: Subscriber,
        sync: subscription_pb2.SubscriptionSync,
        group: str,
        consumer: Consumer | None,
    ) -> subscription_pb2.SubscriptionSyncResult:
        """One change or confirmation; each entry has its own result."""
        if len(sync.entries) > limits.SUBSCRIPTIONS_PER_SESSION_MAX:
            raise QuotaExceeded(f"at most {limits.SUBSCRIPTIONS_PER_SESSION_MAX} entries a sync")
        result = subscription_pb2.SubscriptionSyncResult(request_id=sync.request_id)
        names = [entry.lmq_name for entry in sync.entries]
        change: Change
        match sync.mode:
            case subscription_pb2.SYNC_MODE_PARTIAL_ADD:
                change = self._add
            case subscription_pb2.SYNC_MODE_PARTIAL_REMOVE:
                change = self._remove
            case subscription_pb2.SYNC_MODE_COMPLETE_ADD:
                self._markers.keep_only(subscriber.client_id, group, names)
                await self._remove_all(subscriber, group, except_for=names, ignore_unavailable=True)
                change = self._confirm
            case subscription_pb2.SYNC_MODE_COMPLETE_REMOVE:
                self._markers.keep_only(subscriber.client_id, group, ())
                await self._remove_all(subscriber, group, except_for=())
                return result
            case _:
                raise InvalidArgument("a sync requires a mode", field="mode")
        changing = self._change_all(change, subscriber, group, sync.entries, consumer)
        # Completed even if the client disconnects: half a takeover would block others.
        result.results.extend(await asyncio.shield(changing))
        return result

    async def _change_all(
        self,
        change: Change,
        subscriber: Subscriber,
        group: str,
        entries: Sequence[Entry],
        consumer: Consumer | None,
    ) -> Sequence[subscription_pb2.SubscriptionResult]:
        """The result of each entry, in their order."""
        done: list[subscription_pb2.SubscriptionResult | None] = []
        for start in range(0, len(entries), ENTRIES_PER_TURN_MAX):
            if start:
                await NEXT_TURN
            with self._leases.reporting_together():
                done += [
                    self._at_once(change, subscriber, group, each, consumer)
                    for each in entries[start : start + ENTRIES_PER_TURN_MAX]
                ]
        changes = [
            self._one(change, subscriber, group, entry, consumer)
            for entry, changed in zip(entries, done, strict=True)
            if changed is None
        ]
        waited = iter(await asyncio.gather(*changes))
        return [next(waited) if each is None else each for each in done]

    def heartbeat(
        self, subscriber: Subscriber, group: str, entries: Iterable[Entry]
    ) -> list[subscription_pb2.UnsubscribeNotice]:
        """Notices for queues that the client reports and does not own (E5)."""
        notices = (self._evictions.notice_again(subscriber, group, entry) for entry in entries)
        return [notice for notice in notices if notice is not None]

    def access_state(self, subscriber: Subscriber, key: FeedKey) -> State:
        """Whether a client may consume an exclusive queue, decided without storage (E3).

        Only the incarnation that has subscribed may; another one has to resync.
        """
        client_id = subscriber.client_id
        _, lmq_name, group = key
        if self._markers.epoch(client_id, group, lmq_name) is not None:
            return EVICTED
        queue = self.ownerships.find(key)
        if queue is None:
            return RESYNC_REQUIRED
        if queue.owner is not None and queue.owner.client_id == client_id:
            subscribed = (group, lmq_name) in subscriber.subscriptions
            return ACTIVE if subscribed else RESYNC_REQUIRED
        state = queue.state
        if isinstance(state, Transferring) and state.to_client_id == client_id:
            return TRANSFERRING
        return NOT_SUBSCRIBED

    def epoch(self, key: FeedKey) -> int:
        """The epoch of the present owner; 0 without one."""
        queue = self.ownerships.find(key)
        return 0 if queue is None or queue.owner is None else queue.owner.epoch

    # --- one entry -----------------------------------------------------------------------------

    def _at_once(
        self,
        change: Change,
        subscriber: Subscriber,
        group: str,
        entry: Entry,
        consumer: Consumer | None,
    ) -> subscription_pb2.SubscriptionResult | None:
        """The result of an entry that waits for nothing: a shared queue that is loaded joins, or is
        left. None, without any change, for any other, which `_one` carries out.

        A task for each of thousands of entries, and an operation to storage, cost more than all
        that is done here.
        """
        lmq_name = entry.lmq_name
        topic = self._topics.known(topic_of(lmq_name))
        if topic is None or topic.settings.exclusive:
            return None
        key = (group, lmq_name)
        result = subscription_pb2.SubscriptionResult(lmq_name=lmq_name)
        if change == self._remove:
            if key not in subscriber.subscriptions:
                return None
            self._subscribers.end(subscriber, key)
            result.state = NOT_SUBSCRIBED
            return result
        partitions = partitions_of(lmq_name, topic, self._settings.partitions)
        held = all(self._links[each].state is LinkState.HELD for each in partitions)
        if not held or entry.HasField("start"):
            return None
        if key not in subscriber.subscriptions:
            if not self._subscribers.has_room(subscriber, group):
                return None
            lease = self._leases.begin_loaded(lmq_name, partitions, topic, group)
            if lease is None:
                return None
            self._subscribers.begin(subscriber, key, Subscription(lease, consumer))
        result.state = ACTIVE
        return result

    async def _one(
        self,
        change: Change,
        subscriber: Subscriber,
        group: str,
        entry: Entry,
        consumer: Consumer | None,
    ) -> subscription_pb2.SubscriptionResult:
        result = subscription_pb2.SubscriptionResult(lmq_name=entry.lmq_name)
        try:
            topic = await self._topics.get(LmqName.parse(entry.lmq_name).topic)
            state, epoch = await change(subscriber, group, entry, consumer, topic)
            result.state, result.epoch = state, epoch
            if result.state == ACTIVE:
                self._check_here(entry.lmq_name, topic)
                result.other_holders.extend(self._other_holders(entry.lmq_name, topic))
        except TidemarkError as error:
            if isinstance(error, _NOT_HERE) or result.state == ACTIVE:
                self._subscribers.end(subscriber, (group, entry.lmq_name))
            result.error.CopyFrom(to_status(error))
        return result

    async def _add(
        self,
        subscriber: Subscriber,
        group: str,
        entry: Entry,
        consumer: Consumer | None,
        topic: Topic,
    ) -> tuple[State, int]:
        """Explicit subscription; on an exclusive topic it takes ownership."""
        key = (group, entry.lmq_name)
        start = entry.start if entry.start.WhichOneof("position") else None
        if not topic.settings.exclusive:
            if key not in subscriber.subscriptions:
                with self._subscribers.joins(subscriber, key):
                    lease = await self._leases.acquire(entry.lmq_name, topic, group)
                    await self._place(lease, group, start)
                    self._subscribers.begin(subscriber, key, Subscription(lease, consumer))
                current = self._topics.known(topic.name)
                if current is not None and current.version != topic.version:
                    await self.topic_changed(current)  # the update missed this new subscription
            return ACTIVE, 0
        self._evictions.check_room(subscriber.client_id, key)
        queue = self._exclusive(entry.lmq_name, group, topic)
        async with queue.lock():
            with self._subscribers.joins(subscriber, key):
                return await self._take(subscriber, key, queue, consumer, topic, start)

    async def _take(
        self,
        subscriber: Subscriber,
        key: SubscriptionKey,
        queue: ExclusiveQueue,
        consumer: Consumer | None,
        topic: Topic,
        start: subscription_pb2.StartPosition | None,
    ) -> tuple[State, int]:
        lease = await self._leases.acquire(queue.lmq_name, topic, key[0])
        held = subscriber.subscriptions.get(key)
        epoch = 0 if held is None else held.epoch
        try:
            before, owner = await self.ownerships.take(queue, subscriber.client_id, epoch, start)
        except BaseException:
            lease.release()
            raise
        self._markers.remove(subscriber.client_id, *key)
        if before is not None and before != owner:
            self._evictions.evict(queue, before, by=subscriber)
        held = subscriber.subscriptions.get(key)
        if held is not None and held.epoch == owner.epoch and held.consumer is consumer:
            lease.release()  # already the owner: its waiting consumers keep waiting
            self._dispatcher.resume(queue.key)
        else:
            self._own(subscriber, key, Subscription(lease, consumer, queue, owner.epoch))
        return ACTIVE, owner.epoch

    async def _confirm(
        self,
        subscriber: Subscriber,
        group: str,
        entry: Entry,
        consumer: Consumer | None,
        topic: Topic,
    ) -> tuple[State, int]:
        """One entry of a full resync: ownership is compared, never taken."""
        key = (group, entry.lmq_name)
        if not topic.settings.exclusive:
            return await self._add(subscriber, group, entry, consumer, topic)
        queue = self._exclusive(entry.lmq_name, group, topic)
        async with queue.lock():
            found = await self.ownerships.confirm(queue, subscriber.client_id, entry.epoch)
            if not found.matched:
                epoch = found.epoch if found.client_id else 0
                return self._evictions.refute(subscriber, key, found.client_id, epoch), epoch
            self._markers.remove(subscriber.client_id, group, entry.lmq_name)
            held = subscriber.subscriptions.get(key)
            if held is None or held.consumer is not consumer:
                with self._subscribers.joins(subscriber, key):
                    lease = await self._leases.acquire(entry.lmq_name, topic, group)
                    self._own(subscriber, key, Subscription(lease, consumer, queue, entry.epoch))
            return ACTIVE, entry.epoch

    async def _remove(
        self,
        subscriber: Subscriber,
        group: str,
        entry: Entry,
        consumer: Consumer | None,
        topic: Topic,
    ) -> tuple[State, int]:
        """Never refused by a quota. The owner of an exclusive queue gives it up."""
        key = (group, entry.lmq_name)
        if topic.settings.exclusive:
            queue = self._exclusive(entry.lmq_name, group, topic)
            async with queue.lock():
                # Another incarnation of the client that consumes the queue keeps it.
                if self._subscribers.holder(subscriber.client_id, key) in (None, subscriber):
                    await self.ownerships.drop(queue, subscriber.client_id, entry.epoch)
                self._subscribers.end(subscriber, key)  # only now: a failed drop can be repeated
        self._subscribers.end(subscriber, key)
        return NOT_SUBSCRIBED, 0

    async def _remove_all(
        self,
        subscriber: Subscriber,
        group: str,
        except_for: Iterable[str],
        *,
        ignore_unavailable: bool = False,
    ) -> None:
        """`ignore_unavailable`: end the subscription even if storage cannot be reached.

        There the client stays the owner until another client takes over, or it returns itself.
        """
        kept = set(except_for)
        for held_group, lmq_name in list(subscriber.subscriptions):
            if held_group == group and lmq_name not in kept:
                try:
                    topic = await self._topics.get(LmqName.parse(lmq_name).topic)
                    await self._remove(subscriber, group, Entry(lmq_name=lmq_name), None, topic)
                except (*_NOT_HERE, Unavailable) as error:
                    if isinstance(error, Unavailable) and not ignore_unavailable:
                        raise
                    self._subscribers.end(subscriber, (group, lmq_name))

    def _check_here(self, lmq_name: str, topic: Topic) -> None:
        """Raise NotOwner if the queue has left this broker while it was being subscribed."""
        partitions = partitions_of(lmq_name, topic, self._settings.partitions)
        if all(self._links[each].state is LinkState.AWAY for each in partitions):
            raise self._links[partitions[0]].refusal()

    def _other_holders(self, lmq_name: str, topic: Topic) -> Iterable[str]:
        """The brokers that hold partitions of a queue which this one does not hold."""
        partitions = partitions_of(lmq_name, topic, self._settings.partitions)
        addresses = (self._links[each].holder_address for each in partitions)
        return dict.fromkeys(each for each in addresses if each)

    # --- helpers -------------------------------------------------------------------------------

    def _exclusive(self, lmq_name: str, group: str, topic: Topic) -> ExclusiveQueue:
        (partition,) = partitions_of(lmq_name, topic, self._settings.partitions)
        return self.ownerships.get((partition, lmq_name, group))

    async def _place(
        self, lease: Lease, group: str, start: subscription_pb2.StartPosition | None
    ) -> None:
        """Place a shared group at the start position of the subscription."""
        if start is None:
            return
        for queue in lease.queues:
            operation = exchange_pb2.Operation()
            operation.place_group.lmq_name = queue.lmq_name
            operation.place_group.group = group
            operation.place_group.start.CopyFrom(start)
            try:
                await self._links[queue.partition].call(operation)
            except BaseException:
                lease.release()
                raise

    def _own(
        self, subscriber: Subscriber, key: SubscriptionKey, subscription: Subscription
    ) -> None:
        """Begin the owner's subscription; earlier consumers no longer draw from the queue."""
        assert subscription.exclusive is not None, "only exclusive queues are owned"
        for other in self._subscribers.of(subscriber.client_id):
            self._subscribers.end(other, key)
        self._dispatcher.evict(subscription.exclusive.key)
        self._subscribers.begin(subscriber, key, subscription)
