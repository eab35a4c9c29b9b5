"""Clients as they are: they stall, ignore notices, come back with stale state, and record it all.

The same clients run against a simulated cluster and against real processes. A client believes what
it was last told and forgets nothing: deliveries of an earlier life are settled by their receipts.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from tests.model.histories.history import (
    ASKS,
    By,
    Delivered,
    Disturbed,
    History,
    Outcome,
    Owned,
    Published,
    Settled,
)
from tests.support.exclusive_clients import ACTIVE, ADD, REMOVE, RESYNC
from tests.support.session import Consumer, Session, batch_of
from tidemark.api.broker.v1 import broker_pb2
from tidemark.api.broker.v1.message_pb2 import Ack, Delivery, Nack, PublishRun, Release
from tidemark.api.broker.v1.subscription_pb2 import (
    SubscriptionEntry,
    SubscriptionResult,
    SubscriptionSync,
    UnsubscribeNotice,
)
from tidemark.client.transport.codec import Action, settlement_of
from tidemark.clock import Clock
from tidemark.errors import (
    CommitOutcomeUnknown,
    DeadlineExceeded,
    NotOwner,
    TidemarkError,
    Unavailable,
)
from tidemark.names import partition_of
from tidemark.rpc import from_status

PLENTY: Final = 10_000
_UNKNOWN = (Unavailable, CommitOutcomeUnknown, NotOwner, DeadlineExceeded)


class Cluster(Protocol):
    """What clients need to reach a broker."""

    @property
    def clock(self) -> Clock: ...

    @property
    def partitions(self) -> int: ...

    def place(self, queue: str) -> str:
        """Where a client asks for a queue now; it need not be where the queue is."""

    async def connect(self, client_id: str, place: str) -> Session: ...

    def stub(self, place: str) -> Any:
        """The calls of `BrokerServiceStub`."""


@dataclass(slots=True, eq=False)
class Held:
    """A delivery that the client has not forgotten."""

    delivery: Delivery
    session: Session | None
    """Where its tag is good; elsewhere its receipt is."""
    first: int = 0
    """Messages before this one are settled."""


class Client:
    """What unary clients and those with a session have in common."""

    def __init__(
        self, name: str, cluster: Cluster, history: History, chance: random.Random, *, deaf: bool
    ) -> None:
        self.name = name
        self.held: list[Held] = []
        self._cluster = cluster
        self._history = history
        self._chance = chance
        self._deaf = deaf
        self._epochs: dict[str, int] = {}

    @property
    def now_ms(self) -> int:
        return self._cluster.clock.monotonic_ms()

    # --- what it does --------------------------------------------------------------------------

    async def subscribe(self, queue: str) -> bool:
        """Take a queue; returns whether the broker confirmed it."""
        self._history.add(Disturbed(self.now_ms, ASKS, self.name, queue))
        began = self._history.now
        entries = [SubscriptionEntry(lmq_name=queue)]
        (result,) = await self.sync(self._cluster.place(queue), ADD, entries)
        if result.HasField("error"):
            return False
        self._owns(result, began, By.SUBSCRIBED)
        return True

    async def resync(self) -> None:
        """Report everything that it believes to own."""
        self._history.add(Disturbed(self.now_ms, "resyncs", self.name))
        for place, believed in self._believed().items():
            began = self._history.now
            entries = [
                SubscriptionEntry(lmq_name=queue, epoch=epoch) for queue, epoch in believed.items()
            ]
            for result in await self.sync(place, RESYNC, entries):
                if result.state == ACTIVE:
                    self._owns(result, began, By.CONFIRMED)
                elif not result.HasField("error") and not self._deaf:
                    self._epochs.pop(result.lmq_name, None)

    async def unsubscribe(self, queue: str) -> None:
        self._history.add(Disturbed(self.now_ms, "unsubscribes", self.name, queue))
        await self.sync(self._cluster.place(queue), REMOVE, [SubscriptionEntry(lmq_name=queue)])
        self._epochs.pop(queue, None)

    async def settle_one(self) -> None:
        """Settle something, or a part of it, whether it still may or not."""
        if self.held:
            await self.settle(self._chance.choice(self.held), self._some_action(), whole=False)

    async def settle(self, held: Held, action: Action, *, whole: bool = True) -> None:
        delivery, first = held.delivery, held.first
        last = delivery.count if whole else self._chance.randint(first + 1, delivery.count)
        began = self._history.now
        outcome = await self._settled(held, action, first, last)
        for message in delivery.batch.messages[first:last]:
            self._history.add(
                Settled(
                    self.now_ms,
                    began,
                    self.name,
                    delivery.lmq_name,
                    int(message.payload),
                    delivery.epoch,
                    delivery.delivery_count,
                    isinstance(action, Ack),
                    outcome,
                )
            )
        # An accepted settlement is sometimes repeated, as by clients that have not got the answer.
        if outcome is Outcome.ACCEPTED and (whole or self._chance.random() < 0.9):
            held.first = max(held.first, last)
        if (held.first == delivery.count or outcome is Outcome.REFUSED) and held in self.held:
            self.held.remove(held)

    async def heartbeat(self) -> None:
        raise NotImplementedError

    async def sync(
        self, place: str, mode: Any, entries: Sequence[SubscriptionEntry]
    ) -> Sequence[SubscriptionResult]:
        raise NotImplementedError

    async def leave(self) -> None:
        raise NotImplementedError

    async def _settle(self, held: Held, action: Action, first: int, last: int) -> None:
        """Raises why it was refused."""
        await self._settle_by_receipt(held, action, first, last)

    # --- what it is told -----------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        raise NotImplementedError

    def _owns(self, result: SubscriptionResult, began: int, by: By) -> None:
        queue, epoch = result.lmq_name, result.epoch
        self._epochs[queue] = epoch
        self._history.add(Owned(self.now_ms, began, self.name, queue, epoch, by, waits=self.waits))

    def _got(
        self, delivery: Delivery, session: Session | None, since: int, began: int | None
    ) -> None:
        # Every pull is a stream of its own: two at a time may be answered in any order.
        stream = session.welcome.session_id if session is not None else -self._history.now
        for offset, message in enumerate(delivery.batch.messages, delivery.first_offset):
            self._history.add(
                Delivered(
                    self.now_ms,
                    self.name,
                    stream,
                    delivery.lmq_name,
                    int(message.payload),
                    offset,
                    delivery.epoch,
                    delivery.delivery_count,
                    began,
                    since,
                )
            )
        self.held.append(Held(delivery, session))

    def _noticed(self, notice: UnsubscribeNotice) -> None:
        if not self._deaf:
            self._epochs.pop(notice.lmq_name, None)

    # --- inside --------------------------------------------------------------------------------

    async def _settled(self, held: Held, action: Action, first: int, last: int) -> Outcome:
        try:
            await self._settle(held, action, first, last)
        except _UNKNOWN:
            return Outcome.UNKNOWN
        except TidemarkError:
            return Outcome.REFUSED
        return Outcome.ACCEPTED

    async def _settle_by_receipt(self, held: Held, action: Action, first: int, last: int) -> None:
        settlement = settlement_of(held.delivery.receipt, action, [(first, last)])
        request = broker_pb2.SettleRequest(client_id=self.name, settlements=[settlement])
        place = self._cluster.place(held.delivery.lmq_name)
        (result,) = (await self._cluster.stub(place).Settle(request)).results
        if result.HasField("error"):
            raise from_status(result.error)

    def _some_action(self) -> Action:
        actions: list[Action] = [Ack(), Nack(), Release()]
        return self._chance.choices(actions, [6, 1, 1])[0]

    def _believed(self) -> dict[str, dict[str, int]]:
        """The epochs of its queues by the place where it asks for them; of none, at any."""
        believed: dict[str, dict[str, int]] = {}
        for queue, epoch in self._epochs.items():
            believed.setdefault(self._cluster.place(queue), {})[queue] = epoch
        return believed or {self._cluster.place(""): {}}


class UnaryClient(Client):
    """Calls and goes."""

    @property
    def waits(self) -> bool:
        return False

    async def pull(self, queue: str, wait_ms: int) -> None:
        request = broker_pb2.PullRequest(
            client_id=self.name, lmq_name=queue, wait_ms=wait_ms, max_messages=3
        )
        began = self._history.now
        answer = await self._cluster.stub(self._cluster.place(queue)).Pull(request)
        for delivery in answer.deliveries:
            self._got(delivery, None, began, began)

    async def heartbeat(self) -> None:
        for place, believed in self._believed().items():
            request = broker_pb2.HeartbeatRequest(client_id=self.name, held=[_report(believed)])
            for notice in (await self._cluster.stub(place).Heartbeat(request)).unsubscribed:
                self._noticed(notice)

    async def sync(
        self, place: str, mode: Any, entries: Sequence[SubscriptionEntry]
    ) -> Sequence[SubscriptionResult]:
        sync = SubscriptionSync(mode=mode, entries=entries)
        request = broker_pb2.SyncSubscriptionsRequest(client_id=self.name, sync=sync)
        return list((await self._cluster.stub(place).SyncSubscriptions(request)).result.results)

    async def leave(self) -> None:
        """It is just not heard any more."""


@dataclass(slots=True, eq=False)
class _Connection:
    """A session with the broker at one place."""

    session: Session
    consumer: Consumer
    since: int
    """The position in the history at which it was asked for."""
    listening: list[asyncio.Task[None]] = field(default_factory=list)

    def has_lost(self, queues: set[str], partitions: int) -> bool:
        """Whether it has ended, or its broker has named another one for a queue."""
        moved = {each.partition for each in self.session.go_aways}
        return self.session.ended is not None or any(
            partition_of(queue, partitions) in moved for queue in queues
        )


class SessionClient(Client):
    """Stays connected, unless something ends that. With little credit it is soon stalled."""

    def __init__(self, *args: Any, credit: int, visibility_ms: int, deaf: bool) -> None:
        super().__init__(*args, deaf=deaf)
        self._credit = credit
        self._visibility_ms = visibility_ms
        self._connections: dict[str, _Connection] = {}

    @property
    def waits(self) -> bool:
        return self._credit == PLENTY

    async def sync(
        self, place: str, mode: Any, entries: Sequence[SubscriptionEntry]
    ) -> Sequence[SubscriptionResult]:
        at = await self._connected(place, {each.lmq_name for each in entries})
        sync = SubscriptionSync(mode=mode, entries=entries, consumer_id=at.consumer.consumer_id)
        return list((await at.session.sync(sync)).results)

    async def heartbeat(self) -> None:
        for place, believed in self._believed().items():
            at = await self._connected(place, set(believed))
            at.session.heartbeat([_report(believed)])

    async def leave(self) -> None:
        """The connections end without a word; what it believes it goes on believing."""
        for place in list(self._connections):
            await self._disconnect(place)

    async def _disconnect(self, place: str) -> None:
        connection = self._connections.pop(place, None)
        if connection is None:
            return
        self._history.add(Disturbed(self.now_ms, "leaves", self.name))
        await connection.session.abort()
        for task in connection.listening:
            task.cancel()
        await asyncio.gather(*connection.listening, return_exceptions=True)

    async def _settle(self, held: Held, action: Action, first: int, last: int) -> None:
        at = self._connection_of(held)
        if at is None:
            await self._settle_by_receipt(held, action, first, last)
            return
        await at.session.settle(held.delivery.delivery_tag, action, [(first, last)])
        if self._connection_of(held) is at:
            at.consumer.give_credit(last - first)

    def _connection_of(self, held: Held) -> _Connection | None:
        """Where the tag of a delivery is good."""
        connections = self._connections.values()
        return next((each for each in connections if each.session is held.session), None)

    async def _connected(self, place: str, queues: set[str]) -> _Connection:
        known = self._connections.get(place)
        if known is not None and known.has_lost(queues, self._cluster.partitions):
            await self._disconnect(place)
        if place not in self._connections:
            since = self._history.now
            session = await self._cluster.connect(self.name, place)
            if place in self._connections:  # made twice
                await session.abort()
                return self._connections[place]
            consumer = session.open_consumer(
                credit=self._credit, visibility_ms=self._visibility_ms, takes_arrays=True
            )
            made = self._connections[place] = _Connection(session, consumer, since)
            made.listening.append(asyncio.create_task(self._deliveries(made)))
            made.listening.append(asyncio.create_task(self._notices(session)))
        return self._connections[place]

    async def _deliveries(self, at: _Connection) -> None:
        try:
            while True:
                for delivery in await at.consumer.deliveries():
                    self._got(delivery, at.session, at.since, None)
        except TidemarkError:
            self._history.add(Disturbed(self.now_ms, "was cut off", self.name))

    async def _notices(self, session: Session) -> None:
        known = 0
        while session.ended is None:
            await session.notified.wait()
            for notice in session.unsubscribed[known:]:
                self._noticed(notice)
            known = len(session.unsubscribed)


def _report(believed: Mapping[str, int]) -> broker_pb2.HeldSubscriptions:
    report = broker_pb2.HeldSubscriptions()
    for queue, epoch in believed.items():
        report.entries.add(lmq_name=queue, epoch=epoch)
    return report


async def publish(cluster: Cluster, history: History, queue: str, messages: range) -> None:
    """Publish once; what was not answered is not known to be there."""
    batch = batch_of([b"%d" % number for number in messages])
    run = PublishRun(lmq_name=queue, batch=batch, count=len(messages))
    stub = cluster.stub(cluster.place(queue))
    (result,) = (await stub.Publish(broker_pb2.PublishRequest(runs=[run]))).results
    if not result.HasField("error"):
        for number in messages:
            history.add(Published(cluster.clock.monotonic_ms(), queue, number))
