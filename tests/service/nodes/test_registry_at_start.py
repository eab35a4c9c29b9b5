"""A broker whose registry does not answer at start."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import tidemark
from broker_svc.app import broker
from tests.support.brokers import Brokers
from tests.support.local_broker import BROKER_SERVICE, SERVES_WITHIN_MS, in_time, until
from tests.support.valkey import valkey
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.broker.v1.topic_pb2_grpc import TopicServiceStub
from tidemark.clock import SystemClock
from tidemark.local.ports import free_address
from tidemark.rpc import open_channel, wait_until_serving
from tidemark.settings import BrokerSettings
from tidemark.settings.variables import split_address


async def test_a_broker_starts_without_its_registry_and_joins_once_it_answers(
    tmp_path: Path,
) -> None:
    """S8: until then it is not ready, holds nothing, and names the reason without the password."""
    _, port = split_address(free_address())
    nodes = Brokers(tmp_path / "storage", nodes=1, brokers=1, partitions=2)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(nodes.close)
        await nodes.start_node(0)
        settings = BrokerSettings(
            listen=free_address(),
            partitions=2,
            storage_addresses=nodes.addresses,
            registry_url=f"redis://:secret@127.0.0.1:{port}",
        )
        server = await stack.enter_async_context(broker(settings, SystemClock()))
        channel = await stack.enter_async_context(open_channel(server.address))
        topics = TopicServiceStub(channel)
        described = topic_pb2.DescribeClusterResponse()

        async def is_refused() -> bool:
            described.CopyFrom(await topics.DescribeCluster(topic_pb2.DescribeClusterRequest()))
            return str(port) in described.assignment.registry_error

        await until(is_refused)
        assert "secret" not in described.assignment.registry_error
        assert described.assignment.version == 0
        serving = asyncio.create_task(wait_until_serving(channel, BROKER_SERVICE, SERVES_WITHIN_MS))
        partitions = await topics.ListPartitions(topic_pb2.ListPartitionsRequest())
        assert {each.broker_id for each in partitions.partitions} == {""}
        assert not serving.done()

        started = stack.enter_context(valkey(tmp_path / "valkey", port))
        assert started.port == port
        await serving
        async with tidemark.connect(server.address) as client:
            await client.admin.create_topic("orders")
            publisher = await client.publisher("orders")
            await in_time(publisher.publish(b"served"))
