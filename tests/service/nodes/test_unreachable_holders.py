"""A client that reaches one broker only, such as one behind a load balancer that ends TLS."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

import tidemark
from tests.support.brokers import Brokers, several_brokers
from tests.support.local_broker import in_time
from tests.support.tls_proxy import HOST, make_certificate, tls_proxy
from tidemark.errors import TopicNotFound
from tidemark.names import partition_of

PARTITIONS = 4


@pytest.fixture
async def brokers(tmp_path: Path) -> AsyncIterator[Brokers]:
    """Two brokers that reach each other without TLS."""
    async with several_brokers(
        tmp_path / "storage", nodes=1, brokers=2, partitions=PARTITIONS
    ) as brokers:
        yield brokers


@pytest.fixture
async def client(brokers: Brokers, tmp_path: Path) -> AsyncIterator[tidemark.Client]:
    """It speaks TLS, which only the proxy before the first broker does."""
    certificate = make_certificate(tmp_path)
    credentials = grpc.ssl_channel_credentials(certificate.cert.read_bytes())
    port = int(brokers.members[0][1].rpartition(":")[2])
    async with (
        tls_proxy(HOST, port, certificate) as port,
        tidemark.connect(f"{HOST}:{port}", credentials=credentials) as client,
    ):
        yield client


async def far_queues(brokers: Brokers) -> list[str]:
    """A queue of each partition that the second broker holds."""
    held = await brokers.holders()
    found: dict[int, str] = {}
    for number in range(100):
        name = f"orders/{number}"
        found.setdefault(partition_of(name, PARTITIONS), name)
    return [name for partition, name in found.items() if held[partition] == "broker-1"]


async def test_a_client_publishes_through_its_broker_where_it_cannot_reach_the_holder(
    brokers: Brokers, client: tidemark.Client
) -> None:
    """S8, S11: each message is stored once and in order, and can be pulled and settled."""
    await client.create_topic("orders")
    queues = await far_queues(brokers)
    assert queues

    for name in queues:
        async with await in_time(client.publisher(name)) as publisher:
            receipts = [await in_time(publisher.publish(b"%d" % each)) for each in range(5)]
            many = await in_time(publisher.publish_many([b"5", b"6"]))

        assert [each.offset for each in (*receipts, *many)] == [0, 1, 2, 3, 4, 5]
        assert not any(each.duplicate for each in receipts)
        pulled = await in_time(client.pull(name))
        payloads = [message.payload for batch in pulled.batches for message in batch]
        assert payloads == [b"%d" % each for each in range(7)]
        await in_time(client.settle(pulled))
        assert not (await in_time(client.pull(name))).batches


async def test_a_plain_queue_of_a_holder_that_cannot_be_reached_is_published_to(
    brokers: Brokers, client: tidemark.Client
) -> None:
    """S8: also by several calls at once, which share runs."""
    held = await brokers.holders()
    name = next(
        name
        for name in (f"plain-{number}" for number in range(100))
        if held[partition_of(name, PARTITIONS)] == "broker-1"
    )
    await client.create_topic(name)
    publisher = await in_time(client.publisher(name))

    receipts = await in_time(asyncio.gather(*(publisher.publish(b"x") for _ in range(100))))

    assert [each.offset for each in receipts] == list(range(100))


async def test_a_missing_topic_is_reported_where_the_holder_cannot_be_reached(
    brokers: Brokers, client: tidemark.Client
) -> None:
    """S3, S8."""
    await client.create_topic("orders")
    (name, *_) = await far_queues(brokers)
    await in_time((await in_time(client.publisher(name))).publish(b"x"))

    missing = next(
        name
        for name in (f"none/{number}" for number in range(100))
        if client._routes.forwards(partition_of(name, PARTITIONS))
    )
    with pytest.raises(TopicNotFound):
        await in_time(client.publisher(missing))
