"""The number of partitions: named by a setting, taken from the data, or agreed on by the nodes."""

from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from broker_svc.app import broker
from lifecycle_svc.app import lifecycle
from tests.support.local_broker import BROKER_SERVICE, in_time, run_of, until
from tests.support.storage_nodes import StorageNodes, storage_nodes
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.broker.v1.topic_pb2_grpc import TopicServiceStub
from tidemark.api.lifecycle.v1.lifecycle_pb2 import AnnouncePartitionRequest
from tidemark.api.lifecycle.v1.lifecycle_pb2_grpc import LifecycleServiceStub
from tidemark.clock import SystemClock
from tidemark.errors import ClusterMismatch, InvalidArgument, Unavailable
from tidemark.limits import PARTITIONS_DEFAULT
from tidemark.rpc import open_channel, wait_until_serving
from tidemark.settings import BrokerSettings, LifecycleSettings

MINUTE_MS = 60_000


async def counts(nodes: StorageNodes, *numbers: int) -> list[int]:
    return [(await nodes.described(node)).partitions for node in numbers]


async def until_counts(nodes: StorageNodes, *expected: int) -> None:
    async def is_so() -> bool:
        return await counts(nodes, *range(len(expected))) == list(expected)

    await until(is_so)


async def test_a_lone_node_takes_the_number_of_its_data(tmp_path: Path) -> None:
    """S8, C6: 16 for new data; a number that differs from the data is refused, in words."""
    async with storage_nodes(tmp_path, nodes=1, partitions=0) as nodes:
        await nodes.start_node(0)
        assert await counts(nodes, 0) == [PARTITIONS_DEFAULT]
        await nodes.stop_node(0)
        nodes.wipe(0)
        await nodes.start_node(0, partitions=3)
        await nodes.stop_node(0)

        await nodes.start_node(0)

        assert await counts(nodes, 0) == [3]
        await nodes.stop_node(0)
        refusal = r"with 3 partitions, not to cluster 'tidemark' with 5 \(TIDEMARK_PARTITIONS\)"
        with pytest.raises(ClusterMismatch, match=refusal):
            await nodes.start_node(0, partitions=5)


async def test_nodes_with_new_data_agree(tmp_path: Path) -> None:
    """S8: none decides before all have answered; brokers and clients get the same number."""
    async with storage_nodes(tmp_path, nodes=3, partitions=0) as nodes:
        await nodes.start_node(0)
        await nodes.start_node(1)
        before = await counts(nodes, 0, 1)

        await nodes.start_node(2)
        await until_counts(nodes, *[PARTITIONS_DEFAULT] * 3)

        assert before == [0, 0]
        await nodes.until_held(
            **{f"n{node}": [*range(node, PARTITIONS_DEFAULT, 3)] for node in range(3)}
        )
        await nodes.start_broker()
        await nodes.create_topic(partitions=PARTITIONS_DEFAULT)
        described = await nodes.topics.DescribeCluster(topic_pb2.DescribeClusterRequest())
        assert described.partitions == PARTITIONS_DEFAULT


async def test_nodes_without_a_number_take_that_of_the_others(tmp_path: Path) -> None:
    """S8: of a node that has data, or whose settings name it; also after a restart."""
    async with storage_nodes(tmp_path, nodes=3, partitions=0) as nodes:
        await nodes.start_node(1)
        await nodes.start_node(0, partitions=4)

        await nodes.start_node(2)

        await nodes.until_held(n0=[0, 3], n1=[1], n2=[2])
        await nodes.stop_node(0)
        await nodes.start_node(0)
        await nodes.stop_node(2)
        nodes.wipe(2)
        await nodes.start_node(2)
        await until_counts(nodes, 4, 4, 4)


async def test_nodes_that_differ_are_named_and_decide_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """S8, C1: a node without a number does not choose between the numbers of others."""
    async with storage_nodes(tmp_path, nodes=3, partitions=0) as nodes:
        await nodes.start_node(0, partitions=4)
        await nodes.start_node(1, partitions=8)

        await nodes.start_node(2)

        async def is_logged() -> bool:
            return "storage nodes differ in their number of partitions" in caplog.text

        await until(is_logged)
        assert f"'{nodes.addresses[0]}': 4, '{nodes.addresses[1]}': 8" in caplog.text
        assert await counts(nodes, 2) == [0]


async def test_a_broker_waits_for_the_number_and_serves_then(tmp_path: Path) -> None:
    """S8, L11: it listens meanwhile, is not ready, and answers UNAVAILABLE."""
    async with storage_nodes(tmp_path, nodes=1, partitions=0) as nodes:
        settings = BrokerSettings(listen=nodes.address, storage_addresses=nodes.addresses)
        async with (
            broker(settings, SystemClock()) as server,
            open_channel(server.address) as channel,
        ):
            with pytest.raises(Unavailable, match="still starting"):
                await TopicServiceStub(channel).ListTopics(topic_pb2.ListTopicsRequest())
            health: Any = HealthStub(channel)  # its types lack Check
            state = await health.Check(HealthCheckRequest(service=BROKER_SERVICE))
            assert state.status == HealthCheckResponse.NOT_SERVING

            await nodes.start_node(0, partitions=2)

            await wait_until_serving(channel, BROKER_SERVICE, MINUTE_MS)
            listed = await TopicServiceStub(channel).ListPartitions(
                topic_pb2.ListPartitionsRequest()
            )
            assert len(listed.partitions) == 2


async def test_a_broker_that_waits_for_the_number_can_be_stopped(tmp_path: Path) -> None:
    """S5: no storage node ever answers."""
    async with storage_nodes(tmp_path, nodes=2, partitions=0) as nodes:
        settings = BrokerSettings(listen="127.0.0.1:0", storage_addresses=nodes.addresses)

        async def start_and_stop() -> None:
            async with broker(settings, SystemClock()) as server:
                assert server.port

        await in_time(start_and_stop())


async def test_a_broker_uses_the_number_of_the_node_that_answers(tmp_path: Path) -> None:
    """S8, C1: the other node of the list is a host that is dead."""
    async with storage_nodes(tmp_path, nodes=2, partitions=0) as nodes:
        await nodes.start_node(0, partitions=2)
        await nodes.start_node(1)
        await nodes.until_held(n0=[0], n1=[1])
        await nodes.stop_node(1)
        nodes.partitions = 2

        await nodes.start_broker()

        await nodes.create_topic()
        (name,) = nodes.names_in(0, 1)
        (result,) = await nodes.publish(run_of(name, b"1"))
        assert result.WhichOneof("outcome") != "error"


async def test_lifecycle_takes_the_number_of_storage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """L2, S8: a number of its own that differs is refused, in words."""
    async with storage_nodes(tmp_path, nodes=1, partitions=0) as nodes:
        await nodes.start_node(0, partitions=2)
        settings = LifecycleSettings(listen="127.0.0.1:0", storage_addresses=nodes.addresses)
        beyond = AnnouncePartitionRequest(partition=2, storage_address=nodes.addresses[0])

        async with (
            lifecycle(settings, SystemClock()) as server,
            open_channel(server.address) as channel,
        ):
            service = "tidemark.api.lifecycle.v1.LifecycleService"
            await wait_until_serving(channel, service, MINUTE_MS)
            with pytest.raises(InvalidArgument, match="the cluster has 2 partitions"):
                await LifecycleServiceStub(channel).AnnouncePartition(beyond)

        other = LifecycleSettings(
            listen="127.0.0.1:0", storage_addresses=nodes.addresses, partitions=8
        )
        async with lifecycle(other, SystemClock()):

            async def is_logged() -> bool:
                return any(
                    getattr(each, "why", "") == "it has 2 partitions, not 8"
                    for each in caplog.records
                )

            await until(is_logged)
