"""Publishing and consuming for the command line, over the unary calls of a broker.

The one module of the command line that knows how messages travel. It never repeats a call: who
publishes is told what was stored, and decides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import grpc
from google.rpc.status_pb2 import Status

from tidemark.api.broker.v1 import broker_pb2, message_pb2, subscription_pb2
from tidemark.api.broker.v1.broker_pb2_grpc import BrokerServiceStub
from tidemark.errors import NotSubscribed
from tidemark.rpc.enums import word_of
from tidemark.rpc.statuses import from_status

_SERVED = (
    subscription_pb2.SUBSCRIPTION_STATE_UNSPECIFIED,  # a shared topic
    subscription_pb2.SUBSCRIPTION_STATE_ACTIVE,
    subscription_pb2.SUBSCRIPTION_STATE_TRANSFERRING,  # on its way to us
)


@dataclass(frozen=True, slots=True)
class Stored:
    """What a published run got: an offset, or an id under which it is scheduled."""

    partition: int
    first_offset: int
    schedule_id: int


@dataclass(frozen=True, slots=True)
class Received:
    """One message as a consumer gets it."""

    lmq_name: str
    offset: int
    payload: bytes
    headers: Mapping[str, str]
    fairness_key: str
    attempt_count: int
    delivery_count: int
    publish_time_ms: int
    epoch: int
    partition: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Messages under one reservation, and the proof of it."""

    receipt: bytes
    messages: tuple[Received, ...]


class Messages:
    """A client of one broker, known to it by its id."""

    def __init__(
        self, channel: grpc.aio.Channel, client_id: str, *, timeout_ms: int | None
    ) -> None:
        self._broker = BrokerServiceStub(channel)
        self._client_id = client_id
        self._timeout_ms = timeout_ms

    async def publish(
        self,
        lmq_name: str,
        payloads: Sequence[bytes],
        *,
        headers: Mapping[str, str],
        fairness_key: str,
        delay_ms: int,
        ttl_ms: int,
    ) -> Stored:
        """Store one run; returns once it is on disk."""
        messages = [message_pb2.Message(payload=each, headers=headers) for each in payloads]
        run = message_pb2.PublishRun(
            lmq_name=lmq_name,
            batch=message_pb2.MessageBatch(messages=messages),
            count=len(messages),
            fairness_key=fairness_key,
            delay_ms=delay_ms,
            ttl_ms=ttl_ms,
        )
        request = broker_pb2.PublishRequest(client_id=self._client_id, runs=[run])
        answer = await self._broker.Publish(request, timeout=self._timeout_s())
        result = answer.results[0]
        if result.HasField("error"):
            raise from_status(result.error)
        receipt = result.receipt
        return Stored(receipt.partition, receipt.first_offset, receipt.schedule_id)

    async def pull(
        self, lmq_name: str, group: str, *, max_messages: int, wait_ms: int
    ) -> list[Batch]:
        """Reserve messages; none if there were none for that long.

        Raises NotSubscribed where an exclusive queue belongs to somebody else.
        """
        request = broker_pb2.PullRequest(
            client_id=self._client_id,
            group=group,
            lmq_name=lmq_name,
            max_messages=max_messages,
            wait_ms=wait_ms,
        )
        answer = await self._broker.Pull(request, timeout=self._timeout_s(wait_ms))
        state = answer.subscription_state
        if not answer.deliveries and state not in _SERVED:
            word = word_of(subscription_pb2.SubscriptionState, state, "SUBSCRIPTION_STATE_")
            raise NotSubscribed(f"queue {lmq_name} is exclusive, and this client is {word}")
        return [_batch(each) for each in answer.deliveries]

    async def subscribe(self, lmq_name: str, group: str) -> None:
        """Take an exclusive queue over, from whoever has it."""
        await self._sync(subscription_pb2.SYNC_MODE_PARTIAL_ADD, lmq_name, group)

    async def unsubscribe(self, lmq_name: str, group: str) -> None:
        await self._sync(subscription_pb2.SYNC_MODE_PARTIAL_REMOVE, lmq_name, group)

    async def ack(self, batches: Sequence[Batch]) -> None:
        """Done: they do not come back to the group."""
        ack = message_pb2.Ack()
        await self._settle([message_pb2.Settlement(receipt=e.receipt, ack=ack) for e in batches])

    async def release(self, batches: Sequence[Batch]) -> None:
        """Not tried: they come back at once, and no attempt is counted."""
        release = message_pb2.Release()
        await self._settle(
            [message_pb2.Settlement(receipt=e.receipt, release=release) for e in batches]
        )

    async def _settle(self, settlements: list[message_pb2.Settlement]) -> None:
        for at, settlement in enumerate(settlements, 1):
            settlement.request_id = at
        request = broker_pb2.SettleRequest(client_id=self._client_id, settlements=settlements)
        answer = await self._broker.Settle(request, timeout=self._timeout_s())
        for result in answer.results:
            if result.HasField("error"):
                error: Status = result.error
                raise from_status(error)

    async def _sync(
        self, mode: subscription_pb2.SyncMode.ValueType, lmq_name: str, group: str
    ) -> None:
        sync = subscription_pb2.SubscriptionSync(group=group, mode=mode)
        sync.entries.add(lmq_name=lmq_name)
        request = broker_pb2.SyncSubscriptionsRequest(client_id=self._client_id, sync=sync)
        answer = await self._broker.SyncSubscriptions(request, timeout=self._timeout_s())
        for result in answer.result.results:
            if result.HasField("error"):
                error: Status = result.error
                raise from_status(error)

    def _timeout_s(self, wait_ms: int = 0) -> float | None:
        return None if self._timeout_ms is None else (self._timeout_ms + wait_ms) / 1000


def _batch(delivery: message_pb2.Delivery) -> Batch:
    messages = tuple(
        Received(
            lmq_name=delivery.lmq_name,
            offset=offset,
            payload=message.payload,
            headers=dict(message.headers),
            fairness_key=delivery.fairness_key,
            attempt_count=delivery.attempt_count,
            delivery_count=delivery.delivery_count,
            publish_time_ms=delivery.publish_time_ms,
            epoch=delivery.epoch,
            partition=delivery.partition,
        )
        for offset, message in enumerate(delivery.batch.messages, delivery.first_offset)
    )
    return Batch(delivery.receipt, messages)
