"""A feed: the part of a subscription that one broker serves.

Owns the consumer on the session, its credit, and the deliveries that it has received and not
settled. `feed_queues` has its queues.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import repeat
from operator import attrgetter
from typing import Final, Protocol

from tidemark.api.broker.v1 import broker_pb2, message_pb2, subscription_pb2
from tidemark.client.consume.buffer import Buffer
from tidemark.client.consume.credit import Credit
from tidemark.client.consume.delivery import DeliveryBatch
from tidemark.client.consume.eviction import Eviction
from tidemark.client.consume.failed_acks import FailedAcks
from tidemark.client.consume.feed_queues import FeedQueues, QueuesHost
from tidemark.client.consume.hand_outs import HandOuts, Totals
from tidemark.client.consume.plain_delivery import PlainDelivery
from tidemark.client.consume.renewals import Renewals
from tidemark.client.consume.settlements import Settlements
from tidemark.client.transport.codec import Action
from tidemark.client.transport.connection import Connection, Identity, SessionPart
from tidemark.client.transport.session import Session
from tidemark.errors import TidemarkError
from tidemark.rpc.statuses import from_status

_NOT_TRIED: Final = message_pb2.Release()


class FeedHost(QueuesHost, Protocol):
    """The subscription that a feed is part of."""

    buffer: Buffer

    @property
    def has_one_feed(self) -> bool: ...
    def arrived(self, feed: "Feed", batches: Sequence[DeliveryBatch]) -> None: ...
    def renew_sooner(self) -> None: ...
    def interrupted(self, feed: "Feed") -> None: ...
    def unreachable(self, feed: "Feed") -> None: ...
    def lost(self, feed: "Feed", eviction: Eviction) -> None: ...
    def feed_of(self, owner: str) -> "Feed | None": ...


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
        self.queues = FeedQueues(host, identity, group, self._lost)
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
        self._leaving = False
        self.paused = False
        """Whether the application takes nothing: it gets no more messages until it asks again."""
        self._stopped = False
        """Whether that was sent to the broker."""

    # --- ending --------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop deliveries: messages given back from now on are for other consumers.

        One that holds nothing leaves its queues at once. To stop it before would have the broker
        recall what waits for it in each queue.
        """
        self._leaving = True
        self.queues.stop()
        idle = not self._held and self.settlements.quiet
        if self._session is not None and self._consumer_id and not idle:
            with suppress(TidemarkError):
                self._session.stop_consumer(self._consumer_id)

    async def leave(self) -> None:
        """Leave every queue, once all pending settlements are answered."""
        session = self._session
        self._leaving = True
        self.queues.close()
        if session is not None and session.ended is None:
            with suppress(TidemarkError):
                await self.settlements.flush()
                await self.queues.unsubscribe_all(session)
                await self.settlements.flush()  # settlements that arrived meanwhile

    def close(self) -> None:
        """End the consumer at once, also while it is leaving: nothing more is received or sent."""
        self._leaving = True
        self.queues.close()
        if self._session is not None and self._consumer_id:
            with suppress(TidemarkError):  # the session has ended: its consumers with it
                self._session.close_consumer(self._consumer_id)
        self.settlements.close()
        self.connection.detach(self)

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
        """Take back reports ahead of a handler that has become slow. Called regularly."""
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

        That broker has no record of the hand-outs here: messages in the buffer go back.
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
            self.queues.connected(session, 0)
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
        self.queues.connected(session, self._consumer_id)

    def disconnected(self, error: TidemarkError) -> None:
        self._session = None
        self.queues.disconnected()
        self._host.interrupted(self)

    def unreachable(self, error: TidemarkError) -> None:
        self._host.unreachable(self)

    def _lost(self, eviction: Eviction) -> None:
        self._host.lost(self, eviction)

    def failed(self, error: TidemarkError) -> None:
        self._host.failed(error)

    def held(self) -> broker_pb2.HeldSubscriptions | None:
        return self.queues.held()

    def unsubscribed(self, notice: subscription_pb2.UnsubscribeNotice) -> None:
        self.queues.unsubscribed(notice)

    def moved(self, go_away: broker_pb2.GoAway) -> None:
        if not go_away.HasField("partition") or self._session is None or self._leaving:
            return
        partition, address = go_away.partition, go_away.address
        self.queues.partition_moved(partition, address, self._session.welcome.partitions)
        self._partition_moved(partition, address)
        self.queues.start_resync()  # it finds the new broker where the address is not known

    def session_error(self, error: broker_pb2.SessionError) -> None:
        if error.consumer_id == self._consumer_id:
            self._host.failed(from_status(error.error))
