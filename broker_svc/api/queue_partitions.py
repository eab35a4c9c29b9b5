"""The partitions of a queue as one: asks each of them, and collects the answers.

Reads go beside the writer by unary calls, changes over the links. A partition that does not have
the queue is skipped, as long as another one has it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from broker_svc.links.holders import Holders
from broker_svc.links.storage_nodes import StorageNodes
from broker_svc.links.topic_cache import TopicCache
from tidemark.api.storage.v1 import exchange_pb2, storage_pb2
from tidemark.errors import GroupNotFound, QueueNotFound
from tidemark.names import LmqName
from tidemark.topics import partitions_of

R = TypeVar("R")


class QueuePartitions:
    """Storage, as the topic API uses it."""

    def __init__(
        self,
        cluster_partitions: int,
        holders: Holders,
        topics: TopicCache,
        nodes: StorageNodes,
    ) -> None:
        self._cluster_partitions = cluster_partitions
        self._holders = holders
        self._topics = topics
        self._nodes = nodes

    async def of(self, lmq_name: str) -> Sequence[int]:
        """The partitions that a queue spans."""
        topic = await self._topics.get(LmqName.parse(lmq_name).topic)
        return partitions_of(lmq_name, topic, self._cluster_partitions)

    async def call(
        self, partition: int, operation: exchange_pb2.Operation
    ) -> exchange_pb2.OperationResult:
        """Carry out an operation in one partition, whichever broker holds it."""
        return await self._holders.call(partition, operation)

    async def read(self, lmq_name: str) -> Sequence[storage_pb2.GetQueueResponse]:
        """The queue as each partition has it; raises QueueNotFound if none has."""

        async def get(partition: int) -> storage_pb2.GetQueueResponse:
            return await (await self._nodes.storage(partition)).GetQueue(
                storage_pb2.GetQueueRequest(partition=partition, lmq_name=lmq_name)
            )

        return await self._in_each(lmq_name, get)

    async def has_group(self, lmq_name: str, group: str) -> bool:
        """Whether any partition has the group."""
        found = await self.read(lmq_name)
        return any(each.name == group for part in found for each in part.groups)

    async def change(
        self, lmq_name: str, operation: exchange_pb2.Operation
    ) -> Sequence[exchange_pb2.OperationResult]:
        """Carry out an operation in every partition of a queue."""

        async def change(partition: int) -> exchange_pb2.OperationResult:
            copied = exchange_pb2.Operation()  # each link writes its own request id into it
            copied.CopyFrom(operation)
            return await self.call(partition, copied)

        return await self._in_each(lmq_name, change)

    async def _in_each(self, lmq_name: str, ask: Callable[[int], Awaitable[R]]) -> Sequence[R]:
        """The answers of the partitions that have the queue; at least one must."""
        partitions = await self.of(lmq_name)
        answers = await asyncio.gather(
            *(ask(partition) for partition in partitions), return_exceptions=True
        )
        found: list[R] = []
        missing: BaseException | None = None
        for answer in answers:
            if isinstance(answer, QueueNotFound | GroupNotFound):
                missing = answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found.append(answer)
        if not found and missing is not None:
            raise missing
        return found
