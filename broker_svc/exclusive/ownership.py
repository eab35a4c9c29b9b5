"""Exclusive ownership: drives takeovers against storage, one at a time per (group, lmq_name).

Storage decides; this module keeps its last answer. Between the start of a takeover and its answer
nothing is delivered. If the answer is lost, the queue stays in transfer until storage has been
read.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from broker_svc.consume.consumer import FeedKey
from broker_svc.consume.deliveries import DeliveryDirectory
from broker_svc.consume.dispatcher import Dispatcher
from broker_svc.exclusive import takeover
from broker_svc.exclusive.takeover import Owned, Owner, State, Transferring, Vacant
from broker_svc.links.partition_link import PartitionLink
from tidemark.api.broker.v1 import subscription_pb2
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.errors import (
    CommitOutcomeUnknown,
    GroupNotFound,
    NotOwner,
    QueueNotFound,
    TidemarkError,
    Unavailable,
)
from tidemark.telemetry import counter

_log = logging.getLogger(__name__)
_takeovers = counter(
    "tidemark.broker.takeovers", description="Exclusive queues that changed their owner"
)


class ExclusiveQueue:
    """One (group, lmq_name) of an exclusive topic."""

    __slots__ = (
        "_forget",
        "_lock",
        "_users",
        "group",
        "lmq_name",
        "partition",
        "state",
        "subscriptions",
    )

    def __init__(self, key: FeedKey, forget: Callable[["ExclusiveQueue"], None]) -> None:
        self.partition, self.lmq_name, self.group = key
        self.state: State = Vacant()
        self.subscriptions = 0
        """Subscribers that consume it: one, or none if the owner is disconnected."""
        self._lock = asyncio.Lock()
        self._users = 0
        self._forget = forget

    @property
    def key(self) -> FeedKey:
        return self.partition, self.lmq_name, self.group

    @property
    def owner(self) -> Owner | None:
        return self.state.owner if isinstance(self.state, Owned) else None

    @asynccontextmanager
    async def lock(self) -> AsyncIterator[None]:
        """Only one task at a time changes the queue or asks storage about it."""
        self._users += 1
        try:
            async with self._lock:
                yield
        finally:
            self._users -= 1
            self.unused()

    def unused(self) -> None:
        """Drop the record once nothing consumes the queue or waits for it: storage has the
        owner."""
        if not self._users and not self.subscriptions and not self.must_read:
            self._forget(self)

    def forget_owner(self) -> None:
        """This broker no longer holds the queue. A task with the lock is notified by its next
        answer."""
        if not self._users:
            self.state = Vacant()
            self.unused()

    @property
    def must_read(self) -> bool:
        """Whether the owner has to be read from storage."""
        return isinstance(self.state, Transferring) and self.state.must_read


class Ownerships:
    """The exclusive queues that are consumed or being taken over."""

    def __init__(
        self,
        links: Mapping[int, PartitionLink],
        dispatcher: Dispatcher,
        directory: DeliveryDirectory,
        on_evicted: Callable[[ExclusiveQueue, Owner], None],
    ) -> None:
        self._links = links
        self._dispatcher = dispatcher
        self._directory = directory
        self._queues: dict[FeedKey, ExclusiveQueue] = {}
        self._on_evicted = on_evicted
        """Called with the owner that lost a queue in a takeover whose answer was lost."""

    def __len__(self) -> int:
        return len(self._queues)

    def find(self, key: FeedKey) -> ExclusiveQueue | None:
        return self._queues.get(key)

    def get(self, key: FeedKey) -> ExclusiveQueue:
        """The record of a queue. Lock it at once: an unlocked, unused record may be dropped."""
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = ExclusiveQueue(key, self._forget)
        return queue

    def unresolved(self, partition: int) -> list[FeedKey]:
        """Queues of a partition with an owner that has to be read from storage."""
        return [
            queue.key
            for queue in self._queues.values()
            if queue.partition == partition and queue.must_read
        ]

    def of_partition(self, partition: int) -> list[FeedKey]:
        return [queue.key for queue in self._queues.values() if queue.partition == partition]

    def partition_left(self, partition: int) -> None:
        """Another broker holds the partition: the owners of its queues are read when it is back."""
        for key in self.of_partition(partition):
            self._queues[key].forget_owner()

    def forget(self, queue: ExclusiveQueue) -> Owner | None:
        """Storage has lost commits, takeovers perhaps; returns the owner until now.

        The caller holds the lock of the queue.
        """
        state = queue.state
        before = state.before if isinstance(state, Transferring) else state
        queue.state = Vacant()
        self._dispatcher.evict(queue.key)
        return before.owner if isinstance(before, Owned) else None

    async def take(
        self,
        queue: ExclusiveQueue,
        client_id: str,
        epoch: int,
        start: subscription_pb2.StartPosition | None,
    ) -> tuple[Owner | None, Owner]:
        """Make a client the owner; returns the owner before and the owner now.

        The caller holds the lock of the queue. `epoch` is the one that this incarnation of the
        client holds, 0 for none: re-subscribing by the owner changes nothing (E7), and another
        incarnation of it gets a new epoch.
        """
        await self.resolve(queue)
        before = queue.owner
        queue.state = takeover.transfer_began(queue.state, client_id)
        self._dispatcher.pause(queue.key)
        operation = exchange_pb2.Operation()
        operation.take_ownership.lmq_name = queue.lmq_name
        operation.take_ownership.group = queue.group
        operation.take_ownership.client_id = client_id
        operation.take_ownership.epoch = epoch
        if start is not None:
            operation.take_ownership.start.CopyFrom(start)
        try:
            taken = (await self._links[queue.partition].call(operation)).ownership
        except NotOwner:  # another broker holds the partition, and reads the owner from storage
            queue.state = Vacant()
            raise
        except (Unavailable, CommitOutcomeUnknown, asyncio.CancelledError):
            queue.state = takeover.outcome_unknown(queue.state)
            raise
        except TidemarkError:
            queue.state = takeover.refused(queue.state)
            self._dispatcher.resume(queue.key)
            raise
        queue.state = takeover.transferred(queue.state, taken.epoch)
        if taken.matched:
            _takeovers.add(1)
        self._revoke(queue, taken)
        return before, queue.state.owner

    async def confirm(
        self, queue: ExclusiveQueue, client_id: str, epoch: int
    ) -> exchange_pb2.OwnershipResult:
        """Compare (client, epoch) with the owner in storage. Never takes ownership (E7)."""
        await self.resolve(queue)
        found = await self._ask(queue, client_id, epoch)
        if found.matched:
            queue.state = takeover.confirmed(queue.state, Owner(client_id, epoch))
        return found

    async def drop(self, queue: ExclusiveQueue, client_id: str, epoch: int) -> None:
        """End the client's ownership under `epoch`, or under any epoch for 0.

        The caller holds the lock. If the owner is unknown, storage is read: the answer to an
        earlier drop may have been lost.
        """
        await self.resolve(queue)
        if queue.owner is None:
            self._learn(queue, await self._ask(queue, "", 0))
        owner = queue.owner
        if owner is None or owner.client_id != client_id or epoch not in (0, owner.epoch):
            return
        operation = exchange_pb2.Operation()
        operation.drop_ownership.lmq_name = queue.lmq_name
        operation.drop_ownership.group = queue.group
        operation.drop_ownership.client_id = owner.client_id
        operation.drop_ownership.epoch = owner.epoch
        try:
            dropped = (await self._links[queue.partition].call(operation)).ownership
        except (QueueNotFound, GroupNotFound):  # a queue that does not exist has no owner
            dropped = exchange_pb2.OwnershipResult()
        self._learn(queue, dropped)
        self._revoke(queue, dropped)
        if not dropped.matched:  # an earlier drop whose answer was lost may have succeeded
            self._revoke_older(queue)

    async def lost(self, queue: ExclusiveQueue, epoch: int) -> Owner | None:
        """Storage has refused the epoch: returns its owner if it lost the ownership.

        The caller holds the lock. Takeovers evict by themselves; this is for ownership that was
        deleted with its queue or group.
        """
        await self.resolve(queue)
        owner = queue.owner
        if owner is None or owner.epoch != epoch:
            return None
        found = await self._ask(queue, owner.client_id, owner.epoch)
        if found.matched:
            return None
        self._learn(queue, found)
        self._revoke_older(queue)
        return owner

    async def resolve(self, queue: ExclusiveQueue) -> None:
        """Read the owner from storage if need be. The caller holds the lock."""
        state = queue.state
        if not isinstance(state, Transferring) or not state.must_read:
            return
        self._learn(queue, await self._ask(queue, "", 0))
        self._revoke_older(queue)
        if queue.state == state.before:
            self._dispatcher.resume(queue.key)
        elif isinstance(state.before, Owned) and queue.owner != state.before.owner:
            self._on_evicted(queue, state.before.owner)
        else:
            self._dispatcher.evict(queue.key)

    def _learn(self, queue: ExclusiveQueue, found: exchange_pb2.OwnershipResult) -> None:
        """Storage was read: the client it names is the owner."""
        # A queue that was deleted and created again has no owner and no epoch.
        known = takeover.epoch_of(queue.state)
        epoch = found.epoch if found.client_id else max(found.epoch, known)
        queue.state = takeover.read(queue.state, found.client_id, epoch)

    def _revoke(self, queue: ExclusiveQueue, ended: exchange_pb2.OwnershipResult) -> None:
        """Drop the deliveries of reservations that storage revoked."""
        for reservation_id in ended.revoked_reservation_ids:
            self._directory.revoked((queue.partition, reservation_id))

    def _revoke_older(self, queue: ExclusiveQueue) -> None:
        """The same if the answer that named them was lost: drop all of earlier epochs."""
        self._directory.revoked_below(queue.key, takeover.epoch_of(queue.state))

    def _forget(self, queue: ExclusiveQueue) -> None:
        if self._queues.get(queue.key) is queue:
            del self._queues[queue.key]

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
        except QueueNotFound:  # a queue that does not exist has no owner
            return exchange_pb2.OwnershipResult(epoch=takeover.epoch_of(queue.state))
