"""The unary calls of a broker: publish, pull, settle and subscribe without a session.

Shared by `Client.pull` and the command line. It never repeats a call: it raises, and the caller
decides.
"""

from collections.abc import Mapping, Sequence

import grpc

from tidemark.api.broker.v1 import broker_pb2, message_pb2, subscription_pb2
from tidemark.api.broker.v1.broker_pb2_grpc import BrokerServiceStub
from tidemark.client.transport.codec import check, receipt_of


class UnaryClient:
    """One client id on one broker."""

    def __init__(
        self, channel: grpc.aio.Channel, client_id: str, *, timeout_ms: int | None = None
    ) -> None:
        """`timeout_ms` bounds every call; a pull may also wait its `wait_ms`."""
        self._broker = BrokerServiceStub(channel)
        self._client_id = client_id
        self._timeout_ms = timeout_ms

    async def publish(
        self,
        lmq_name: str,
        payloads: Sequence[bytes],
        *,
        headers: Mapping[str, str],
        fairness_key: str = "",
        delay_ms: int = 0,
        ttl_ms: int = 0,
    ) -> message_pb2.PublishReceipt:
        """Store one run of messages that share their headers; returns once it is on disk."""
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
        response = await self._broker.Publish(request, timeout=self._timeout_s())
        return receipt_of(response.results[0])

    async def publish_runs(
        self, runs: Sequence[message_pb2.PublishRun], producer_id: str
    ) -> Sequence[message_pb2.PublishResult]:
        """Store runs of an idempotent producer; one result each, in order."""
        request = broker_pb2.PublishRequest(
            client_id=self._client_id, producer_id=producer_id, runs=runs
        )
        return (await self._broker.Publish(request, timeout=self._timeout_s())).results

    async def destroy_publisher(self, publisher_id: int) -> None:
        """Destroy a publisher of this broker by its id."""
        request = broker_pb2.DestroyPublisherRequest(publisher_id=publisher_id)
        await self._broker.DestroyPublisher(request, timeout=self._timeout_s())

    async def pull(
        self,
        lmq_name: str,
        group: str,
        *,
        max_messages: int,
        wait_ms: int,
        visibility_ms: int = 0,
    ) -> broker_pb2.PullResponse:
        """Reserve messages that are ready, or become ready within `wait_ms`."""
        request = broker_pb2.PullRequest(
            client_id=self._client_id,
            group=group,
            lmq_name=lmq_name,
            max_messages=max_messages,
            wait_ms=wait_ms,
            visibility_ms=visibility_ms,
        )
        return await self._broker.Pull(request, timeout=self._timeout_s(wait_ms))

    async def settle(
        self, settlements: Sequence[message_pb2.Settlement]
    ) -> Sequence[message_pb2.SettleResult]:
        """Settle reservations by receipt; one result each. Raises the first failure."""
        request = broker_pb2.SettleRequest(client_id=self._client_id, settlements=settlements)
        response = await self._broker.Settle(request, timeout=self._timeout_s())
        for result in response.results:
            check(result)
        return response.results

    async def subscribe(self, lmq_name: str, group: str) -> None:
        """Subscribe; on an exclusive topic this takes the queue over from its owner."""
        await self._sync(subscription_pb2.SYNC_MODE_PARTIAL_ADD, lmq_name, group)

    async def unsubscribe(self, lmq_name: str, group: str) -> None:
        await self._sync(subscription_pb2.SYNC_MODE_PARTIAL_REMOVE, lmq_name, group)

    async def _sync(
        self, mode: subscription_pb2.SyncMode.ValueType, lmq_name: str, group: str
    ) -> None:
        sync = subscription_pb2.SubscriptionSync(group=group, mode=mode)
        sync.entries.add(lmq_name=lmq_name)
        request = broker_pb2.SyncSubscriptionsRequest(client_id=self._client_id, sync=sync)
        response = await self._broker.SyncSubscriptions(request, timeout=self._timeout_s())
        for result in response.result.results:
            check(result)

    def _timeout_s(self, wait_ms: int = 0) -> float | None:
        return None if self._timeout_ms is None else (self._timeout_ms + wait_ms) / 1000
