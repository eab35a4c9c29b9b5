"""The queues of a feed: which ones it is subscribed to at its broker, and under which epochs.

After a reconnect it confirms the queues that it held with the epochs it had and never subscribes
again (E7); the subscription is notified of queues that another client has taken over, or that have
moved to another broker.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, Protocol

from tidemark.api.broker.v1 import broker_pb2, subscription_pb2
from tidemark.client.consume.eviction import Eviction, EvictionReason
from tidemark.client.transport.backoff import Backoff, is_transient
from tidemark.client.transport.connection import Identity
from tidemark.client.transport.session import Session
from tidemark.errors import NotOwner, TidemarkError
from tidemark.names import partition_of
from tidemark.rpc.statuses import from_status

_ADD: Final = subscription_pb2.SYNC_MODE_PARTIAL_ADD
_REMOVE: Final = subscription_pb2.SYNC_MODE_PARTIAL_REMOVE
_CONFIRM: Final = subscription_pb2.SYNC_MODE_COMPLETE_ADD
_ACTIVE: Final = subscription_pb2.SUBSCRIPTION_STATE_ACTIVE
_RESYNC: Final = subscription_pb2.SUBSCRIPTION_STATE_RESYNC_REQUIRED


class QueuesHost(Protocol):
    """The subscription that the queues are part of."""

    def moved(self, lmq_name: str, epoch: int, owner: str) -> None: ...
    def also_held(self, lmq_name: str, owners: Iterable[str]) -> None: ...
    def failed(self, error: TidemarkError) -> None: ...


class FeedQueues:
    """The subscriptions of one consumer of one group on one connection."""

    def __init__(
        self,
        host: QueuesHost,
        identity: Identity,
        group: str,
        lost: Callable[[Eviction], None],
    ) -> None:
        """`lost` is called for a queue that belongs to another client."""
        self.epochs: dict[str, int] = {}
        """lmq_name and owner epoch, 0 on shared queues."""
        self._host = host
        self._clock = identity.clock
        self._group = group
        self._lost = lost
        self._session: Session | None = None
        self._consumer_id = 0
        self._syncing = asyncio.Lock()
        self._backoff = Backoff(identity.random, may_move=True)
        self._resyncing: asyncio.Task[None] | None = None
        self._leaving = False

    # --- the life of the feed ------------------------------------------------------------------

    def connected(self, session: Session, consumer_id: int) -> None:
        """Confirm the queues by the consumer of a new session."""
        self._session, self._consumer_id = session, consumer_id
        self.start_resync()

    def disconnected(self) -> None:
        self._session = None

    def stop(self) -> None:
        """Confirm no more queues, and report none as held."""
        self._leaving = True

    def close(self) -> None:
        """The same, and end a resync that is under way."""
        self._leaving = True
        if self._resyncing is not None:
            self._resyncing.cancel()

    # --- requests ------------------------------------------------------------------------------

    async def subscribe(
        self, lmq_names: Iterable[str], session: Session
    ) -> dict[str, TidemarkError]:
        """Subscribe to queues for the user; returns the refusals."""
        refused: dict[str, TidemarkError] = {}
        async with self._syncing:
            for result in await self._sync(session, _ADD, dict.fromkeys(lmq_names, 0)):
                if result.HasField("error"):
                    refused[result.lmq_name] = from_status(result.error)
                else:
                    self.epochs[result.lmq_name] = result.epoch
                    self._host.also_held(result.lmq_name, result.other_holders)
        return refused

    async def unsubscribe_all(self, session: Session) -> None:
        if self.epochs:
            async with self._syncing:
                await self._sync(session, _REMOVE, self.epochs)

    def take_over(self, lmq_name: str, epoch: int) -> None:
        """A queue moved to the broker of this feed."""
        self.epochs[lmq_name] = epoch
        self.start_resync()

    def start_resync(self) -> None:
        if self._session is not None and self.epochs and not self._leaving:
            if self._resyncing is not None:
                self._resyncing.cancel()
            self._resyncing = asyncio.create_task(self._resync(self._session))

    async def _resync(self, session: Session) -> None:
        """Confirm the held queues, until each is confirmed, lost or moved."""
        with suppress(TidemarkError):  # the session is gone: the next one resyncs from the start
            while self.epochs and self._session is session:
                async with self._syncing:
                    results = await self._sync(session, _CONFIRM, self.epochs)
                    transient = self._apply_resync(results)
                if transient is None:
                    self._backoff.reset()
                    return
                wait_ms = self._backoff.next_ms(transient.retry_after_ms or 0)
                await self._clock.sleep_ms(wait_ms)

    def _apply_resync(
        self, results: Iterable[subscription_pb2.SubscriptionResult]
    ) -> TidemarkError | None:
        """Apply the results of a resync; returns why it must be repeated."""
        again: TidemarkError | None = None
        for result in results:
            epoch = self.epochs.get(result.lmq_name)
            if epoch is None:
                continue
            if result.HasField("error"):
                error = from_status(result.error)
                if isinstance(error, NotOwner) and error.metadata.get("owner"):
                    del self.epochs[result.lmq_name]
                    self._host.moved(result.lmq_name, epoch, error.metadata["owner"])
                elif is_transient(error):
                    again = error
                else:
                    del self.epochs[result.lmq_name]
                    self._host.failed(error)
            elif result.state != _ACTIVE:
                self._lose(result.lmq_name, result.epoch, result.state)
            else:
                self._host.also_held(result.lmq_name, result.other_holders)
        return again

    async def _sync(
        self, session: Session, mode: subscription_pb2.SyncMode.ValueType, epochs: dict[str, int]
    ) -> list[subscription_pb2.SubscriptionResult]:
        sync = subscription_pb2.SubscriptionSync(
            group=self._group, mode=mode, consumer_id=self._consumer_id
        )
        for lmq_name, epoch in epochs.items():
            sync.entries.add(lmq_name=lmq_name, epoch=epoch)
        return list((await session.sync(sync)).results)

    # --- notices of the broker -----------------------------------------------------------------

    def held(self) -> broker_pb2.HeldSubscriptions | None:
        """The exclusive queues that a heartbeat reports; None if there are none."""
        owned = {name: epoch for name, epoch in self.epochs.items() if epoch}
        if not owned or self._leaving:
            return None
        held = broker_pb2.HeldSubscriptions(group=self._group)
        for lmq_name, epoch in owned.items():
            held.entries.add(lmq_name=lmq_name, epoch=epoch)
        return held

    def unsubscribed(self, notice: subscription_pb2.UnsubscribeNotice) -> None:
        if self._leaving:
            return
        epoch = self.epochs.get(notice.lmq_name)
        if notice.group != self._group or epoch is None or 0 < notice.epoch <= epoch:
            return  # another group's, or sent before this client took the queue (back)
        if notice.state == _RESYNC:
            self.start_resync()
        else:
            self._lose(notice.lmq_name, notice.epoch, notice.state)

    def partition_moved(self, partition: int, address: str, partitions: int) -> None:
        """Pass queues of a partition to the broker at the address, if that is known."""
        for lmq_name, epoch in list(self.epochs.items()):
            if partition_of(lmq_name, partitions) == partition and address:
                del self.epochs[lmq_name]
                self._host.moved(lmq_name, epoch, address)

    def _lose(
        self, lmq_name: str, epoch: int, state: subscription_pb2.SubscriptionState.ValueType
    ) -> None:
        """The queue belongs to another client."""
        if self.epochs.pop(lmq_name, None) is not None:
            self._lost(Eviction(lmq_name, self._group, epoch, EvictionReason.of(state)))
