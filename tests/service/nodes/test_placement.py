"""Which storage node holds which partition, who creates it, and data that is gone."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.local_broker import until
from tests.support.storage_nodes import StorageNodes, storage_nodes
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.storage.v1 import storage_pb2
from tidemark.errors import (
    ClusterMismatch,
    DataDirectoryInUse,
    PartitionFaulty,
    PartitionNotFound,
    TidemarkError,
)
from tidemark.settings.variables import SettingsError


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[StorageNodes]:
    """Three nodes with four partitions, not started."""
    async with storage_nodes(tmp_path) as several:
        yield several


async def start_all(nodes: StorageNodes) -> None:
    for node in range(3):
        await nodes.start_node(node)
    await nodes.until_held(n0=[0, 3], n1=[1], n2=[2])


async def faults(nodes: StorageNodes, node: int) -> dict[int, list[str]]:
    described = await nodes.described(node)
    return {
        each.partition: [fault.reason for fault in each.faults]
        for each in described.held
        if each.faults
    }


async def test_partitions_are_created_once_every_node_has_answered(nodes: StorageNodes) -> None:
    """C1: each by one node, which holds it after a restart without asking the others."""
    await nodes.start_node(0)
    await nodes.start_node(1)
    before = await nodes.held()

    await nodes.start_node(2)

    await nodes.until_held(n0=[0, 3], n1=[1], n2=[2])
    assert before == {0: [], 1: []}
    with pytest.raises(PartitionNotFound):
        await nodes.stub(0).ListQueues(storage_pb2.ListQueuesRequest(partition=1))
    for node in range(3):
        await nodes.stop_node(node)
    await nodes.start_node(1)
    assert await nodes.held() == {1: [1]}


async def test_a_volume_that_vanished_is_reported_and_not_created_again(
    nodes: StorageNodes,
) -> None:
    """C6: also after a restart; the other nodes serve. An operator can have it created, empty."""
    await start_all(nodes)
    await nodes.stop_node(0)
    nodes.wipe(0)

    await nodes.start_node(0)

    async def is_reported() -> bool:
        return await faults(nodes, 0) == {0: ["DATA_LOST"], 3: ["DATA_LOST"]}

    await until(is_reported)
    claim = storage_pb2.ClaimPartitionRequest(
        partition=0, cluster_id="tidemark", broker_id="b", incarnation=1
    )
    with pytest.raises(PartitionFaulty, match="DATA_LOST"):
        await nodes.stub(0).ClaimPartition(claim)
    await nodes.stop_node(0)
    await nodes.start_node(0)
    await until(is_reported)
    assert await nodes.held() == {0: [], 1: [1], 2: [2]}
    await nodes.stop_node(0)
    await nodes.start_node(0, create_lost=True)
    await nodes.until_held(n0=[0, 3], n1=[1], n2=[2])
    assert await faults(nodes, 0) == {}


async def test_a_node_of_another_cluster_or_number_of_partitions_is_refused(
    nodes: StorageNodes,
) -> None:
    """C1: nothing is created while it is in the list, and it gets nothing."""
    await nodes.start_node(0)
    await nodes.start_node(1, cluster_id="another")
    await nodes.start_node(2, partitions=8)
    request = storage_pb2.PlacePartitionsRequest(cluster_id="tidemark", partitions=4, node_id="n")

    for other in (1, 2):
        with pytest.raises(ClusterMismatch):
            await nodes.stub(other).PlacePartitions(request)

    assert await nodes.held() == {0: [], 1: [], 2: []}


async def test_a_node_on_a_copy_of_the_data_of_another_one_refuses_to_serve(
    nodes: StorageNodes,
) -> None:
    """C1: two members with one id."""
    await start_all(nodes)
    await nodes.stop_node(0)
    shutil.copytree(nodes.data_dir(0), nodes.data_dir(9))
    await nodes.stop_node(1)
    await nodes.start_node(1, data_dir=nodes.data_dir(9))

    await nodes.start_node(0)

    async def is_stopped() -> bool:
        try:
            await nodes.described(0)
        except TidemarkError:
            return True
        return False

    await until(is_stopped)
    with pytest.raises(DataDirectoryInUse):
        await nodes.stop_node(0)


async def test_nodes_that_join_get_no_partitions_that_exist(tmp_path: Path) -> None:
    """C1: the data decides what a node holds, and it keeps everything."""
    async with storage_nodes(tmp_path) as nodes:
        await nodes.start_node(0, storage_addresses=nodes.addresses[:1])
        put = storage_pb2.PutTopicRequest(topic=topic_pb2.Topic(name="orders"), create=True)
        await nodes.stub(0).PutTopic(put)
        await nodes.stop_node(0)

        for node in range(3):
            await nodes.start_node(node)

        await nodes.until_held(n0=[0, 1, 2, 3], n1=[], n2=[])
        listed = await nodes.stub(0).ListTopics(storage_pb2.ListTopicsRequest())
        assert [each.name for each in listed.topics] == ["orders"]


async def test_a_node_that_is_not_in_the_list_does_not_start(nodes: StorageNodes) -> None:
    """C1."""
    with pytest.raises(SettingsError, match="TIDEMARK_STORAGE_ADDRESSES"):
        await nodes.start_node(0, storage_addresses=("a:1", "b:1"))


async def test_a_node_of_several_does_not_start_as_the_only_one(nodes: StorageNodes) -> None:
    """C6: it would create the partitions of the others again, empty."""
    await start_all(nodes)
    for node in range(3):
        await nodes.stop_node(node)

    with pytest.raises(ClusterMismatch, match=r"another node has created partition [12]\b"):
        await nodes.start_node(0, storage_addresses=nodes.addresses[:1])

    await nodes.start_node(0)
    assert await nodes.held() == {0: [0, 3]}
