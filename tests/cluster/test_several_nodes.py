"""A cluster of several brokers and storage nodes as processes, also while a node is gone."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

import tidemark
from tests.cluster.conftest import shared
from tests.support.cli_process import Cli
from tests.support.local_broker import in_time, run_of, until
from tests.support.otlp_receiver import OtlpReceiver, ReceivedSpan, otlp_receiver
from tests.support.up_process import UpProcess
from tidemark.api.broker.v1 import broker_pb2
from tidemark.api.broker.v1.broker_pb2_grpc import BrokerServiceStub
from tidemark.errors import TidemarkError
from tidemark.local.cluster import SERVICES, LocalCluster
from tidemark.names import partition_of
from tidemark.rpc import open_channel
from tidemark.topics import TopicSettings

pytestmark = pytest.mark.asyncio(loop_scope="module")

PARTITIONS = 4
PUBLISH = "tidemark.api.broker.v1.BrokerService/Publish"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def collector() -> AsyncIterator[OtlpReceiver]:
    async with otlp_receiver() as receiver:
        yield receiver


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    request: pytest.FixtureRequest, collector: OtlpReceiver
) -> AsyncIterator[LocalCluster]:
    """For tests that start again what they kill. It sends spans and metrics to the collector."""
    environment = {
        **collector.environment,
        **collector.metrics_environment,
        "OTEL_METRICS_EXPORTER": "otlp",
    }
    async with shared(
        request,
        brokers=3,
        storages=3,
        partitions=PARTITIONS,
        environment=dict.fromkeys(SERVICES, environment),
    ) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(cluster: LocalCluster) -> AsyncIterator[tidemark.Client]:
    async with tidemark.connect(cluster.address("broker")) as client:
        yield client


def names_in(topic: str, partition: int) -> Iterator[str]:
    """Names of lite queues of one partition."""
    return (
        name
        for number in range(10_000)
        if partition_of(name := f"{topic}/{number}", PARTITIONS) == partition
    )


async def test_a_cluster_of_several_nodes_survives_the_loss_of_one(
    cluster: LocalCluster, client: tidemark.Client
) -> None:
    """C1, L6, S2: dead letters cross nodes; what a node has acknowledged is there when it is back,
    and the others serve meanwhile."""
    await client.admin.create_topic("dead")
    settings = TopicSettings(max_attempts=1, dead_letter_topic="dead")
    await client.admin.create_topic("jobs", settings)
    queues = [next(names_in("jobs", number)) for number in range(PARTITIONS)]
    publishers = [await client.publisher(name) for name in queues]
    for publisher in publishers:
        await in_time(publisher.publish(b"work"))

    async with client.subscribe(queues) as deliveries:
        for _ in queues:
            await (await in_time(anext(deliveries))).nack()
    async with client.subscribe(["dead"]) as deliveries:
        dead = [await in_time(anext(deliveries)) for _ in queues]
        for each in dead:
            await each.ack(wait=True)

    held = {each.partition: each.storage_address for each in await client.admin.list_partitions()}
    lost = next(number for number in held if held[number] == cluster.address("storage-2"))
    others = [number for number in held if held[number] != cluster.address("storage-2")]
    await in_time(publishers[lost].publish(b"kept"))
    await cluster.kill("storage-2")
    for number in others:
        await in_time(publishers[number].publish(b"meanwhile"))
    late = asyncio.create_task(publishers[lost].publish(b"late"))
    shown = Cli.of(cluster).ok("partitions", "--json").json
    listing = Cli.of(cluster).run("queue", "list", "jobs")
    members = Cli.of(cluster).ok("cluster", "--json").json["members"]
    text = Cli.of(cluster).ok("cluster").out
    moved = [
        Cli.of(cluster).run("cluster", "move", str(number), "broker-1") for number in (lost, 99)
    ]
    drained = Cli.of(cluster).run("cluster", "drain", cluster.address("storage"))
    unknown = Cli.of(cluster).run("cluster", "drain", "unknown")
    await cluster.restart("storage-2")
    await in_time(late)

    assert {each.payload for each in dead} == {b"work"}
    assert len(set(held.values())) == 3
    assert {each["state"] for each in shown if each["partition"] in others} == {"SERVING"}
    assert [each["id"] for each in members if each["kind"] == "BROKER"] == [
        "broker-0",
        "broker-1",
        "broker-2",
    ]
    assert [each["address"] for each in members if each["error"]] == [cluster.address("storage-2")]
    assert "broker-2" in text
    assert [each.code for each in (*moved, drained, unknown)] == [1] * 4
    assert "MEMBERSHIP_STATIC" in moved[0].err
    assert "there is no partition 99" in moved[1].err
    assert "rocksdb" in drained.err
    assert listing.code == 3
    assert "UNAVAILABLE" in listing.err
    async with client.subscribe([queues[lost]]) as deliveries:
        found = [(await in_time(anext(deliveries))).payload for _ in range(2)]
    assert found == [b"kept", b"late"]


async def test_one_trace_spans_a_forwarded_call(
    cluster: LocalCluster, client: tidemark.Client, collector: OtlpReceiver
) -> None:
    """S4, S8: the broker that was called, the holder and the commit, of a caller that traces."""
    await client.admin.create_topic("traced")
    holders = {each.partition: each.broker_id for each in await client.admin.list_partitions()}
    foreign = next(number for number, broker in holders.items() if broker != "broker-0")
    request = broker_pb2.PublishRequest(
        client_id="foreign", runs=[run_of(next(names_in("traced", foreign)), b"x")]
    )
    trace_id, caller = 0x5EED_5EED_5EED_5EED_5EED_5EED_5EED_5EED, 0x0123_4567_89AB_CDEF

    async with open_channel(cluster.address("broker")) as channel:
        await BrokerServiceStub(channel).Publish(
            request, metadata=[("traceparent", f"00-{trace_id:032x}-{caller:016x}-01")]
        )

    def below(parent: int) -> Callable[[ReceivedSpan], bool]:
        return lambda span: (
            (span.trace_id, span.parent_id, span.name)
            == (
                trace_id,
                parent,
                PUBLISH,
            )
        )

    called = await collector.span("the call", below(caller))
    forwarded = await collector.span("the forwarded call", below(called.span_id))
    everything = await collector.picture(called, ("tidemark-storage", "storage commit"))
    assert called.service == forwarded.service == "tidemark-broker"
    assert called.instance != forwarded.instance
    publish = next(span for span in everything if span.name == "publish traced")
    assert (publish.trace_id, publish.instance) == (trace_id, forwarded.instance)


async def test_the_metrics_of_each_node_name_their_own_instance(
    cluster: LocalCluster, collector: OtlpReceiver
) -> None:
    """S4, S8: figures of three brokers are not added up under one name."""
    metrics = {
        "tidemark-broker": "tidemark.broker.partitions_connected",
        "tidemark-storage": "tidemark.storage.partition_serving",
    }

    def instances(service: str) -> set[str]:
        return {
            point.instance
            for point in collector.points
            if (point.service, point.name) == (service, metrics[service])
        }

    await collector.until(
        lambda: True if all(len(instances(each)) >= 3 for each in metrics) else None,
        lambda: f"only {[instances(each) for each in metrics]} of {metrics}",
    )

    assert not instances("tidemark-broker") & instances("tidemark-storage")


async def test_up_runs_several_storage_nodes(tmp_path: Path) -> None:
    """S6, C1: each with its own part of the partitions, and data of its own."""
    async with UpProcess(tmp_path / "data", "--brokers=3", "--storages=3", "--partitions=4") as up:
        await up.ready()
        shown = next(line.split()[1:] for line in up.output if line.split()[0] == "storage")
        async with tidemark.connect(up.address("broker")) as client:

            async def is_held() -> bool:
                try:
                    listed = await client.admin.list_partitions()
                except TidemarkError:
                    return False
                held = {each.storage_address for each in listed if each.state == "SERVING"}
                return held == set(shown)

            await until(is_held)

    assert len(shown) == 3
    assert all((tmp_path / "data" / part / "node").is_dir() for part in (".", "storage-2"))
