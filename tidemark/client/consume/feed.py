"""A feed: the part of a subscription that one broker serves.

Owns the consumer on the session, its credit, and its subscriptions. After a reconnect it confirms
the queues that it held with the epochs it had and never subscribes again (E7); the subscription is
notified of queues that another client has taken over.
"""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import repeat
from operator import attrgetter
from typing import Final, Protocol

from tidemark.api.broker.v1 import broker_pb2, message_pb2, subscription_pb2
from tidemark.client.consume.buffer import Buffer
from tidemark.client.consume.credit import Credit
from tidemark.client.consume.delivery import DeliveryBatch, PlainDelivery
from tidemark.client.consume.eviction import Eviction, EvictionReason
from tidemark.client.consume.failed_acks import FailedAcks
from tidemark.client.consume.hand_outs import HandOuts, Totals
from tidemark.client.consume.renewals import Renewals
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
_NOT_TRIED: Final = message_pb2.Release()
_RESYNC: Final = subscription_pb2.SUBSCRIPTION_STATE_RESYNC_REQUIRED


class FeedHost(Protocol):
    """The subscription that a feed is part of."""

    buffer: Buffer

    @property
    def has_one_feed(self) -> bool: ...
    def arrived(self, feed: "Feed", batches: Sequence[DeliveryBatch]) -> None: ...
    def renew_sooner(self) -> None: ...
    def interrupted(self, feed: "Feed") -> None: ...
    def unreachable(self, feed: "Feed") -> None: ...
    def lost(self, feed: "Feed", eviction: Eviction) -> None: ...
    def moved(self, feed: "Feed", lmq_name: str, epoch: int, owner: str) -> None: ...
    def also_held(self, lmq_name: str, owners: Iterable[str]) -> None: ...
    def feed_of(self, owner: str) -> "Feed | None": ...
    def failed(self, error: TidemarkError) -> None: ...


class Feed(SessionPart):
    """One consumer of one group on one connection."""

    def __init__(
        self,
        host: FeedHost,
        connection: Connection,
        identity: Identity,
        *,
        group: str,
        credit: int | None,
        visibility_ms: int,
        max_lease_ms: int,
        failed_acks: FailedAcks,
    ) -> None:
        self.connection = connection
        self.epochs: dict[str, int] = {}
        """The subscriptions of this feed: lmq_name and owner epoch, 0 on shared queues."""
        self.settlements = Settlements(
            connection,
            identity,
            self.returned,
            self.returned_whole,
            self._extended,
            self._partition_moved,
            failed_acks,
        )
        self.credit = Credit(credit)
        self.renewals = Renewals(
            identity.clock,
            max_lease_ms=max_lease_ms,
            lapsed=self.settlements.lapse,
            ended=self._ended,
            moved=self._partition_moved,
        )
        self._host = host
        self._identity = identity
        self._group = group
        self._visibility_ms = visibility_ms
        self._held: dict[DeliveryBatch, int] = {}
        """Batches that arrived, with the number of their unsettled messages."""
        self._unsettled = 0
        """The number of all these messages."""
        self.hand_outs = HandOuts()
        self._consumer_id = 0
        self._session: Session | None = None
        self._syncing = asyncio.Lock()
        self._backoff = Backoff(identity.random, may_move=True)
        self._resyncing: asyncio.Task[None] | None = None
        self._leaving = False
        self.paused = False
        """Whether the application takes nothing: it gets no more messages until it asks again."""
        self._stopped = False
        """Whether the broker knows that."""

    # --- subscriptions -------------------------------------------------------------------------

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

    def stop(self) -> None:
        """Stop deliveries: messages given back from now on are for other consumers."""
        self._leaving = True
        if self._session is not None and self._consumer_id:
            with suppress(TidemarkError):
                self._session.stop_consumer(self._consumer_id)

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
        """End the consumer at once, also while it is leaving: nothing more is received or sent."""
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
                await self._identity.clock.sleep_ms(wait_ms)

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
                    self._host.moved(self, result.lmq_name, epoch, error.metadata["owner"])
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
        """The queue belongs to another client."""
        if self.epochs.pop(lmq_name, None) is not None:
            eviction = Eviction(lmq_name, self._group, epoch, EvictionReason.of(state))
            self._host.lost(self, eviction)

    # --- deliveries and credit -----------------------------------------------------------------

    def take(self, delivery: message_pb2.Delivery) -> None:
        """Called by the session for each delivery."""
        session = self._session
        assert session is not None, "deliveries come on a session"
        now_ms = self._identity.clock.monotonic_ms()
        batch = DeliveryBatch(delivery, self.settlements, session.welcome.session_id, now_ms)
        self._arrived((batch,), now_ms)

    def take_array(self, deliveries: message_pb2.DeliveryArray) -> None:
        """Called by the session for deliveries in columns."""
        session = self._session
        assert session is not None, "deliveries come on a session"
        now_ms = self._identity.clock.monotonic_ms()
        session_id, settlements = session.welcome.session_id, self.settlements
        columns = zip(
            repeat(deliveries.group, len(deliveries.delivery_tags)),
            deliveries.delivery_tags,
            deliveries.receipts,
            deliveries.lmq_names,
            deliveries.first_offsets,
            deliveries.counts,
            deliveries.bodies,
            deliveries.visibility_ms,
            deliveries.publish_times_ms,
            deliveries.partitions,
            deliveries.epochs,
            strict=True,
        )
        batches = [
            DeliveryBatch(delivery, settlements, session_id, now_ms)
            for delivery in map(PlainDelivery._make, columns)
        ]
        self._arrived(batches, now_ms)

    def _arrived(self, batches: Sequence[DeliveryBatch], now_ms: int) -> None:
        messages = self.hand_outs.arrived(*batches)
        self._held.update((batch, batch.count) for batch in batches)
        self._unsettled += messages
        self.credit.used(messages)
        soonest = min(batches, key=attrgetter("visibility_ms"))
        if self.renewals.watch(soonest, now_ms):
            self._host.renew_sooner()
        self._host.arrived(self, batches)

    def hand_outs_noted(self, report: broker_pb2.HandOuts) -> None:
        """Called by the session: the broker has confirmed a report."""
        totals = Totals(report.messages, report.deliveries, report.first_attempts)
        self.hand_outs.confirmed(report.number, totals, self._identity.clock.monotonic_ns())
        self._host.buffer.wake_up()

    def deliveries_ended(self, tags: set[int]) -> None:
        """Called by the session: storage ended these, whatever the clock here shows."""
        assert self._session is not None, "notices come on a session"
        session_id = self._session.welcome.session_id
        self._drop(
            {each for each in self._held if each.tag in tags and each.session_id == session_id}
        )

    def end(self, error: TidemarkError) -> None:
        """Called by the session when it ends; `disconnected` does the work."""

    def returned(self, batch: DeliveryBatch, messages: int) -> None:
        """Messages are settled or gone: they no longer use up credit."""
        left = self._held.get(batch)
        if left is None:
            return
        if left > messages:
            self._held[batch] = left - messages
        else:
            del self._held[batch]
        self._unsettled -= min(left, messages)

    def returned_whole(self, batches: Iterable[DeliveryBatch]) -> None:
        """The same for all that is left of batches."""
        for batch in batches:
            self._unsettled -= self._held.pop(batch, 0)

    def expire(self, now_ms: int) -> None:
        """Drop batches whose reservation has expired: their handlers may never settle them."""
        self.settlements.expire(now_ms)
        for batch, left in list(self._held.items()):
            if batch.deadline_ms <= now_ms:
                self.returned(batch, left)
                self.connection.wake()

    def renew(self, now_ms: int) -> None:
        """Renew the reservations of messages that wait here or are being handled."""
        if self.renewals.run_once(self._held, now_ms):
            self.connection.wake()

    def check_hand_outs(self) -> None:
        """Take back what was reported ahead of a handler that has become slow. Called regularly."""
        if self.hand_outs.run_once(*self._waiting()):
            self.connection.wake()

    def _extended(self, batch: DeliveryBatch, now_ms: int) -> None:
        """The application gave a reservation another deadline, perhaps an earlier one."""
        if self.renewals.watch(batch, now_ms):
            self._host.renew_sooner()

    def _ended(self, batch: DeliveryBatch) -> None:
        """A reservation is gone."""
        self._drop({batch})

    def _drop(self, gone: set[DeliveryBatch]) -> None:
        """Hand out none of the messages that wait here any more."""
        self._host.buffer.remove(gone.__contains__)
        for batch in gone:
            self.returned(batch, batch.count)
        self.connection.wake()

    def give_back(self, batch: DeliveryBatch, action: Action, start: int = 0) -> None:
        """Settle the rest of a batch from `start` on, if it is one of this feed."""
        if self.holds(batch):
            self.settlements.give_back(batch, action, start)

    def holds(self, batch: DeliveryBatch) -> bool:
        """Whether it came by this feed and is not settled."""
        return batch in self._held

    @property
    def is_connected(self) -> bool:
        return self._session is not None

    @property
    def batches(self) -> list[DeliveryBatch]:
        """Batches that arrived and are not settled."""
        return list(self._held)

    def _partition_moved(self, partition: int, owner: str) -> Settlements | None:
        """Another broker serves a partition: it renews and settles the deliveries of it."""
        other = self._host.feed_of(owner) if owner else None
        if other is None or other is self:
            return None
        self.pass_on(partition, other)
        return other.settlements

    def pass_on(self, partition: int | None, other: "Feed") -> None:
        """Pass the deliveries of a partition, or of all, to the feed of another broker.

        That broker knows nothing of the hand-outs here: what waits in the buffer goes back.
        """
        passed = [each for each in self._held if partition in (None, each.partition)]
        for batch in self._host.buffer.remove(set(passed).__contains__):
            self.settlements.give_back(batch, _NOT_TRIED, batch.handed_out)
        now_ms = self._identity.clock.monotonic_ms()
        for batch in passed:
            left = self._held.pop(batch)
            self._unsettled -= left
            other._held[batch] = left
            other._unsettled += left
            batch.settle_by(other.settlements)
            self.renewals.pass_on(batch, other.renewals, now_ms)
        self.settlements.pass_on(partition, other.settlements)
        self._host.buffer.wake_up()  # the first batch may be another one now
        self._host.renew_sooner()

    # --- the connection ------------------------------------------------------------------------

    def prepare(self, session: Session) -> bool:
        more = self.settlements.prepare(session)
        more = self.renewals.prepare(session) or more
        if self._leaving:
            return more
        self._prepare_credit(session)
        report = self.hand_outs.report(*self._waiting(), self._identity.clock.monotonic_ns())
        if report is not None:
            session.report_hand_outs(
                broker_pb2.HandOuts(
                    consumer_id=self._consumer_id,
                    number=report.number,
                    urgent=report.urgent,
                    **report.totals._asdict(),
                )
            )
        return more

    def _prepare_credit(self, session: Session) -> None:
        if not self.paused:
            granted = self._grant()
            if granted or self._stopped:
                session.give_credit(self._consumer_id, granted)
        elif not self._stopped:
            session.stop_consumer(self._consumer_id)
        self._stopped = self.paused

    def _grant(self) -> int:
        buffer = self._host.buffer
        waiting = buffer.waiting_for_one + buffer.waiting_for_batch
        return self.credit.grant(self._unsettled, buffer.messages, waiting)

    def _waiting(self) -> tuple[int, int]:
        """Tasks that wait for a message or a batch, where those can only come from this feed.

        With several feeds, each would report the same tasks ahead, and a client that is killed
        would be charged for messages of all of them.
        """
        buffer = self._host.buffer
        return (
            (buffer.waiting_for_one, buffer.waiting_for_batch)
            if self._host.has_one_feed
            else (0, 0)
        )

    def connected(self, session: Session) -> None:
        self._session = session
        self._consumer_id = 0
        self.hand_outs = HandOuts()
        self.credit.reset()
        self._stopped = False
        if self._leaving:
            session.wake()
            return  # it only sends the settlements that are left
        self._consumer_id = session.open_taker(
            self,
            self._group,
            credit=0 if self.paused else self._grant(),
            visibility_ms=self._visibility_ms,
            reports_hand_outs=True,
            takes_arrays=True,
        )
        self._start_resync()

    def disconnected(self, error: TidemarkError) -> None:
        self._session = None
        self._host.interrupted(self)

    def unreachable(self, error: TidemarkError) -> None:
        self._host.unreachable(self)

    def failed(self, error: TidemarkError) -> None:
        self._host.failed(error)

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
            return  # another group's, or sent before this client took the queue (back)
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
                self._host.moved(self, lmq_name, epoch, go_away.address)
        self._partition_moved(go_away.partition, go_away.address)
        self._start_resync()  # it finds the new broker where the address is not known

    def session_error(self, error: broker_pb2.SessionError) -> None:
        if error.consumer_id == self._consumer_id:
            self._host.failed(from_status(error.error))
