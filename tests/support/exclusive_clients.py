"""The two forms of a client, session and unary calls, behind the same few verbs.

Both speak real gRPC to a real broker. What a test shows for one must hold for the other.
"""

from collections.abc import Mapping
from typing import Any, Final, Protocol

from tests.support.local_broker import LocalBroker, in_time, take
from tests.support.session import Session
from tidemark.api.broker.v1 import broker_pb2, subscription_pb2
from tidemark.api.broker.v1.message_pb2 import Delivery
from tidemark.api.broker.v1.subscription_pb2 import (
    StartPosition,
    SubscriptionEntry,
    SubscriptionResult,
    SubscriptionSync,
    UnsubscribeNotice,
)
from tidemark.client.transport.codec import Action
from tidemark.errors import TidemarkError
from tidemark.rpc import from_status

ACTIVE: Final = subscription_pb2.SUBSCRIPTION_STATE_ACTIVE
EVICTED: Final = subscription_pb2.SUBSCRIPTION_STATE_EVICTED
NOT_SUBSCRIBED: Final = subscription_pb2.SUBSCRIPTION_STATE_NOT_SUBSCRIBED
REPLACED: Final = subscription_pb2.SUBSCRIPTION_STATE_REPLACED
RESYNC_REQUIRED: Final = subscription_pb2.SUBSCRIPTION_STATE_RESYNC_REQUIRED
TRANSFERRING: Final = subscription_pb2.SUBSCRIPTION_STATE_TRANSFERRING

ADD: Final = subscription_pb2.SYNC_MODE_PARTIAL_ADD
REMOVE: Final = subscription_pb2.SYNC_MODE_PARTIAL_REMOVE
RESYNC: Final = subscription_pb2.SYNC_MODE_COMPLETE_ADD
REMOVE_ALL: Final = subscription_pb2.SYNC_MODE_COMPLETE_REMOVE

_WAIT_MS: Final = 30_000


class Client(Protocol):
    """A client of one group."""

    client_id: str

    async def sync(self, mode: Any, *entries: SubscriptionEntry) -> list[SubscriptionResult]:
        """One sync; a result per entry."""

    async def report(self, held: Mapping[str, int]) -> list[UnsubscribeNotice]:
        """A heartbeat with the queues that the client believes it owns; returns the notices."""

    async def receive(self, messages: int = 1) -> list[Delivery]:
        """That many messages, waiting for them."""

    async def arrived(self, lmq_name: str) -> list[Delivery]:
        """What is there for the client without waiting."""

    async def settle(self, delivery: Delivery, action: Action) -> str:
        """The reason of the refusal; "" for a success."""

    async def leave(self) -> None:
        """The client is gone, without a word."""


class SessionClient:
    """A client with a session and one consumer."""

    def __init__(self, session: Session, client_id: str, group: str, credit: int) -> None:
        self.client_id = client_id
        self.session = session
        self.consumer = session.open_consumer(group, credit=credit)

    async def sync(self, mode: Any, *entries: SubscriptionEntry) -> list[SubscriptionResult]:
        sync = SubscriptionSync(mode=mode, entries=entries, consumer_id=self.consumer.consumer_id)
        return list((await in_time(self.session.sync(sync))).results)

    async def report(self, held: Mapping[str, int]) -> list[UnsubscribeNotice]:
        known = len(self.session.unsubscribed)
        self.session.heartbeat([_held(self.consumer.group, held)])
        await self.round_trip()
        return self.session.unsubscribed[known:]

    async def receive(self, messages: int = 1) -> list[Delivery]:
        return await take(self.consumer, messages)

    async def arrived(self, lmq_name: str) -> list[Delivery]:
        await self.round_trip()
        return [each for each in self.consumer._arrived if each.lmq_name == lmq_name]

    async def settle(self, delivery: Delivery, action: Action) -> str:
        try:
            await in_time(self.session.settle(delivery.delivery_tag, action))
        except TidemarkError as error:
            return error.reason
        return ""

    async def leave(self) -> None:
        await self.session.abort()

    async def until_told(self, notices: int = 1) -> list[UnsubscribeNotice]:
        """Every notice so far, once there are that many."""

        async def told() -> None:
            await self.session.notified.wait_for(lambda: len(self.session.unsubscribed) >= notices)

        await in_time(told())
        return self.session.unsubscribed

    async def round_trip(self) -> None:
        """Afterwards, everything that the broker sent before has arrived."""
        await self.sync(REMOVE, SubscriptionEntry(lmq_name="shared/never-subscribed"))


class UnaryClient:
    """A client that calls and goes."""

    def __init__(self, broker: LocalBroker, client_id: str, group: str) -> None:
        self.client_id = client_id
        self._broker = broker
        self._group = group
        self._names: list[str] = []

    async def sync(self, mode: Any, *entries: SubscriptionEntry) -> list[SubscriptionResult]:
        self._names += [each.lmq_name for each in entries]
        sync = SubscriptionSync(mode=mode, entries=entries, group=self._group)
        request = broker_pb2.SyncSubscriptionsRequest(client_id=self.client_id, sync=sync)
        return list((await in_time(self._broker.api.SyncSubscriptions(request))).result.results)

    async def report(self, held: Mapping[str, int]) -> list[UnsubscribeNotice]:
        request = broker_pb2.HeartbeatRequest(client_id=self.client_id)
        request.held.append(_held(self._group, held))
        return list((await in_time(self._broker.api.Heartbeat(request))).unsubscribed)

    async def receive(self, messages: int = 1) -> list[Delivery]:
        received: list[Delivery] = []
        while sum(each.count for each in received) < messages:
            answer = await self.pull(self._names[0], wait_ms=_WAIT_MS)
            assert answer.deliveries, f"nothing came: {answer.subscription_state}"
            received += answer.deliveries
        return received

    async def arrived(self, lmq_name: str) -> list[Delivery]:
        return list((await self.pull(lmq_name)).deliveries)

    async def settle(self, delivery: Delivery, action: Action) -> str:
        result = await self._broker.settle(delivery.receipt, action, client_id=self.client_id)
        return from_status(result.error).reason if result.HasField("error") else ""

    async def leave(self) -> None:
        """It just does not call again; the broker learns of it by its silence."""

    async def pull(self, lmq_name: str, wait_ms: int = 0) -> broker_pb2.PullResponse:
        request = broker_pb2.PullRequest(
            client_id=self.client_id, lmq_name=lmq_name, group=self._group, wait_ms=wait_ms
        )
        return await in_time(self._broker.api.Pull(request))


def _held(group: str, held: Mapping[str, int]) -> broker_pb2.HeldSubscriptions:
    entries = [SubscriptionEntry(lmq_name=name, epoch=epoch) for name, epoch in held.items()]
    return broker_pb2.HeldSubscriptions(group=group, entries=entries)


async def subscribe(client: Client, lmq_name: str, start: StartPosition | None = None) -> int:
    """Subscribe explicitly; returns the epoch, raises why not."""
    (result,) = await client.sync(ADD, SubscriptionEntry(lmq_name=lmq_name, start=start))
    if result.HasField("error"):
        raise from_status(result.error)
    assert result.state == ACTIVE
    return result.epoch


async def resync(client: Client, held: Mapping[str, int]) -> list[tuple[int, int]]:
    """A full resync; returns state and epoch of each entry."""
    entries = [SubscriptionEntry(lmq_name=name, epoch=epoch) for name, epoch in held.items()]
    results = await client.sync(RESYNC, *entries)
    for result in results:
        if result.HasField("error"):
            raise from_status(result.error)
    return [(result.state, result.epoch) for result in results]
