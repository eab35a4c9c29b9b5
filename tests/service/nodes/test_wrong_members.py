"""Lists of members that are wrong: a host that is not there, another cluster, one id twice."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from broker_svc.app import broker
from tests.support.brokers import several_brokers
from tests.support.local_broker import reason_of, run_of, until
from tests.support.storage_nodes import storage_nodes
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.broker.v1.topic_pb2_grpc import TopicServiceStub
from tidemark.clock import SystemClock
from tidemark.errors import DataDirectoryInUse, TidemarkError, Unavailable
from tidemark.rpc import open_channel
from tidemark.settings import BrokerSettings

NOWHERE = "storage.invalid:7410"
"""A name that no resolver knows (RFC 2606)."""


async def test_a_host_that_does_not_exist_is_named_and_the_others_serve(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """C1, S8: by the node that waits for it, and by the broker to a caller."""
    async with storage_nodes(tmp_path, nodes=1, partitions=2) as nodes:
        await nodes.start_node(0)
        await nodes.stop_node(0)
        nodes.addresses = (nodes.addresses[0], NOWHERE)

        await nodes.start_node(0, partitions=3, data_dir=tmp_path / "new")
        await until_logged(caplog, NOWHERE)
        assert await nodes.held() == {0: []}
        await nodes.stop_node(0)
        await nodes.start_node(0)
        await nodes.start_broker()
        await nodes.create_topic()
        (result,) = await nodes.publish(run_of(nodes.names_in(1, 1)[0], b"1"))
        described = await nodes.topics.DescribeCluster(topic_pb2.DescribeClusterRequest())

    assert reason_of(result) == ""
    errors = {member.address: member.error for member in described.members}
    assert errors[nodes.addresses[0]] == ""
    assert "UNAVAILABLE" in errors[NOWHERE]


async def until_logged(caplog: pytest.LogCaptureFixture, address: str) -> None:
    async def is_logged() -> bool:
        return any(
            getattr(each, "address", "") == address and "UNAVAILABLE" in each.__dict__["reason"]
            for each in caplog.records
            if each.message.startswith("a storage node does not answer")
        )

    await until(is_logged)


async def test_a_node_that_is_listed_under_two_addresses_stops_and_names_the_list(
    tmp_path: Path,
) -> None:
    """C1, S8: it would wait for itself, or hold a partition twice."""
    async with storage_nodes(tmp_path, nodes=1, partitions=2) as nodes:
        port = nodes.addresses[0].rpartition(":")[2]
        await nodes.start_node(0, storage_addresses=(nodes.addresses[0], f"localhost:{port}"))

        async def is_stopped() -> bool:
            try:
                await nodes.described(0)
            except TidemarkError:
                return True
            return False

        await until(is_stopped)
        with pytest.raises(DataDirectoryInUse, match="TIDEMARK_STORAGE_ADDRESSES names it twice"):
            await nodes.stop_node(0)


async def test_a_node_with_another_number_of_partitions_is_named_by_the_broker(
    tmp_path: Path,
) -> None:
    """C1, S8: its partitions are away, the others serve."""
    async with storage_nodes(tmp_path, nodes=2, partitions=2) as nodes:
        await nodes.start_node(0)
        await nodes.start_node(1)
        await nodes.until_held(n0=[0], n1=[1])
        await nodes.stop_node(1)
        await nodes.start_node(1, partitions=8, data_dir=nodes.data_dir(9))

        await nodes.start_broker()

        await nodes.create_topic()
        names = [nodes.names_in(number, 1)[0] for number in range(2)]
        (result,) = await nodes.publish(run_of(names[0], b"1"))
        assert reason_of(result) == ""
        with pytest.raises(Unavailable, match=f"{nodes.addresses[1]}.* with 8 partitions"):
            await nodes.topics.GetQueue(topic_pb2.GetQueueRequest(lmq_name=names[1]))


async def test_a_broker_that_lost_its_partitions_to_its_own_id_knows_why(tmp_path: Path) -> None:
    """C5, S8: two brokers with one id under static membership."""
    async with several_brokers(tmp_path, nodes=1, brokers=1, partitions=2) as brokers:
        settings = BrokerSettings(
            broker_id="broker-0",
            brokers=brokers.members,
            partitions=2,
            listen="127.0.0.1:0",
            storage_addresses=brokers.addresses,
        )
        async with AsyncExitStack() as stack, open_channel(brokers.members[0][1]) as channel:
            topics = TopicServiceStub(channel)

            async def is_explained() -> bool:
                listed = await topics.ListPartitions(topic_pb2.ListPartitionsRequest())
                return all(
                    "another broker with the same id, broker-0 (TIDEMARK_BROKER_ID)"
                    in each.link_detail
                    for each in listed.partitions
                )

            await stack.enter_async_context(broker(settings, SystemClock()))

            await until(is_explained)
