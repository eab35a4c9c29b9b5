"""Exclusive ownership: drives takeovers against storage, one at a time per (group, lmq_name).

Storage is the judge; what is kept here is what it last said. Between the start of a takeover and
its answer nothing is delivered. If the answer is lost, the queue stays in transfer until storage
has been read.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping

from broker_svc import takeover
from broker_svc.deliveries import DeliveryDirectory
from broker_svc.feeds import FeedKey, Feeds
from broker_svc.partition_link import PartitionLink
from broker_svc.takeover import Owned, Owner, State, Transferring, Vacant
from tidemark.api.broker.v1 import subscription_pb2
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.errors import (
    CommitOutcomeUnknown,
    NotOwner,
    QueueNotFound,
    TidemarkError,
    Unavailable,
)
from tidemark.telemetry import meter

_log = logging.getLogger(__name__)
_takeovers = meter(__name__).create_counter(
    "tidemark.broker.takeovers", description="Exclusive queues that changed their owner"
)


class ExclusiveQueue:
    """One (group, lmq_name) of an exclusive topic."""

    __slots__ = ("group", "lmq_name", "lock", "partition", "state")

    def __init__(self, partition: int, lmq_name: str, group: str) -> None:
        self.partition = partition
        self.lmq_name = lmq_name
        self.group = group
        self.state: State = Vacant()
        self.lock = asyncio.Lock()

    @property
    def key(self) -> FeedKey:
        return self.partition, self.lmq_name, self.group

    @property
    def owner(self) -> Owner | None:
        return self.state.owner if isinstance(self.state, Owned) else None


class Ownerships:
    """The exclusive queues that this broker has heard of since it started."""

    def __init__(
        self,
        links: Mapping[int, PartitionLink],
        feeds: Feeds,
        directory: DeliveryDirectory,
    ) -> None:
        self._links = links
        self._feeds = feeds
        self._directory = directory
        self._queues: dict[FeedKey, ExclusiveQueue] = {}
        self.evicted: Callable[[ExclusiveQueue, Owner], None] = _nobody_listens
        """Told who has lost a queue when only storage could say so."""

    def __len__(self) -> int:
        return len(self._queues)

    def find(self, key: FeedKey) -> ExclusiveQueue | None:
        return self._queues.get(key)

    def get(self, key: FeedKey) -> ExclusiveQueue:
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = ExclusiveQueue(*key)
        return queue

    def forget_vacant(self, queue: ExclusiveQueue) -> None:
        """Nobody owns it and nobody waits for it: storage knows the rest."""
        if isinstance(queue.state, Vacant) and not queue.lock.locked():
            self._queues.pop(queue.key, None)

    def unresolved(self, partition: int) -> list[ExclusiveQueue]:
        """Queues of a partition whose owner only storage knows."""
        return [
            queue
            for queue in self._queues.values()
            if queue.partition == partition and _must_read(queue.state)
        ]

    async def take(
        self,
        queue: ExclusiveQueue,
        client_id: str,
        start: subscription_pb2.StartPosition | None,
    ) -> tuple[Owner | None, Owner]:
        """Make a client the owner; returns who owned before and who owns now.

        The caller holds the lock of the queue. Re-subscribing by the owner changes nothing (E7).
        """
        await self.resolve(queue)
        before = queue.owner
        queue.state = takeover.transfer_began(queue.state, client_id)
        self._feeds.pause(queue.key)
        operation = exchange_pb2.Operation()
        operation.take_ownership.lmq_name = queue.lmq_name
        operation.take_ownership.group = queue.group
        operation.take_ownership.client_id = client_id
        if start is not None:
            operation.take_ownership.start.CopyFrom(start)
        try:
            taken = (await self._links[queue.partition].call(operation)).ownership
        except (Unavailable, NotOwner, CommitOutcomeUnknown, asyncio.CancelledError):
            queue.state = takeover.outcome_unknown(queue.state)
            raise
        except TidemarkError:
            queue.state = takeover.refused(queue.state)
            self._feeds.resume(queue.key)
            raise
        queue.state = takeover.transferred(queue.state, taken.epoch)
        if taken.matched:
            _takeovers.add(1)
        for reservation_id in taken.revoked_reservation_ids:
            self._directory.revoked((queue.partition, reservation_id))
        return before, queue.state.owner

    async def confirm(self, queue: ExclusiveQueue, client_id: str, epoch: int) -> bool:
        """Whether (client, epoch) is what storage holds. Never takes ownership (E7)."""
        await self.resolve(queue)
        found = await self._ask(queue, client_id, epoch)
        if found.matched:
            queue.state = takeover.confirmed(queue.state, Owner(client_id, epoch))
        return found.matched

    async def drop(self, queue: ExclusiveQueue, owner: Owner) -> None:
        """The owner gives up."""
        operation = exchange_pb2.Operation()
        operation.drop_ownership.lmq_name = queue.lmq_name
        operation.drop_ownership.group = queue.group
        operation.drop_ownership.client_id = owner.client_id
        operation.drop_ownership.epoch = owner.epoch
        dropped = (await self._links[queue.partition].call(operation)).ownership
        if dropped.matched and queue.owner == owner:
            queue.state = takeover.dropped(queue.state, dropped.epoch)

    async def resolve(self, queue: ExclusiveQueue) -> None:
        """Read storage if only storage knows who owns the queue. The caller holds the lock."""
        state = queue.state
        if not isinstance(state, Transferring) or not state.must_read:
            return
        found = await self._ask(queue, "", 0)
        # A queue that was deleted and created again has no owner, and no epoch to tell either.
        epoch = found.epoch if found.client_id else max(found.epoch, takeover.epoch_of(state))
        queue.state = takeover.read(state, found.client_id, epoch)
        if queue.state == state.before:
            self._feeds.resume(queue.key)
        elif isinstance(state.before, Owned) and queue.owner != state.before.owner:
            self.evicted(queue, state.before.owner)
        else:
            self._feeds.evict(queue.key)

    async def _ask(
        self, queue: ExclusiveQueue, client_id: str, epoch: int
    ) -> exchange_pb2.OwnershipResult:
        operation = exchange_pb2.Operation()
        operation.confirm_ownership.lmq_name = queue.lmq_name
        operation.confirm_ownership.group = queue.group
        operation.confirm_ownership.client_id = client_id
        operation.confirm_ownership.epoch = epoch
        try:
            return (await self._links[queue.partition].call(operation)).ownership
        except QueueNotFound:  # nobody owns what does not exist
            return exchange_pb2.OwnershipResult(epoch=takeover.epoch_of(queue.state))


def _must_read(state: State) -> bool:
    return isinstance(state, Transferring) and state.must_read


def _nobody_listens(_queue: ExclusiveQueue, _owner: Owner) -> None:
    raise AssertionError("the registry of subscriptions listens")
