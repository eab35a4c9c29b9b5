"""A client for tests, as a program without the SDK would write it: one unary call at a time.

It adds no meaning of its own: what it returns is what the broker answered, what it raises is the
reason that came back. It never repeats a call.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from google.rpc.status_pb2 import Status

from tests.support.local_broker import payloads_of, run_of
from tidemark.api.broker.v1 import broker_pb2, message_pb2, topic_pb2
from tidemark.api.broker.v1.broker_pb2_grpc import BrokerServiceStub
from tidemark.api.broker.v1.message_pb2 import Delivery, PublishRun
from tidemark.api.broker.v1.topic_pb2_grpc import TopicServiceStub
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

    async def publish(self, *runs: PublishRun) -> list[message_pb2.PublishResult]:
        """One result per run."""
        request = broker_pb2.PublishRequest(client_id=CLIENT_ID, runs=runs)
        return list((await self.broker.Publish(request)).results)

    async def store(self, lmq_name: str, *payloads: bytes) -> int:
        """Publish one run that has to succeed; the offset of its first message."""
        (result,) = await self.publish(run_of(lmq_name, *payloads))
        _check(result)
        return result.receipt.first_offset

    async def pull(self, lmq_name: str, wait_ms: int = 0) -> list[Delivery]:
        request = broker_pb2.PullRequest(client_id=CLIENT_ID, lmq_name=lmq_name, wait_ms=wait_ms)
        return list((await self.broker.Pull(request)).deliveries)

    async def ack(self, receipt: bytes) -> int:
        """Settle one reservation that has to succeed; how many messages it had."""
        ack = message_pb2.Settlement(request_id=1, receipt=receipt, ack=message_pb2.Ack())
        request = broker_pb2.SettleRequest(client_id=CLIENT_ID, settlements=[ack])
        (result,) = (await self.broker.Settle(request)).results
        _check(result)
        return result.messages

    async def drain(self, lmq_name: str) -> list[bytes]:
        """Pull and acknowledge until there is nothing left; the payloads in their order."""
        drained: list[bytes] = []
        while deliveries := await self.pull(lmq_name):
            drained += payloads_of(deliveries)
            for delivery in deliveries:
                await self.ack(delivery.receipt)
        return drained


@asynccontextmanager
async def connected(cluster: LocalCluster) -> AsyncIterator[UnaryClient]:
    """A client of the cluster's broker, with TOPIC to publish to."""
    async with open_channel(cluster.address("broker")) as channel:
        client = UnaryClient(TopicServiceStub(channel), BrokerServiceStub(channel))
        await client.topics.CreateTopic(topic_pb2.CreateTopicRequest(name=TOPIC))
        yield client


def _check(result: message_pb2.PublishResult | message_pb2.SettleResult) -> None:
    if result.HasField("error"):
        error: Status = result.error
        raise from_status(error)
