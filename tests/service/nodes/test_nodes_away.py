"""A broker over several storage nodes: listings over all of them, and nodes that are away."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.local_broker import reason_of, run_of, until
from tests.support.storage_nodes import StorageNodes, storage_nodes
from tidemark.api.broker.v1 import topic_pb2
from tidemark.errors import TidemarkError, Unavailable

UP, DOWN = topic_pb2.LINK_STATE_UP, topic_pb2.LINK_STATE_DOWN


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[StorageNodes]:
    """Three nodes with four partitions, and a broker with the topic `orders` over all four."""
    async with storage_nodes(tmp_path) as several:
        for node in range(3):
            await several.start_node(node)
        await several.until_held(n0=[0, 3], n1=[1], n2=[2])
        await several.start_broker()
        await several.create_topic(partitions=4)
        yield several


async def links(nodes: StorageNodes) -> dict[int, tuple[topic_pb2.LinkState.ValueType, str]]:
    answer = await nodes.topics.ListPartitions(topic_pb2.ListPartitionsRequest())
    return {each.partition: (each.link_state, each.storage_address) for each in answer.partitions}


async def until_up(nodes: StorageNodes, *partitions: int) -> None:
    async def are_up() -> bool:
        found = await links(nodes)
        return [number for number, (state, _) in found.items() if state == UP] == list(partitions)

    await until(are_up)


async def test_a_cluster_of_several_nodes_is_used_like_one(nodes: StorageNodes) -> None:
    """C1: published, listed, peeked at and purged over all nodes."""
    names = [nodes.names_in(number, 1)[0] for number in range(4)]

    results = await nodes.publish(*(run_of(name, name.encode()) for name in names))
    for number in range(4):
        await nodes.publish(run_of("orders", b"%d" % number, partition=number))

    listed = await nodes.topics.ListQueues(topic_pb2.ListQueuesRequest(topic="orders"))
    peeked = await nodes.topics.PeekQueue(topic_pb2.PeekQueueRequest(lmq_name="orders"))
    purged = await nodes.topics.PurgeQueue(topic_pb2.PurgeQueueRequest(lmq_name="orders"))
    assert [reason_of(each) for each in results] == [""] * 4
    assert {each.lmq_name for each in listed.queues} == {"orders", *names}
    assert sorted(each.message.payload for each in peeked.messages) == [b"0", b"1", b"2", b"3"]
    assert purged.messages == 4
    assert await links(nodes) == {number: (UP, nodes.addresses[number % 3]) for number in range(4)}


async def test_a_node_that_is_away_concerns_its_own_partitions_only(nodes: StorageNodes) -> None:
    """C1: listings that need it fail and never skip; a broker starts and serves without it."""
    names = [nodes.names_in(number, 1)[0] for number in range(4)]
    await nodes.publish(*(run_of(name, b"1") for name in names))
    await nodes.stop_node(1)
    await until_up(nodes, 0, 2, 3)

    results = await nodes.publish(*(run_of(name, b"2") for name in names))
    with pytest.raises(TidemarkError) as listing:
        await nodes.topics.ListQueues(topic_pb2.ListQueuesRequest(topic="orders"))
    await nodes.stop_broker()
    await nodes.start_broker()  # returns once it is ready
    await until_up(nodes, 0, 2, 3)
    with pytest.raises(Unavailable, match="no storage node holds partition 1"):
        await nodes.topics.GetQueue(topic_pb2.GetQueueRequest(lmq_name=names[1]))
    await nodes.publish(run_of(names[2], b"3"))

    await nodes.start_node(1)
    await until_up(nodes, 0, 1, 2, 3)

    again = await nodes.publish(*(run_of(name, b"4") for name in names))
    assert [reason_of(each) for each in results] == ["", "UNAVAILABLE", "", ""]
    assert listing.value.reason == "UNAVAILABLE"
    assert [reason_of(each) for each in again] == [""] * 4
    stored = [(await nodes.queue(name)).messages for name in names]
    assert stored == [3, 2, 4, 3]


async def test_topics_are_known_by_a_node_that_was_away_when_they_changed(
    nodes: StorageNodes,
) -> None:
    """S7, C1."""
    await nodes.stop_node(2)
    await until_up(nodes, 0, 1, 3)

    await nodes.create_topic("fresh", max_attempts=3)
    await nodes.start_node(2)
    await until_up(nodes, 0, 1, 2, 3)

    name = nodes.names_in(2, 1, "fresh")[0]
    (result,) = await nodes.publish(run_of(name, b"1"))
    assert reason_of(result) == ""


async def test_a_node_of_another_cluster_is_named_by_the_broker(tmp_path: Path) -> None:
    """C1: its partitions are away, the others serve."""
    async with storage_nodes(tmp_path, nodes=2, partitions=2) as nodes:
        await nodes.start_node(0)
        await nodes.start_node(1)
        await nodes.until_held(n0=[0], n1=[1])
        await nodes.stop_node(1)
        await nodes.start_node(1, cluster_id="another", data_dir=nodes.data_dir(9))

        await nodes.start_broker()

        await until_up(nodes, 0)
        await nodes.create_topic()
        with pytest.raises(Unavailable, match="belongs to cluster 'another'"):
            await nodes.topics.GetQueue(topic_pb2.GetQueueRequest(lmq_name=nodes.names_in(1, 1)[0]))
