"""Pull: a long poll is a consumer that lives for one call.

It draws from the same feeds as sessions, so that pulls and sessions share a queue fairly. Messages
that arrive after the call has ended or was cancelled are released untried.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from broker_svc.api.unary_clients import UnaryClient
from broker_svc.components import BrokerComponents
from broker_svc.consume.consumer import Consumer, Feed, Room, Slices
from broker_svc.consume.deliveries import HeldDelivery, fill_delivery
from broker_svc.exclusive.evictions import State
from broker_svc.exclusive.subscriptions import ACTIVE
from broker_svc.links.partition_link import PartitionLink
from tidemark.api.broker.v1 import broker_pb2, message_pb2, subscription_pb2
from tidemark.errors import CommitOutcomeUnknown, TidemarkError, Unavailable
from tidemark.limits import RUN_BYTES_MAX
from tidemark.names import LmqName
from tidemark.topics import partitions_of

UNSPECIFIED = subscription_pb2.SUBSCRIPTION_STATE_UNSPECIFIED
_CONSUMER_ID = 0


class Pull:
    """One call of a unary client."""

    def __init__(self, components: BrokerComponents, client: UnaryClient) -> None:
        self._components = components
        self._client = client
        self._deliveries: list[message_pb2.Delivery] = []
        self._held: list[HeldDelivery] = []
        self._refusal: TidemarkError | None = None
        self._answered = asyncio.Event()

    async def messages(
        self,
        request: broker_pb2.PullRequest,
        group: str,
        messages_max: int,
        wait_ms: int,
        left_ms: int | None,
    ) -> tuple[list[message_pb2.Delivery], State]:
        """Reserve messages; an empty answer means that none became ready within the wait, in any
        partition of the queue that this broker is to hold.

        The call ends after `left_ms` with the messages that were reserved by then. On an exclusive
        queue, a client that is not the owner gets the same empty answer after the same wait (E3).
        """
        topic = await self._components.topics.get(LmqName.parse(request.lmq_name).topic)
        partitions = partitions_of(request.lmq_name, topic, self._components.settings.partitions)
        links = [self._components.links[partition] for partition in partitions]
        # Other brokers are asked for the partitions that they hold (`forwarding.py`).
        here = [link for link in links if not link.holder_address] or links
        if not any(link.connected.is_set() for link in here):
            raise here[0].refusal()
        lease = await self._components.leases.acquire(request.lmq_name, topic)
        key = (partitions[0], request.lmq_name, group)
        epoch = 0
        if topic.settings.exclusive:
            state = self._components.subscriptions.access_state(self._client.subscriber, key)
            if state != ACTIVE:
                lease.release()
                await self._components.clock.sleep_ms(wait_ms)
                return [], self._components.subscriptions.access_state(self._client.subscriber, key)
            epoch = self._components.subscriptions.epoch(key)
        room = Room(min(request.max_bytes or RUN_BYTES_MAX, RUN_BYTES_MAX))
        consumer = Consumer(
            _CONSUMER_ID,
            group,
            request.visibility_ms,
            self._deliver,
            self._refuse,
            room,
            may_stand=False,
            on_moved=self._answered.set,
        )
        consumer.credit = messages_max
        for link in here:  # until it is up and the partition has replied
            if not link.connected.is_set():
                consumer.unanswered[(link.partition, request.lmq_name, group)] = link.refusal()
        self._components.dispatcher.subscribe(consumer, lease, epoch)
        try:
            await self._until_all_replied(consumer, left_ms)
            with suppress(TimeoutError):
                await self._components.clock.wait_for(self._answered.wait(), wait_ms)
        except asyncio.CancelledError:
            self._give_back()
            raise
        finally:
            self._components.dispatcher.close(consumer)
        if not self._deliveries:
            self._check_all_replied(consumer, here)
        if not topic.settings.exclusive:
            return self._deliveries, UNSPECIFIED
        return self._deliveries, self._components.subscriptions.access_state(
            self._client.subscriber, key
        )

    async def _until_all_replied(self, consumer: Consumer, left_ms: int | None) -> None:
        """An empty answer requires every partition to reply; a non-empty one does not."""
        with suppress(TimeoutError):
            await self._components.clock.wait_for(consumer.quiet.wait(), left_ms)
        if not self._deliveries:
            await consumer.quiet.wait()

    def _check_all_replied(self, consumer: Consumer, links: Sequence[PartitionLink]) -> None:
        """Raise why an empty answer might not be true."""
        if self._refusal is not None:
            raise self._refusal
        for link in links:
            if not link.connected.is_set():
                raise link.refusal()
        for (partition, *_), error in consumer.unanswered.items():
            if isinstance(error, CommitOutcomeUnknown):
                # Messages that it may have reserved go back when the partition is claimed again.
                raise Unavailable(
                    f"partition {partition} failed while messages were reserved",
                    partition=str(partition),
                )
            raise error

    def _give_back(self) -> None:
        """The client is gone before it got the answer: the messages were not tried."""
        for each in self._held:
            self._client.deliveries.drop(each.key)
        self._components.settlements.give_back(self._held, failed=False)

    def _deliver(self, consumer: Consumer, feed: Feed, slices: Slices) -> None:
        for each in slices:
            held = HeldDelivery.of(each, feed.queue, feed.group)
            self._client.deliveries.add(held)
            self._held.append(held)
            delivery = message_pb2.Delivery()
            fill_delivery(delivery, each, feed.lmq_name, feed.group, feed.partition)
            self._deliveries.append(delivery)
        consumer.credit = 0  # one answer, however short
        self._answered.set()

    def _refuse(self, error: TidemarkError) -> None:
        self._refusal = error
        self._answered.set()
