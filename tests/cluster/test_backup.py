"""Back-up and restore as docs/OPERATIONS.md describes them."""

import shutil
from pathlib import Path

from tests.cluster.conftest import StartCluster
from tidemark.api.broker.v1.broker_pb2 import PublishRequest, PullRequest
from tidemark.api.broker.v1.broker_pb2_grpc import BrokerServiceStub
from tidemark.api.broker.v1.message_pb2 import Message, MessageBatch, PublishRun
from tidemark.api.broker.v1.topic_pb2 import CreateTopicRequest
from tidemark.api.broker.v1.topic_pb2_grpc import TopicServiceStub
from tidemark.local.cluster import LocalCluster
from tidemark.rpc import open_channel


async def publish(cluster: LocalCluster, payload: bytes) -> None:
    async with open_channel(cluster.address("broker")) as channel:
        await TopicServiceStub(channel).CreateTopic(CreateTopicRequest(name="orders"))
        batch = MessageBatch(messages=[Message(payload=payload)])
        run = PublishRun(lmq_name="orders", batch=batch, count=1)
        answer = await BrokerServiceStub(channel).Publish(
            PublishRequest(client_id="shop", runs=[run])
        )
    assert not answer.results[0].HasField("error")


async def pull(cluster: LocalCluster) -> list[bytes]:
    request = PullRequest(client_id="shop", lmq_name="orders", wait_ms=5_000, max_messages=10)
    async with open_channel(cluster.address("broker")) as channel:
        answer = await BrokerServiceStub(channel).Pull(request)
    return [message.payload for each in answer.deliveries for message in each.batch.messages]


async def test_a_copy_made_while_storage_is_stopped_is_a_backup(
    start_cluster: StartCluster, tmp_path: Path
) -> None:
    """S2."""
    cluster: LocalCluster = await start_cluster()
    await publish(cluster, b"kept")
    await cluster.stop()

    shutil.copytree(cluster.data_dir, tmp_path / "backup")
    shutil.rmtree(cluster.data_dir)
    restored: LocalCluster = await start_cluster(data_dir=tmp_path / "backup")

    assert await pull(restored) == [b"kept"]
