"""A cluster as tests of its lifecycle see it: through its broker, and beside it where none is left.

Publishes, takes, settles and looks, one call at a time; waits for what must come. It adds no
meaning of its own and never repeats a call that changes something, unless its name shows it.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from tests.support.storage_client import StorageClient
from tests.support.unary_client import UnaryClient
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.broker.v1.broker_pb2_grpc import BrokerServiceStub
from tidemark.api.broker.v1.message_pb2 import (
    Delivery,
    Message,
    Nack,
    PublishReceipt,
    PublishRun,
)
from tidemark.api.broker.v1.topic_pb2 import CreateTopicRequest, TopicSettings
from tidemark.api.broker.v1.topic_pb2_grpc import TopicServiceStub
from tidemark.api.lifecycle.v1.lifecycle_pb2 import ListSweepersRequest, SweeperStatus
from tidemark.api.lifecycle.v1.lifecycle_pb2_grpc import LifecycleServiceStub
from tidemark.api.storage.v1 import retention_pb2
from tidemark.api.storage.v1.storage_pb2 import PeekQueueRequest
from tidemark.client.transport.codec import receipt_of
from tidemark.clock import SystemClock
from tidemark.errors import QueueNotFound, ServiceError
from tidemark.limits import PAGE_SIZE_MAX
from tidemark.local.cluster import LocalCluster
from tidemark.local.ports import free_address
from tidemark.local.service_process import ServiceProcess
from tidemark.names import partition_of
from tidemark.rpc import open_channel

WITHIN_MS: Final = 60_000
PARTITIONS: Final = 4
"""The default number of partitions of a cluster."""

_POLL_MS: Final = 20

T = TypeVar("T")


async def until(look: Callable[[], Awaitable[T]], *, within_ms: int = WITHIN_MS) -> T:
    """Look until there is something to see, and give that; a service that is gone shows nothing."""

    async def watch() -> T:
        while True:
            try:
                if seen := await look():
                    return seen
            except ServiceError:
                pass
            await SystemClock().sleep_ms(_POLL_MS)

    return await SystemClock().wait_for(watch(), within_ms)


@dataclass(frozen=True)
class Client(UnaryClient):
    """Connections to the broker and to storage. It waits for what it pulls."""

    storage: StorageClient
    created: set[str] = field(default_factory=set)
    """Topics of its own."""

    async def create_topic(self, name: str, **settings: Any) -> None:
        request = CreateTopicRequest(name=name, settings=TopicSettings(**settings))
        await self.topics.CreateTopic(request)
        self.created.add(name)

    async def delete_topics(self) -> None:
        """Leave a cluster that tests share as it was."""
        for name in self.created:
            await self.topics.DeleteTopic(topic_pb2.DeleteTopicRequest(name=name, force=True))

    async def update_topic(self, name: str, **settings: Any) -> None:
        request = topic_pb2.UpdateTopicRequest(name=name, settings=TopicSettings(**settings))
        request.update_mask.paths.extend(settings)
        await self.topics.UpdateTopic(request)

    async def publish_each(self, *runs: PublishRun) -> list[PublishReceipt]:
        """Runs in one call; raises the first reason why one was refused."""
        return [receipt_of(result) for result in await self.publish_runs(*runs)]

    async def pull(
        self, lmq_name: str, *, wait_ms: int = WITHIN_MS, max_messages: int = 0
    ) -> list[Delivery]:
        return await super().pull(lmq_name, wait_ms=wait_ms, max_messages=max_messages)

    async def take(self, lmq_name: str) -> Delivery:
        """The only delivery that there is, or the first that comes."""
        (delivery,) = await self.pull(lmq_name)
        return delivery

    async def nack(self, delivery: Delivery, delay_ms: int = 0) -> int:
        return await self.settle(delivery.receipt, Nack(delay_ms=delay_ms))

    async def redrive(self, lmq_name: str, **fields: Any) -> topic_pb2.RedriveDeadLettersResponse:
        limit, dry_run = fields.pop("limit", 0), fields.pop("dry_run", False)
        chosen = topic_pb2.DeadLetterFilter(**fields)
        request = topic_pb2.RedriveDeadLettersRequest(
            lmq_name=lmq_name, filter=chosen, limit=limit, dry_run=dry_run
        )
        return await self.topics.RedriveDeadLetters(request)

    # --- looking: nothing is reserved, no broker is needed --------------------------------------

    async def stored(self, lmq_name: str) -> list[Message]:
        """All messages of a queue by their offsets; none of a queue that does not exist."""
        found: list[Message] = []
        request = PeekQueueRequest(
            partition=partition_of(lmq_name, PARTITIONS),
            lmq_name=lmq_name,
            max_messages=PAGE_SIZE_MAX,
        )
        while True:
            try:
                page = (await self.storage.storage.PeekQueue(request)).messages
            except QueueNotFound:
                return []
            found += [each.message for each in page]
            if len(page) < PAGE_SIZE_MAX:
                return found
            request.offset = page[-1].offset + 1

    async def queue(self, lmq_name: str) -> topic_pb2.Queue:
        found = await self.storage.queue(lmq_name, partition_of(lmq_name, PARTITIONS))
        queue: topic_pb2.Queue = found.queue
        return queue

    async def history(self, lmq_name: str) -> list[retention_pb2.RetentionHistoryRow]:
        request = retention_pb2.ListRetentionHistoryRequest()
        rows = (await self.storage.retention.ListRetentionHistory(request)).rows
        return [row for row in rows if row.lmq_name == lmq_name]

    # --- waiting --------------------------------------------------------------------------------

    async def until_stored(self, lmq_name: str, messages: int) -> list[Message]:
        """All messages of a queue, once there are at least so many."""

        async def enough() -> list[Message]:
            found = await self.stored(lmq_name)
            return found if len(found) >= messages else []

        return await until(enough)


@asynccontextmanager
async def client_of(cluster: LocalCluster) -> AsyncIterator[Client]:
    """A client of a cluster; its connections mend by themselves."""
    async with (
        open_channel(cluster.address("broker")) as broker,
        open_channel(cluster.address("storage")) as storage,
    ):
        yield Client(TopicServiceStub(broker), BrokerServiceStub(broker), StorageClient(storage))


@asynccontextmanager
async def client_of_shared(cluster: LocalCluster) -> AsyncIterator[Client]:
    """A client whose topics are gone afterwards, also when the test failed."""
    async with client_of(cluster) as client:
        try:
            yield client
        finally:
            await client.delete_topics()


async def sweepers_at(address: str) -> Sequence[SweeperStatus]:
    """The sweepers of one lifecycle replica, by partition."""
    async with open_channel(address) as channel:
        return (await LifecycleServiceStub(channel).ListSweepers(ListSweepersRequest())).sweepers


def another_replica(cluster: LocalCluster, log_file: Path, **variables: str) -> ServiceProcess:
    """One more lifecycle process for a cluster, not yet started."""
    address = free_address()
    first = cluster._services["lifecycle"]._environment  # names the cluster, on a shared store
    return ServiceProcess(
        "lifecycle-b",
        "lifecycle_svc",
        address=address,
        health_service="tidemark.api.lifecycle.v1.LifecycleService",
        environment={
            **first,
            "TIDEMARK_STORAGE_ADDRESSES": cluster.storage_addresses,
            "TIDEMARK_LIFECYCLE_LISTEN": address,
            **variables,
        },
        log_file=log_file,
    )


def payloads(messages: Iterable[Message]) -> list[bytes]:
    return [message.payload for message in messages]
