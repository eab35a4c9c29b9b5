"""A broker for benchmarks: a topic, sessions, and the figures of its partitions.

Measures nothing itself.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

from bench.harness.usage import cpu_ns
from tests.support.session import Consumer, Session
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.broker.v1.message_pb2 import Ack, Delivery, MessageBatch, PublishRun
from tidemark.api.broker.v1.topic_pb2_grpc import TopicServiceStub
from tidemark.client.transport.codec import receipt_of
from tidemark.errors import Unavailable
from tidemark.local.cluster import SERVICES, LocalCluster
from tidemark.rpc import open_channel

TOPIC: Final = "bench"

_POLL_S = 0.05
_UNLOAD_TIMEOUT_S = 300
_HEARTBEAT_S = 5


@dataclass(frozen=True, slots=True)
class Broker:
    """The broker of a running cluster, with the topic of the benchmark."""

    cluster: LocalCluster
    topics: TopicServiceStub

    @asynccontextmanager
    async def session(self, client_id: str) -> AsyncIterator[Session]:
        """A session that is kept alive while its client is idle."""
        session = await Session.open(self.cluster.address("broker"), client_id)
        alive = asyncio.create_task(_keep_alive(session))
        try:
            yield session
        except BaseException:
            await session.abort()
            raise
        else:
            await session.close()
        finally:
            alive.cancel()
            with suppress(asyncio.CancelledError):
                await alive

    async def partitions(self) -> Sequence[topic_pb2.PartitionInfo]:
        response = await self.topics.ListPartitions(topic_pb2.ListPartitionsRequest())
        return response.partitions

    async def until_unloaded(self) -> None:
        """Return once automatic cleanup has unloaded every queue."""
        async with asyncio.timeout(_UNLOAD_TIMEOUT_S):
            while await self._materialized():  # noqa: ASYNC110 - another process decides
                await asyncio.sleep(_POLL_S)

    async def _materialized(self) -> int:
        return sum(each.materialized_queues for each in await self.partitions())

    def cpu_ns(self) -> int:
        """Processor time of all services so far."""
        return sum(cpu_ns(self.cluster.pid(name)) for name in SERVICES)


@asynccontextmanager
async def broker_of(
    cluster: LocalCluster, settings: topic_pb2.TopicSettings
) -> AsyncIterator[Broker]:
    """The cluster's broker, after creating the topic of the benchmark."""
    async with open_channel(cluster.address("broker")) as channel:
        topics = TopicServiceStub(channel)
        await topics.CreateTopic(topic_pb2.CreateTopicRequest(name=TOPIC, settings=settings))
        yield Broker(cluster, topics)


async def publish_each(session: Session, names: Iterable[str], batch: MessageBatch) -> None:
    """One run to each queue, in as few frames as possible."""
    count = len(batch.messages)
    runs = [PublishRun(lmq_name=name, batch=batch, count=count) for name in names]
    for result in await asyncio.gather(*(session.submit(run) for run in runs)):
        receipt_of(result)


async def take(consumer: Consumer, messages: int) -> list[Delivery]:
    """Give credit for that many messages, and wait until they have arrived."""
    consumer.give_credit(messages)
    taken: list[Delivery] = []
    left = messages
    while left:
        arrived = await consumer.deliveries()
        taken += arrived
        left -= sum(delivery.count for delivery in arrived)
    return taken


async def ack_all(session: Session, deliveries: Iterable[Delivery]) -> None:
    """Acknowledge, and wait until it is on disk."""
    await asyncio.gather(*(session.settle(delivery.delivery_tag, Ack()) for delivery in deliveries))


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._begin_ns = time.perf_counter_ns()

    def elapsed_s(self) -> float:
        return (time.perf_counter_ns() - self._begin_ns) / 1e9


async def _keep_alive(session: Session) -> None:
    with suppress(Unavailable):  # the session is being closed
        while session.ended is None:
            await asyncio.sleep(_HEARTBEAT_S)
            session.heartbeat()
