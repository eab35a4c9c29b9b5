"""A feed: the part of a subscription that one broker serves.

Owns the consumer on the session, its credit, and what is subscribed there. After a reconnect it
confirms what it held with the epochs it had and never subscribes again (E7); what was taken by
another client meanwhile is lost, and said so.
"""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Final, Protocol

from tidemark.api.broker.v1 import broker_pb2, message_pb2, subscription_pb2
from tidemark.client.consume.delivery import DeliveryBatch
from tidemark.client.consume.eviction import Eviction, EvictionReason
from tidemark.client.consume.failed_acks import FailedAcks
from tidemark.client.consume.settlements import Settlements
from tidemark.client.transport.backoff import Backoff, is_transient
from tidemark.client.transport.codec import Action
from tidemark.client.transport.connection import Connection, Identity, SessionPart
from tidemark.client.transport.session import Session
from tidemark.errors import NotOwner, TidemarkError
from tidemark.names import partition_of
from tidemark.rpc.statuses import from_status

_ADD: Final = subscription_pb2.SYNC_MODE_PARTIAL_ADD
_REMOVE: Final = subscription_pb2.SYNC_MODE_PARTIAL_REMOVE
_CONFIRM: Final = subscription_pb2.SYNC_MODE_COMPLETE_ADD
_ACTIVE: Final = subscription_pb2.SUBSCRIPTION_STATE_ACTIVE
_RESYNC: Final = subscription_pb2.SUBSCRIPTION_STATE_RESYNC_REQUIRED


class Owner(Protocol):
    """The subscription that a feed is part of."""

    def arrived(self, feed: "Feed", batch: DeliveryBatch) -> None: ...
    def interrupted(self, feed: "Feed") -> None: ...
    def lost(self, feed: "Feed", eviction: Eviction) -> None: ...
    def moved(self, feed: "Feed", lmq_name: str, epoch: int, owner: str) -> None: ...
    def failed(self, error: TidemarkError) -> None: ...


class Feed(SessionPart):
    """One consumer of one group on one connection."""

    def __init__(
        self,
        owner: Owner,
        connection: Connection,
        identity: Identity,
        *,
        group: str,
        credit: int,
        visibility_ms: int,
        failed_acks: FailedAcks,
    ) -> None:
        self.connection = connection
        self.epochs: dict[str, int] = {}
        """What is subscribed here: lmq_name and owner epoch, 0 on shared queues."""
        self.settlements = Settlements(connection, identity, self.returned, failed_acks)
        self._owner = owner
        self._identity = identity
        self._group = group
        self._credit = credit
        self._visibility_ms = visibility_ms
        self._held: dict[DeliveryBatch, int] = {}
        """What arrived, and how many messages of it are not settled: they use up credit."""
        self._to_give = 0
        self._consumer_id = 0
        self._session: Session | None = None
        self._syncing = asyncio.Lock()
        self._backoff = Backoff(identity.random)
        self._resyncing: asyncio.Task[None] | None = None
        self._leaving = False

    # --- subscriptions -------------------------------------------------------------------------

    async def subscribe(
        self, lmq_names: Iterable[str], session: Session
    ) -> dict[str, TidemarkError]:
        """Ask for queues, as the user did; returns why some of them can not be had."""
        refused: dict[str, TidemarkError] = {}
        async with self._syncing:
            for result in await self._sync(session, _ADD, dict.fromkeys(lmq_names, 0)):
                if result.HasField("error"):
                    refused[result.lmq_name] = from_status(result.error)
                else:
                    self.epochs[result.lmq_name] = result.epoch
        return refused

    async def leave(self) -> None:
        """Leave every queue, once what is being settled has its answers."""
        session = self._session
        self._leaving = True
        if self._resyncing is not None:
            self._resyncing.cancel()
        if session is not None and session.ended is None:
            with suppress(TidemarkError):
                await self.settlements.flush()
                if self.epochs:
                    async with self._syncing:
                        await self._sync(session, _REMOVE, self.epochs)
                await self.settlements.flush()  # what arrived meanwhile

    def close(self) -> None:
        """End the consumer, however far it came with leaving: nothing is taken or said any more."""
        self._leaving = True
        if self._resyncing is not None:
            self._resyncing.cancel()
        if self._session is not None and self._consumer_id:
            with suppress(TidemarkError):  # the session has ended: its consumers with it
                self._session.close_consumer(self._consumer_id)
        self.settlements.close()
        self.connection.detach(self)

    async def _sync(
        self, session: Session, mode: subscription_pb2.SyncMode.ValueType, epochs: dict[str, int]
    ) -> list[subscription_pb2.SubscriptionResult]:
        sync = subscription_pb2.SubscriptionSync(
            group=self._group, mode=mode, consumer_id=self._consumer_id
        )
        for lmq_name, epoch in epochs.items():
            sync.entries.add(lmq_name=lmq_name, epoch=epoch)
        return list((await session.sync(sync)).results)

    async def _resync(self, session: Session) -> None:
        """Confirm what was held, until each queue is confirmed, lost or moved."""
        with suppress(TidemarkError):  # the session is gone: the next one begins anew
            while self.epochs and self._session is session:
                async with self._syncing:
                    passing = self._heard(await self._sync(session, _CONFIRM, self.epochs))
                if passing is None:
                    self._backoff.reset()
                    return
                wait_ms = self._backoff.next_ms(passing.retry_after_ms or 0)
                await self._identity.clock.sleep_ms(wait_ms)

    def _heard(
        self, results: Iterable[subscription_pb2.SubscriptionResult]
    ) -> TidemarkError | None:
        """Take the results of a resync; returns why it must be repeated."""
        again: TidemarkError | None = None
        for result in results:
            epoch = self.epochs.get(result.lmq_name)
            if epoch is None:
                continue
            if result.HasField("error"):
                error = from_status(result.error)
                if isinstance(error, NotOwner) and error.metadata.get("owner"):
                    del self.epochs[result.lmq_name]
                    self._owner.moved(self, result.lmq_name, epoch, error.metadata["owner"])
                elif is_transient(error):
                    again = error
                else:
                    del self.epochs[result.lmq_name]
                    self._owner.failed(error)
            elif result.state != _ACTIVE:
                self._lose(result.lmq_name, result.epoch, result.state)
        return again

    def take_over(self, lmq_name: str, epoch: int) -> None:
        """A queue moved to the broker of this feed."""
        self.epochs[lmq_name] = epoch
        self._start_resync()

    def _start_resync(self) -> None:
        if self._session is not None and self.epochs and not self._leaving:
            if self._resyncing is not None:
                self._resyncing.cancel()
            self._resyncing = asyncio.create_task(self._resync(self._session))

    def _lose(
        self, lmq_name: str, epoch: int, state: subscription_pb2.SubscriptionState.ValueType
    ) -> None:
        """The queue is reported, confirmed and subscribed to no longer."""
        if self.epochs.pop(lmq_name, None) is not None:
            eviction = Eviction(lmq_name, self._group, epoch, EvictionReason.of(state))
            self._owner.lost(self, eviction)

    # --- deliveries and credit -----------------------------------------------------------------

    def take(self, delivery: message_pb2.Delivery) -> None:
        """Called by the session for each delivery."""
        session = self._session
        assert session is not None, "deliveries come on a session"
        now_ms = self._identity.clock.monotonic_ms()
        batch = DeliveryBatch(delivery, self.settlements, session.welcome.session_id, now_ms)
        self._held[batch] = batch.count
        self._owner.arrived(self, batch)

    def end(self, error: TidemarkError) -> None:
        """Called by the session when it ends; the connection says the same."""

    def returned(self, batch: DeliveryBatch, messages: int) -> None:
        """Messages are no longer held here: as many more may come."""
        left = self._held.get(batch)
        if left is None:
            return
        if left > messages:
            self._held[batch] = left - messages
        else:
            del self._held[batch]
        self._to_give += min(left, messages)

    def expire(self, now_ms: int) -> None:
        """What ran out unsettled is held no longer: its handler may never come back to it."""
        self.settlements.expire(now_ms)
        for batch, left in list(self._held.items()):
            if batch.deadline_ms <= now_ms:
                self.returned(batch, left)
        if self._to_give:
            self.connection.wake()

    def give_back(self, batch: DeliveryBatch, action: Action, start: int = 0) -> None:
        """Settle what is left of a batch from `start` on, if it is one of this feed."""
        if self.holds(batch):
            self.settlements.give_back(batch, action, start)

    def holds(self, batch: DeliveryBatch) -> bool:
        """Whether it came by this feed and is not settled."""
        return batch in self._held

    @property
    def batches(self) -> list[DeliveryBatch]:
        """What arrived and is not settled."""
        return list(self._held)

    # --- the connection ------------------------------------------------------------------------

    def prepare(self, session: Session) -> bool:
        more = self.settlements.prepare(session)
        if self._to_give and not self._leaving:
            session.give_credit(self._consumer_id, self._to_give)
            self._to_give = 0
        return more

    def connected(self, session: Session) -> None:
        self._session = session
        self._to_give = 0
        self._consumer_id = 0
        if self._leaving:
            return  # only what was settled still has to be said
        self._consumer_id = session.open_taker(
            self,
            self._group,
            credit=max(0, self._credit - sum(self._held.values())),
            visibility_ms=self._visibility_ms,
        )
        self._start_resync()

    def disconnected(self, error: TidemarkError) -> None:
        self._session = None
        self._owner.interrupted(self)

    def failed(self, error: TidemarkError) -> None:
        self._owner.failed(error)

    def held(self) -> broker_pb2.HeldSubscriptions | None:
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
            return  # not ours, or said before we took it (back)
        if notice.state == _RESYNC:
            self._start_resync()
        else:
            self._lose(notice.lmq_name, notice.epoch, notice.state)

    def moved(self, go_away: broker_pb2.GoAway) -> None:
        if not go_away.HasField("partition") or self._session is None or self._leaving:
            return
        partitions = self._session.welcome.partitions
        for lmq_name, epoch in list(self.epochs.items()):
            if partition_of(lmq_name, partitions) == go_away.partition and go_away.address:
                del self.epochs[lmq_name]
                self._owner.moved(self, lmq_name, epoch, go_away.address)
        self._start_resync()  # if it is not known where to, that is asked

    def session_error(self, error: broker_pb2.SessionError) -> None:
        if error.consumer_id == self._consumer_id:
            self._owner.failed(from_status(error.error))
