"""A client for tests, as a program without the SDK would write it: one unary call at a time.

It adds no meaning of its own: what it returns is what the broker answered, what it raises is the
reason that came back. It never repeats a call.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.support.local_broker import payloads_of, run_of
from tidemark.api.broker.v1 import broker_pb2, topic_pb2
from tidemark.api.broker.v1.broker_pb2_grpc import BrokerServiceStub
from tidemark.api.broker.v1.message_pb2 import (
    Ack,
    Delivery,
    Message,
    PublishReceipt,
    PublishResult,
    PublishRun,
)
from tidemark.api.broker.v1.topic_pb2_grpc import TopicServiceStub
from tidemark.client.transport.codec import Action, receipt_of, settlement_of
from tidemark.local.cluster import LocalCluster
from tidemark.rpc import from_status, open_channel

TOPIC = "orders"
CLIENT_ID = "test-client"


@dataclass(frozen=True)
class UnaryClient:
    """A connection to a broker."""

    topics: TopicServiceStub
    broker: BrokerServiceStub

    async def delete_topic(self) -> None:
        """Leave a cluster that tests share as it was."""
        await self.topics.DeleteTopic(topic_pb2.DeleteTopicRequest(name=TOPIC, force=True))

    async def publish_runs(self, *runs: PublishRun) -> list[PublishResult]:
        """One result per run."""
        request = broker_pb2.PublishRequest(client_id=CLIENT_ID, runs=runs)
        return list((await self.broker.Publish(request)).results)

    async def publish(
        self, lmq_name: str, *messages: bytes | Message, **fields: Any
    ) -> PublishReceipt:
        """One run; raises why it was refused."""
        run = run_of(lmq_name, **fields)
        for each in messages:
            run.batch.messages.append(Message(payload=each) if isinstance(each, bytes) else each)
        run.count = len(messages)
        (result,) = await self.publish_runs(run)
        return receipt_of(result)

    async def store(self, lmq_name: str, *payloads: bytes) -> int:
        """Publish one run; the offset of its first message."""
        return (await self.publish(lmq_name, *payloads)).first_offset

    async def pull(
        self, lmq_name: str, *, wait_ms: int = 0, max_messages: int = 0
    ) -> list[Delivery]:
        request = broker_pb2.PullRequest(
            client_id=CLIENT_ID, lmq_name=lmq_name, wait_ms=wait_ms, max_messages=max_messages
        )
        return list((await self.broker.Pull(request)).deliveries)

    async def settle(self, receipt: bytes, action: Action) -> int:
        """How many messages it concerned; raises why it failed."""
        settlement = settlement_of(receipt, action, request_id=1)
        request = broker_pb2.SettleRequest(client_id=CLIENT_ID, settlements=[settlement])
        (result,) = (await self.broker.Settle(request)).results
        if result.HasField("error"):
            raise from_status(result.error)
        return result.messages

    async def ack(self, delivery: Delivery) -> int:
        return await self.settle(delivery.receipt, Ack())

    async def drain(self, lmq_name: str) -> list[bytes]:
        """Pull and acknowledge until there is nothing left; the payloads in their order."""
        drained: list[bytes] = []
        while deliveries := await self.pull(lmq_name):
            drained += payloads_of(deliveries)
            for delivery in deliveries:
                await self.ack(delivery)
        return drained


@asynccontextmanager
async def connected(cluster: LocalCluster) -> AsyncIterator[UnaryClient]:
    """A client of the cluster's broker, with TOPIC to publish to."""
    async with open_channel(cluster.address("broker")) as channel:
        client = UnaryClient(TopicServiceStub(channel), BrokerServiceStub(channel))
        await client.topics.CreateTopic(topic_pb2.CreateTopicRequest(name=TOPIC))
        yield client
