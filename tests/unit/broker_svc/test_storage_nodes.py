"""Storage nodes as a broker knows them: which one holds a partition, while nodes come and go."""

import asyncio
from typing import Any

import pytest

from broker_svc.links.storage_nodes import StorageNode, StorageNodes
from tidemark.api.broker.v1.topic_pb2 import PartitionInfo
from tidemark.api.storage.v1.storage_pb2 import DescribeStorageResponse
from tidemark.clock import ManualClock
from tidemark.errors import PartitionNotFound, Unavailable
from tidemark.rpc.witnesses import witness_of
from tidemark.settings import BrokerSettings


class Storage:
    """The calls of one storage node, as far as the tests need them."""

    def __init__(self, engine: str = "redis", **epochs: int) -> None:
        """`epochs` are those of the partitions that it holds: `Storage(p0=7)`."""
        self.engine = engine
        self.epochs = {int(name[1:]): epoch for name, epoch in epochs.items()}
        self.answers = asyncio.Event()
        self.answers.set()
        self.is_gone = False
        self.metadata: list[object] = []
        """That of calls."""

    async def DescribeStorage(self, request: object) -> DescribeStorageResponse:
        await self.answers.wait()
        if self.is_gone:
            raise Unavailable("gone")
        return DescribeStorageResponse(
            cluster_id="tidemark",
            partitions=2,
            engine=self.engine,
            held=[PartitionInfo(partition=n, storage_epoch=e) for n, e in self.epochs.items()],
        )

    async def GetTopic(self, request: object, metadata: object) -> str:
        self.metadata.append(metadata)
        if 0 not in self.epochs:
            raise PartitionNotFound("not here")
        return "a topic"


def node(name: str, storage: Any) -> StorageNode:
    return StorageNode(name, storage)


def known(*nodes: StorageNode, clock: ManualClock | None = None) -> StorageNodes:
    return StorageNodes(nodes, BrokerSettings(partitions=2), clock or ManualClock())


async def test_nodes_that_change_while_others_answer_do_not_fail_a_description() -> None:
    """S9: the members of the registry arrive while the nodes of the settings are asked."""
    slow, other = Storage(p0=1), Storage(p1=1)
    slow.answers.clear()
    first = node("a", slow)
    nodes = known(first, node("b", other))
    describing = asyncio.create_task(nodes.describe())
    await ManualClock().sleep_ms(0)  # it asks them

    nodes.set_nodes([first])
    slow.answers.set()

    assert [each.address for each in await describing] == ["a", "b"]


async def test_of_two_nodes_with_one_partition_the_higher_storage_epoch_counts() -> None:
    """S9: whichever answers first; one of them is deposed and does not know it yet."""
    deposed, present = node("a", Storage(p0=4)), node("b", Storage(p0=5))
    for nodes in (known(deposed, present), known(present, deposed)):
        await nodes.describe()

        assert nodes.located(0) is present


async def test_two_nodes_with_the_data_of_one_partition_are_a_conflict() -> None:
    """C6: with RocksDB one of them is a copy."""
    nodes = known(node("a", Storage("rocksdb", p0=0)), node("b", Storage("rocksdb", p0=0)))
    await nodes.describe()

    with pytest.raises(Unavailable, match="held by a and by b"):
        await nodes.locate(0)


async def test_a_call_follows_a_partition_that_has_moved() -> None:
    """S9: nothing was done where it is not held, so the call is made again."""
    old, new, clock = Storage(p0=1), Storage(), ManualClock()
    nodes = known(node("a", old), node("b", new), clock=clock)
    storage: Any = await nodes.storage(0)
    old.epochs, new.epochs = {}, {0: 2}
    calling = asyncio.create_task(storage.GetTopic("request"))
    await clock.until_sleepers(1)

    await clock.advance_ms(50)

    assert await calling == "a topic"


async def test_a_call_carries_the_last_commit_that_this_broker_has_seen() -> None:
    """C6: a node that opened the partition after a loss does not know of it."""
    storage = Storage(p0=1, p1=1)
    seen = {0: 7, 1: 0}
    nodes = StorageNodes(
        [node("a", storage)], BrokerSettings(partitions=2), ManualClock(), seen.__getitem__
    )

    for partition in seen:
        calls: Any = await nodes.storage(partition)
        await calls.GetTopic("request")

    assert storage.metadata == [witness_of(7), ()]


@pytest.mark.parametrize(("engine", "stays"), [("redis", False), ("rocksdb", True)])
async def test_a_partition_is_looked_for_elsewhere_only_on_a_shared_store(
    engine: str, stays: bool
) -> None:
    """S9, C1: where the data is in a node, it is waited for."""
    holder = node("a", Storage(engine, p0=3))
    nodes = known(holder, node("b", Storage(engine)))
    await nodes.locate(0)

    nodes.lost(0, Unavailable("the exchange broke"))

    assert (nodes.located(0) is holder) == stays
