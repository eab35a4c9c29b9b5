"""The whole way of a message through three real processes, over the public API alone."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub
from opentelemetry.sdk.trace import TracerProvider

from tests.cluster.conftest import StartCluster
from tests.support.local_broker import in_time, payloads_of
from tests.support.otlp_receiver import OtlpReceiver, ReceivedSpan
from tests.support.unary_client import TOPIC, UnaryClient, connected
from tidemark import limits
from tidemark.api.broker.v1 import topic_pb2
from tidemark.clock import SystemClock
from tidemark.errors import CommitOutcomeUnknown, Unavailable
from tidemark.local.cluster import SERVICES, LocalCluster, ServiceName
from tidemark.rpc import open_channel
from tidemark.telemetry import current_traceparent

GRPC_SERVICES: Mapping[ServiceName, set[str]] = {
    "storage": {"tidemark.api.storage.v1.StorageService"},
    "broker": {"tidemark.api.broker.v1.BrokerService", "tidemark.api.broker.v1.TopicService"},
    "lifecycle": {"tidemark.api.lifecycle.v1.LifecycleService"},
}

STORAGE_IS_GONE: Final = (Unavailable, CommitOutcomeUnknown)
"""What a publish is answered without storage: before it was sent, or after."""

T = TypeVar("T")


@pytest.fixture
async def client(cluster: LocalCluster) -> AsyncIterator[UnaryClient]:
    async with connected(cluster) as client:
        yield client


@pytest.fixture
async def traced(receiver: OtlpReceiver, start_cluster: StartCluster) -> AsyncIterator[UnaryClient]:
    """A client of a cluster that sends every span to the receiver."""
    environment = dict.fromkeys(SERVICES, receiver.environment)
    async with connected(await start_cluster(environment=environment)) as client:
        yield client


async def once_available(call: Callable[[], Awaitable[T]]) -> T:
    """The answer of a call that may be repeated, repeated as its errors allow."""

    async def repeat() -> T:
        while True:
            try:
                return await call()
            except Unavailable as error:
                await SystemClock().sleep_ms(error.retry_after_ms or 0)

    return await in_time(repeat())


# --- the way of a message, and its trace --------------------------------------------------------


async def test_one_trace_shows_every_hop_of_a_message(
    traced: UnaryClient, receiver: OtlpReceiver
) -> None:
    """S1, S4: publish, pull and settle, each from the client over the broker to storage."""
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer(__name__)

    with tracer.start_as_current_span("client") as root:
        traceparent = current_traceparent()
        await traced.publish(f"{TOPIC}/ada", b"hello", traceparent=traceparent)
        (delivery,) = await traced.pull(f"{TOPIC}/ada", wait_ms=5_000)
        settled = await traced.ack(delivery)

    assert payloads_of([delivery]) == [b"hello"]
    assert (delivery.attempt_count, delivery.delivery_count) == (0, 1)
    assert delivery.traceparent == traceparent, "for the consumer to link to"
    assert settled == 1
    client_span = root.get_span_context()
    trace_id = client_span.trace_id
    in_broker = {
        rpc: await receiver.span(f"the broker's {rpc}", broker_span(rpc, trace_id))
        for rpc in ("Publish", "Pull", "Settle")
    }
    assert {span.parent_id for span in in_broker.values()} == {client_span.span_id}
    in_storage = {
        rpc: await receiver.span(f"storage below {rpc}", storage_span_below(receiver, span))
        for rpc, span in in_broker.items()
    }
    assert {span.trace_id for span in in_storage.values()} == {trace_id}
    append = {(trace_id, in_storage["Publish"].parent_id)}
    commit = await receiver.span(
        "a span of storage that links to the append",
        lambda span: span.service == "tidemark-storage" and not span.links.isdisjoint(append),
    )
    assert commit.name == "storage commit"


def broker_span(rpc: str, trace_id: int) -> Callable[[ReceivedSpan], bool]:
    wanted = ("tidemark-broker", f"tidemark.api.broker.v1.BrokerService/{rpc}", trace_id)
    return lambda span: (span.service, span.name, span.trace_id) == wanted


def storage_span_below(receiver: OtlpReceiver, hop: ReceivedSpan) -> Callable[[ReceivedSpan], bool]:
    """Directly, or below the broker's own span for what the call is about."""

    def matches(span: ReceivedSpan) -> bool:
        between = {each.span_id for each in receiver.spans if each.parent_id == hop.span_id}
        below = span.parent_id == hop.span_id or span.parent_id in between
        return span.service == "tidemark-storage" and below

    return matches


async def test_a_waiting_pull_is_woken_by_a_publish(
    traced: UnaryClient, receiver: OtlpReceiver
) -> None:
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer(__name__)
    with tracer.start_as_current_span("waits") as waits:
        pull = asyncio.create_task(traced.pull(f"{TOPIC}/bob", wait_ms=limits.PULL_WAIT_MS_MAX))
    trace_id = waits.get_span_context().trace_id
    await receiver.span(
        "the reserve that finds nothing",
        lambda span: (span.service, span.trace_id) == ("tidemark-storage", trace_id),
    )
    assert not pull.done()

    await traced.store(f"{TOPIC}/bob", b"wake up")

    assert payloads_of(await in_time(pull)) == [b"wake up"]


async def test_a_pull_of_an_empty_queue_answers_that_there_is_nothing(
    shared_cluster: LocalCluster,
) -> None:
    async with connected(shared_cluster) as client:
        at_once = await client.pull(f"{TOPIC}/empty")
        after_a_wait = await client.pull(f"{TOPIC}/empty", wait_ms=1)
        await client.delete_topic()

    assert (at_once, after_a_wait) == ([], [])


# --- faults -------------------------------------------------------------------------------------


@dataclass
class Answered:
    """What publishers were told is stored, by queue."""

    by_queue: dict[str, list[bytes]] = field(default_factory=dict)
    enough: asyncio.Event = field(default_factory=asyncio.Event)

    async def publish_until_it_fails(self, client: UnaryClient, lmq_name: str) -> None:
        answered = self.by_queue.setdefault(lmq_name, [])
        while True:
            payload = b"%d" % len(answered)
            try:
                await client.store(lmq_name, payload)
            except STORAGE_IS_GONE:
                return
            answered.append(payload)
            if len(answered) == 20:
                self.enough.set()


async def test_what_was_answered_survives_kill_9_of_storage(
    cluster: LocalCluster, client: UnaryClient
) -> None:
    """S2: killed while publishes to many queues are on their way."""
    answered = Answered()
    queues = [f"{TOPIC}/{number}" for number in range(12)]
    publishers = [
        asyncio.create_task(answered.publish_until_it_fails(client, queue)) for queue in queues
    ]
    await in_time(answered.enough.wait())

    await cluster.kill("storage")
    await in_time(asyncio.gather(*publishers))
    await cluster.restart("storage")

    for queue, told in answered.by_queue.items():
        stored = await once_available(partial(client.drain, queue))
        assert stored[: len(told)] == told
        assert len(stored) <= len(told) + 1, "at most the one publish that had no answer"


async def test_the_link_to_storage_mends_by_itself_and_what_was_settled_stays_so(
    cluster: LocalCluster, client: UnaryClient
) -> None:
    """S2."""
    await client.store(f"{TOPIC}/ada", b"done")
    (done,) = await client.pull(f"{TOPIC}/ada")
    await client.ack(done)
    await client.store(f"{TOPIC}/ada", b"first", b"second")
    await client.store(f"{TOPIC}/ada", b"third")

    await cluster.kill("storage")
    with pytest.raises(STORAGE_IS_GONE):
        await client.store(f"{TOPIC}/ada", b"refused")
    await cluster.restart("storage")

    stored = await once_available(lambda: client.drain(f"{TOPIC}/ada"))
    assert stored == [b"first", b"second", b"third"]
    assert await client.store(f"{TOPIC}/ada", b"fourth") == 4
    topic = await client.topics.GetTopic(topic_pb2.GetTopicRequest(name=TOPIC))
    assert topic.topic.name == TOPIC


async def test_a_receipt_is_good_across_kill_9_of_the_broker(
    cluster: LocalCluster, client: UnaryClient
) -> None:
    """S2: the broker keeps nothing that must survive it."""
    await client.store(f"{TOPIC}/ada", b"hello")
    (delivery,) = await client.pull(f"{TOPIC}/ada")

    await cluster.kill("broker")
    await cluster.restart("broker")

    assert await once_available(lambda: client.ack(delivery)) == 1
    assert await client.pull(f"{TOPIC}/ada") == []


# --- the surface of the services ----------------------------------------------------------------


async def test_every_service_tells_its_health_and_describes_itself(
    shared_cluster: LocalCluster,
) -> None:
    """S1."""
    for name, services in GRPC_SERVICES.items():
        async with open_channel(shared_cluster.address(name)) as channel:
            health: Any = HealthStub(channel)  # published without the types of asyncio
            reflection: Any = ServerReflectionStub(channel)  # type: ignore[arg-type]

            for service in ("", *services):
                answer = await health.Check(HealthCheckRequest(service=service))
                assert answer.status == HealthCheckResponse.SERVING, service
            ask = ServerReflectionRequest(list_services="")
            (listed,) = [each async for each in reflection.ServerReflectionInfo(iter([ask]))]
            assert services <= {each.name for each in listed.list_services_response.service}
            asks = [ServerReflectionRequest(file_containing_symbol=each) for each in services]
            async for described in reflection.ServerReflectionInfo(iter(asks)):
                assert described.file_descriptor_response.file_descriptor_proto
