"""Dispatcher: from queues with ready messages to consumers with credit, driven by demand alone.

A feed is one (partition, queue, group). It is ready until a reserve comes back short, and again
when storage reports it, or when a frame carries a run or returned messages for its queue: then a
reserve follows in the same frame, and one commit both stores and delivers them. Where a standing
reserve waits in storage (`standing.py`), none is needed. A consumer reserves from its ready feeds
for as long as it has credit and its connection has room; both are spent before the reserve, and
what was not needed is given back, so that no consumer gets more than it asked for or has room for.
Nothing here waits on a timer.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

from broker_svc.consume.consumer import (
    LIKELY_MESSAGE_BYTES,
    MANY_FEEDS,
    MANY_FEEDS_RESERVE_BYTES,
    Consumer,
    Feed,
    FeedKey,
    HandedOut,
    Room,
    Slices,
)
from broker_svc.consume.reserve import Asked, has_lost, is_lost, long_form, reserve_operation
from broker_svc.consume.standing import StandingReserve, StandingReserves
from broker_svc.idle.activity_leases import Lease
from broker_svc.idle.tracking import QueueKey, TrackedQueue
from broker_svc.links.frame_columns import HandOutRow
from broker_svc.links.partition_link import PartitionLink
from broker_svc.links.unanswered_operations import Answer
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.errors import Fenced, QueueNotFound, QuotaExceeded, TidemarkError
from tidemark.limits import PULL_MESSAGES_MAX
from tidemark.names import topic_of
from tidemark.rpc.statuses import from_status
from tidemark.telemetry import Tally, counter

OperationResult = exchange_pb2.OperationResult | TidemarkError
"""The answer of storage, or the error in its place."""

_discarded = counter(
    "tidemark.broker.discarded_reservations", description="Reserved for consumers that were gone"
)


class Dispatcher:
    """All feeds of a broker."""

    def __init__(
        self, links: Mapping[int, PartitionLink], on_fenced: Callable[[FeedKey, int], None]
    ) -> None:
        self._links = links
        self._feeds: dict[FeedKey, Feed] = {}
        self._by_queue: dict[QueueKey, list[Feed]] = {}
        """The feeds of each queue, one for each group."""
        self._coming: dict[int, dict[FeedKey, None]] = {}
        """Feeds that get messages with the next frame of a partition and have no reserve in it, of
        the partitions that have any."""
        self._handed_out: dict[Consumer, list[HandedOut]] = {}
        """Hand-outs in columns of the frame that is being read."""
        self.standing = StandingReserves(links, self.reserve_for)
        self.delivered = Tally()
        """Messages that were handed to consumers."""
        self._on_fenced = on_fenced
        """Called when storage refuses the epoch of a feed: its owner may have lost the queue."""

    def __len__(self) -> int:
        return len(self._feeds)

    # --- consumers -----------------------------------------------------------------------------

    def subscribe(self, consumer: Consumer, lease: Lease, owner_epoch: int = 0) -> None:
        """Let a consumer draw from a queue, in all its partitions."""
        lmq_name = lease.queues[0].lmq_name
        consumer.leases[lmq_name] = lease
        for queue in lease.queues:
            key = (queue.partition, lmq_name, consumer.group)
            feed = self._feeds.get(key) or self._new_feed(consumer, queue)
            self.standing.recall(feed.standing)  # from now on they take turns
            feed.consumers.append(consumer)
            consumer.feeds += 1
            feed.owner_epoch = owner_epoch
            feed.ready = True
            consumer.ready_feeds[key] = feed
        self.reserve_for(consumer)

    def pause(self, key: FeedKey) -> None:
        """Ownership is being transferred: wake-ups and answers wait, or go back."""
        feed = self._feeds.get(key)
        if feed is not None:
            feed.paused = True

    def resume(self, key: FeedKey) -> None:
        """Ownership stayed where it was."""
        feed = self._feeds.get(key)
        if feed is not None:
            feed.paused = False
            self._offer(feed)

    def evict(self, key: FeedKey) -> None:
        """All consumers of an exclusive queue have lost it."""
        feed = self._feeds.get(key)
        if feed is not None:
            feed.paused = False
            for consumer in list(feed.consumers):
                self.unsubscribe(consumer, feed.lmq_name)

    def unsubscribe(self, consumer: Consumer, lmq_name: str) -> None:
        """The consumer draws no longer from a queue; what it holds of it stays with it."""
        lease = consumer.leases.pop(lmq_name, None)
        if lease is None:
            return
        for queue in lease.queues:
            key = (queue.partition, lmq_name, consumer.group)
            feed = self._feeds[key]
            if lease.is_last_of_group(queue):
                self.standing.end(feed.standing)  # with the group, which the release leaves
            else:
                self.standing.recall(feed.standing)
            feed.consumers.remove(consumer)
            consumer.feeds -= 1
            consumer.ready_feeds.pop(key, None)
            if not feed.consumers:
                self._remove(feed)
            elif feed.ready:
                self._offer(feed)
        lease.release()
        if consumer.ready_feeds and not consumer.closed:
            self.reserve_for(consumer)  # its other feeds may have waited for the credit

    def close(self, consumer: Consumer) -> None:
        consumer.closed = True
        for lmq_name in list(consumer.leases):
            self.unsubscribe(consumer, lmq_name)

    def _new_feed(self, consumer: Consumer, queue: TrackedQueue) -> Feed:
        feed = Feed(queue, consumer.group)
        if consumer.feeds >= MANY_FEEDS:
            feed.reserve_bytes = MANY_FEEDS_RESERVE_BYTES
        self._feeds[feed.key] = feed
        self._by_queue.setdefault(feed.queue.key, []).append(feed)
        return feed

    def _remove(self, feed: Feed) -> None:
        feed.removed = True
        del self._feeds[feed.key]
        feeds = self._by_queue[feed.queue.key]
        feeds.remove(feed)
        if not feeds:
            del self._by_queue[feed.queue.key]

    # --- events --------------------------------------------------------------------------------

    def on_append_queued(self, queue: QueueKey, messages: int, body_bytes: int) -> None:
        """A run for the queue goes to storage with the next frame."""
        for feed in self._by_queue.get(queue, ()):
            if feed.standing is None or not feed.standing.cover(messages, body_bytes):
                self._coming.setdefault(feed.partition, {})[feed.key] = None

    def on_return_queued(self, key: FeedKey) -> None:
        """A consumer of the feed gives messages back with the next frame."""
        feed = self._feeds.get(key)
        if feed is not None and (feed.standing is None or feed.standing.recalled):
            self._coming.setdefault(key[0], {})[key] = None

    def before_frame_sent(self, leaving: Collection[int]) -> None:
        """Add a reserve for each waiting feed that gets messages with this frame, at its end.

        `leaving` are the partitions of the frame. A reserve may add another one to them.
        """
        prepared: set[int] = set()
        while self._coming and (coming := (self._coming.keys() & leaving) - prepared):
            prepared |= coming
            for partition in sorted(coming):
                keys = self._coming.pop(partition, ())
                feeds = [feed for key in keys if (feed := self._feeds.get(key)) is not None]
                for feed in feeds:
                    feed.wakeups += 1
                self._offer(*feeds)

    def queue_ready(self, key: FeedKey) -> None:
        """Storage has messages again, or will have them when it applies this frame."""
        feed = self._feeds.get(key)
        if feed is not None:
            feed.wakeups += 1
            self._offer(feed)

    def queue_forgotten(self, lmq_name: str) -> None:
        """A queue or a group was deleted under its consumers: they reserve from it again."""
        for partition in self._links:
            for feed in list(self._by_queue.get((partition, lmq_name), ())):
                self.queue_ready(feed.key)

    def topic_created(self, topic: str) -> None:
        """Consumers of an earlier topic of that name reserve from its queues again."""
        for feed in list(self._feeds.values()):
            if topic_of(feed.lmq_name) == topic:
                self.queue_ready(feed.key)

    def link_up(self, partition: int) -> None:
        """Storage has forgotten the waiting feeds: all of them reserve again."""
        self._offer(*(feed for feed in self._feeds.values() if feed.partition == partition))

    def link_down(self, partition: int) -> None:
        """Storage has forgotten what stood: its credit is free for other partitions."""
        for standing in self.standing.of_partition(partition):
            self.standing.end(standing)
            self.reserve_for(standing.consumer)

    def partition_left(self, partition: int) -> None:
        """Another broker holds the partition: consumers of a single call look for it there."""
        for feed in [each for each in self._feeds.values() if each.partition == partition]:
            for consumer in list(feed.consumers):
                if consumer.on_moved is not None:
                    consumer.on_moved()

    def reserve_for(self, consumer: Consumer) -> None:
        """Reserve for a consumer for as long as it has credit and something may be ready."""
        room = consumer.room
        while consumer.wants_more and consumer.ready_feeds and room.left_bytes > 0:
            _, feed = consumer.ready_feeds.popitem(last=False)
            link = self._links[feed.partition]
            if not feed.ready or feed.paused or not link.connected.is_set():
                continue
            share = consumer.credit // (len(consumer.ready_feeds) + 1)
            messages = max(1, min(share, PULL_MESSAGES_MAX))
            if consumer.feeds > 1:  # other feeds need credit at the same time
                messages = min(messages, feed.reserve_bytes // LIKELY_MESSAGE_BYTES)
            standing = self.standing.propose(consumer, feed, messages)
            consumer.credit -= messages
            bytes_max = min(feed.reserve_bytes, room.left_bytes)
            # Charged whole: one message may come that is larger than what is left.
            room.taken_bytes += feed.reserve_bytes
            room.pending_bytes += feed.reserve_bytes
            consumer.reserving += 1
            consumer.quiet.clear()
            operation = reserve_operation(consumer, feed, messages, bytes_max)
            if standing is not None:
                standing.write_to(operation.reserve)
            replaced = feed.standing
            if replaced is not None and replaced.consumer is consumer:
                operation.reserve.replaces = replaced.standing_id
            else:
                replaced = None
            if (coming := self._coming.get(feed.partition)) is not None:
                coming.pop(feed.key, None)
            asked = Asked(messages, feed.reserve_bytes, feed.wakeups, standing, replaced)
            link.ask(operation, partial(self._reserved, consumer, feed, asked))
        if consumer.wants_more and consumer.ready_feeds:
            room.waiting[consumer] = None
        short = consumer.ready_feeds and not consumer.credit and not consumer.reserving
        if consumer.stopped or short:
            self.standing.recall_all(consumer)

    def room_made(self, room: Room) -> None:
        """A connection has room again: consumers that waited for it reserve."""
        if room.left_bytes <= 0:
            return
        waiting, room.waiting = room.waiting, {}
        for consumer in waiting:
            self.reserve_for(consumer)

    def _offer(self, *feeds: Feed) -> None:
        """Something may be ready: each feed goes to its next consumer with credit; without one, to
        the first that gets credit. Feeds that are offered together share the credit."""
        offered: dict[Consumer, int] = {}
        for feed in feeds:
            feed.ready = True
            if not feed.paused:
                for consumer in feed.next_consumers(offered):
                    consumer.ready_feeds[feed.key] = feed
                    offered[consumer] = offered.get(consumer, 0) + 1
        for consumer in offered:
            self.reserve_for(consumer)  # it can do nothing but wait, if there is no room

    def _reserved(
        self, consumer: Consumer, feed: Feed, asked: Asked, result: OperationResult
    ) -> None:
        consumer.room.taken_bytes -= asked.charged_bytes
        consumer.room.pending_bytes -= asked.charged_bytes
        consumer.reserving -= 1
        self._answered(consumer, feed, asked, result)
        self.room_made(consumer.room)
        if not consumer.reserving:
            consumer.quiet.set()

    def _answered(
        self, consumer: Consumer, feed: Feed, asked: Asked, result: OperationResult
    ) -> None:
        """Settle the accounts of one reserve: credit, deliveries, and whether to ask again."""
        if isinstance(result, TidemarkError):  # the link broke; the feed asks again when it is up
            consumer.credit += asked.messages
            self.standing.end(asked.standing)
            if not consumer.may_stand:
                consumer.unanswered[feed.key] = result
        elif result.HasField("error"):
            consumer.credit += asked.messages
            self.standing.end(asked.standing)
            self._refused(consumer, feed, from_status(result.error))
        else:
            if consumer.unanswered:
                consumer.unanswered.pop(feed.key, None)
            reserved = result.reserve
            accepted = self._hand_over(consumer, feed, asked, reserved)
            self._ask_again(consumer, feed, asked, more=reserved.more, accepted=accepted)
        self.reserve_for(consumer)  # its other feeds may have waited for the credit

    def _hand_over(
        self, consumer: Consumer, feed: Feed, asked: Asked, reserved: exchange_pb2.ReserveResult
    ) -> bool:
        """Deliver what was reserved; False if the consumer lost the feed while it was asked for."""
        slices = reserved.slices
        feed.learn(sum(len(each.body) for each in slices), more=reserved.more)
        lost = is_lost(consumer, feed, slices)
        messages = sum(each.count for each in slices)
        self.standing.end(asked.replaced)  # what it had left may be among what was reserved
        consumer.credit += asked.messages - (0 if lost else messages)
        if asked.standing is not None and reserved.standing_messages:
            self.standing.began(asked.standing, reserved.standing_messages)
            if lost or len(feed.consumers) != 1:
                self.standing.recall(asked.standing)  # before a release, which it would get
        else:
            self.standing.end(asked.standing)
        if lost:
            self._release(feed.partition, slices)
        elif slices:
            self._deliver(consumer, feed, slices, messages)
        return not lost

    def handed_out(self, partition: int, reserved: exchange_pb2.ReserveResult) -> None:
        """A standing reserve has handed out, or has ended."""
        standing = self.standing.find(partition, reserved.standing_id)
        if standing is None:
            self._release(partition, reserved.slices)
            return
        consumer, feed, slices = standing.consumer, standing.feed, reserved.slices
        messages = sum(each.count for each in slices)
        self.standing.used(standing, messages)
        if is_lost(consumer, feed, slices):
            consumer.credit += messages
            self.standing.recall(standing)
            self._release(partition, slices)
        elif slices:
            self._deliver(consumer, feed, slices, messages)
        if not reserved.standing_messages:
            self.standing.end(standing)
            if reserved.more and not feed.removed:
                if slices:  # else one message was too large for it, and fits a reserve, as a rule
                    feed.learn(sum(len(each.body) for each in slices), more=True)
                self.queue_ready(feed.key)
            self.reserve_for(consumer)  # its other feeds may have waited for the credit
        elif consumer.room.is_unread:
            self.standing.recall_all(consumer)  # its client must read first

    def handed_out_many(self, hand_outs: Iterable[HandOutRow]) -> None:
        """Standing reserves have handed out one plain slice each, and stand on.

        What all partitions of a frame hand out is delivered together, by `deliver_handed_out`.
        """
        for partition, standing_id, left, *columns in hand_outs:
            standing = self.standing.find(partition, standing_id)
            handed = None if standing is None else HandedOut(standing.feed, *columns)
            if standing is None or handed is None or not self._takes(standing, handed):
                self.handed_out(partition, long_form(standing_id, left, *columns))
                continue
            self.standing.used(standing, handed.messages)
            self.delivered.add(handed.messages, handed.feed.lmq_name)
            self._handed_out.setdefault(standing.consumer, []).append(handed)

    def deliver_handed_out(self) -> None:
        """All results of a frame were taken."""
        for consumer in list(self._handed_out):
            self._deliver_many(consumer)

    def _deliver_many(self, consumer: Consumer) -> None:
        handed_out = self._handed_out.pop(consumer, None)
        if handed_out is None:
            return
        assert consumer.deliver_many is not None, "only such consumers are handed out to in columns"
        consumer.deliver_many(consumer, handed_out)
        if consumer.room.is_unread:
            self.standing.recall_all(consumer)  # its client must read first

    def _deliver(self, consumer: Consumer, feed: Feed, slices: Slices, messages: int) -> None:
        self._deliver_many(consumer)  # they came first
        self.delivered.add(messages, feed.lmq_name)
        consumer.deliver(consumer, feed, slices)

    def _takes(self, standing: StandingReserve, handed: HandedOut) -> bool:
        """Whether a hand-out is delivered in columns."""
        consumer, feed = standing.consumer, standing.feed
        current = handed.owner_epoch == feed.owner_epoch
        in_columns = current and consumer.deliver_many is not None
        return in_columns and not has_lost(consumer, feed)

    def _ask_again(
        self, consumer: Consumer, feed: Feed, asked: Asked, *, more: bool, accepted: bool
    ) -> None:
        """Offer the feed again if it has more, or was woken while the reserve was under way."""
        if feed.removed:
            return
        if accepted:
            feed.ready = more or feed.wakeups != asked.wakeups
        if feed.ready:
            if accepted:
                consumer.ready_feeds[feed.key] = feed
            self._offer(feed)

    def _refused(self, consumer: Consumer, feed: Feed, error: TidemarkError) -> None:
        """Asking again at once would not help: the next event of the feed does."""
        current = not feed.removed
        if isinstance(error, QueueNotFound) and current:  # deleted under its consumers: create it
            materialize = exchange_pb2.Materialize(
                lmq_name=feed.lmq_name, create=True, groups=feed.queue.groups
            )
            operation = exchange_pb2.Operation(materialize=materialize)
            answer = self._links[feed.partition].send(operation)
            answer.add_done_callback(partial(self._created, feed))
        else:
            feed.ready = False
            if isinstance(error, Fenced) and feed.owner_epoch:
                if current:  # else its ownership has ended meanwhile, which is the answer
                    self._on_fenced(feed.key, feed.owner_epoch)
            elif not consumer.may_stand:
                consumer.unanswered[feed.key] = error
        if isinstance(error, QuotaExceeded):
            consumer.refuse(error)

    def _created(self, feed: Feed, answer: Answer) -> None:
        if answer.exception() is None and not answer.result().HasField("error"):
            self.queue_ready(feed.key)

    def _release(self, partition: int, slices: Slices) -> None:
        """Give back what was reserved for a consumer that has gone: it was not tried."""
        for each in slices:
            _discarded.add(1)
            settle = exchange_pb2.SettleReservation(
                receipt=each.receipt,
                action=exchange_pb2.SETTLE_ACTION_RELEASE,
                owner_epoch=each.owner_epoch,
            )
            answer = self._links[partition].send(exchange_pb2.Operation(settle=settle))
            answer.add_done_callback(asyncio.Future.exception)
