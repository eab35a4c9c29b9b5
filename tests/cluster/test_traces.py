"""Traces of whole clusters, as a real collector receives them from client and services."""

import json
from collections.abc import AsyncIterator

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

import tidemark
from tests.cluster.conftest import StartCluster
from tests.support.local_broker import in_time
from tests.support.otlp_receiver import OtlpReceiver, Part, ReceivedSpan
from tidemark.local.cluster import SERVICES, LocalCluster

CLIENT = "a-program"
QUEUE = "orders/ada"
SECRET = b"a secret payload"

DELEGATE = "tidemark.api.storage.v1.DelegationService/DelegateActions"

SERVICE_SPANS = {
    "broker": "tidemark-broker",
    "storage": "tidemark-storage",
    "lifecycle": "tidemark-lifecycle",
}


def at(service: str, name: str) -> Part:
    return SERVICE_SPANS.get(service, service), name


@pytest.fixture
def traced_program(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process traces. Its provider can be set once, so it is put in place by hand."""
    provider = TracerProvider(resource=Resource({"service.name": CLIENT}), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=f"http://{receiver.address}", insecure=True)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=10))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    monkeypatch.setattr("tidemark.client.spans._tracer", provider.get_tracer("test"))
    # Never shut down: that would wait for the receiver, which runs in this very thread.


@pytest.fixture
async def cluster(receiver: OtlpReceiver, start_cluster: StartCluster) -> LocalCluster:
    """Sends every span to the receiver."""
    environment = dict.fromkeys(SERVICES, receiver.environment)
    cluster: LocalCluster = await start_cluster(environment=environment)
    return cluster


@pytest.fixture
async def client(cluster: LocalCluster, traced_program: None) -> AsyncIterator[tidemark.Client]:
    """A client that traces."""
    async with tidemark.connect(cluster.address("broker"), client_id="tracer") as client:
        yield client


async def the_publish(receiver: OtlpReceiver) -> ReceivedSpan:
    return await receiver.span(
        "the client's publish",
        lambda span: (span.service, span.name) == (CLIENT, "publish orders"),
    )


async def the_commit(receiver: OtlpReceiver, *steps: ReceivedSpan) -> ReceivedSpan:
    """A commit that links to one of the steps; it ends, and arrives, after what is in it."""
    links = {step.key for step in steps}
    return await receiver.span(
        "the commit",
        lambda span: (
            (span.service, span.name) == at("storage", "storage commit")
            and not span.links.isdisjoint(links)
        ),
    )


def named(spans: list[ReceivedSpan], part: Part) -> list[ReceivedSpan]:
    return [span for span in spans if (span.service, span.name) == part]


def check_conventions(receiver: OtlpReceiver) -> None:
    """The attributes of every span of messages, and those that none has."""
    steps = [span for span in receiver.spans if "messaging.operation.name" in span.attributes]
    assert steps
    for span in steps:
        attributes = span.attributes
        assert attributes["messaging.system"] == "tidemark"
        assert attributes["messaging.operation.type"] in {"send", "receive", "process", "settle"}
        operation, topic = (
            attributes["messaging.operation.name"],
            attributes["messaging.destination.name"],
        )
        assert span.name == f"{operation} {topic}"
    everything = b"".join(receiver.raw)
    assert SECRET not in everything
    assert QUEUE.encode() not in everything, "there may be millions of lite queues"


async def test_the_life_of_a_message_is_one_picture(
    client: tidemark.Client, receiver: OtlpReceiver
) -> None:
    """S4, O2: publish, commit, delivery, handling and ack across three processes and ours."""
    await client.create_topic("orders")
    publisher = await client.publisher(QUEUE)

    await publisher.publish(SECRET, headers={"secret": SECRET.decode()})
    async with client.subscribe([QUEUE]) as deliveries:
        delivery = await in_time(anext(deliveries))
        with delivery.span():
            await delivery.ack()
        await deliveries.flush()

    publish = await the_publish(receiver)
    spans = await receiver.picture(
        publish,
        at("broker", "publish orders"),
        at("storage", "storage append"),
        at("storage", "storage commit"),
        at("broker", "deliver orders"),
        at(CLIENT, "process orders"),
        at(CLIENT, "ack orders"),
        at("broker", "ack orders"),
        at("storage", "storage settle"),
    )
    (in_broker,) = named(spans, at("broker", "publish orders"))
    assert (in_broker.trace_id, in_broker.parent_id) == publish.key
    (append,) = named(spans, at("storage", "storage append"))
    assert (append.trace_id, append.parent_id) == in_broker.key
    (ack,) = named(spans, at("broker", "ack orders"))
    commits = [await the_commit(receiver, step) for step in (in_broker, ack)]
    assert {commit.parent_id for commit in commits} == {0}, "it belongs to many traces at once"
    assert append.links == {commits[0].key}
    assert append.begin_ns <= commits[0].begin_ns <= commits[0].end_ns <= append.end_ns, "durable"
    (process,) = named(spans, at(CLIENT, "process orders"))
    assert process.links == {publish.key}
    (settle,) = named(spans, at(CLIENT, "ack orders"))
    assert (settle.trace_id, settle.parent_id) == process.key
    assert settle.links == {publish.key}
    assert (publish.kind, process.kind, ack.kind) == ("PRODUCER", "CONSUMER", "SERVER")
    assert (
        ack.attributes.items()
        >= {
            "messaging.operation.name": "ack",
            "messaging.operation.type": "settle",
            "messaging.consumer.group.name": "default",
            "messaging.batch.message_count": 1,
        }.items()
    )
    check_conventions(receiver)


async def test_a_message_whose_reservation_ran_out_stays_one_picture(
    client: tidemark.Client, receiver: OtlpReceiver
) -> None:
    """S4, V2."""
    await client.create_topic("orders")
    await (await client.publisher(QUEUE)).publish(SECRET)

    pulled = await client.pull(QUEUE, visibility_ms=100)
    async with client.subscribe([QUEUE]) as deliveries:
        again = await in_time(anext(deliveries))
        await again.ack()
        await deliveries.flush()

    assert [batch.attempt for batch in pulled.batches] == [0]
    assert again.attempt == 1
    spans = await receiver.picture(
        await the_publish(receiver),
        at("storage", "expire orders"),
        at("broker", "deliver orders"),
        at("broker", "ack orders"),
    )
    delivered = named(spans, at("broker", "deliver orders"))
    assert [span.attributes["tidemark.attempt_count"] for span in delivered] == [0, 1]
    check_conventions(receiver)


async def test_a_dead_lettered_message_is_one_picture_with_the_sweep_that_moved_it(
    client: tidemark.Client, receiver: OtlpReceiver
) -> None:
    """S4, L6: from its publisher over the sweep down to the commits, and to its second consumer."""
    await client.create_topic("graveyard")
    await client.create_topic("orders", max_attempts=1, dead_letter_topic="graveyard")
    await (await client.publisher(QUEUE)).publish(SECRET)

    async with client.subscribe([QUEUE]) as deliveries:
        await (await in_time(anext(deliveries))).nack()
        async with client.subscribe(["graveyard"]) as dead_letters:
            dead = await in_time(anext(dead_letters))
            await dead.ack()
            await dead_letters.flush()

    assert dead.headers["tidemark-dead-reason"] == "attempts_exhausted"
    publish = await the_publish(receiver)
    spans = await receiver.picture(
        publish,
        at("broker", "nack orders"),
        at("lifecycle", "sweep"),
        at("broker", DELEGATE),
        at("storage", "storage bury"),
        at("storage", "dead_letter orders"),
        at("storage", "publish graveyard"),
        at("broker", "deliver graveyard"),
        at("broker", "ack graveyard"),
    )
    (sweep, *_) = named(spans, at("lifecycle", "sweep"))
    assert sweep.parent_id == 0, "a trace of its own"
    (bury,) = named(spans, at("storage", "storage bury"))
    (dead_letter,) = named(spans, at("storage", "dead_letter orders"))
    assert dead_letter.parent_id == bury.span_id
    assert dead_letter.links == {publish.key}
    delegated = {span.key for span in named(spans, at("broker", DELEGATE))}
    assert (bury.trace_id, bury.parent_id) in delegated
    await the_commit(receiver, *named(spans, at("broker", DELEGATE)))
    check_conventions(receiver)


async def test_what_a_service_logs_about_a_message_names_the_trace_of_its_publisher(
    client: tidemark.Client, cluster: LocalCluster, receiver: OtlpReceiver
) -> None:
    """S4: from the log line of one process to the trace that began in another."""
    await client.create_topic("orders")
    await (await client.publisher(QUEUE)).publish(SECRET)

    async with client.subscribe([QUEUE]) as deliveries:
        await (await in_time(anext(deliveries))).dead_letter("not wanted")

    publish = await the_publish(receiver)
    settle = await receiver.span(
        "the settlement in storage",
        lambda span: (span.name, span.trace_id) == ("storage settle", publish.trace_id),
    )
    await cluster.terminate("storage")  # all that it logged is written now
    assert cluster.log_dir is not None
    log = (cluster.log_dir / "storage.log").read_text()
    (line,) = [line for line in log.splitlines() if "messages were deleted" in line]
    logged = json.loads(line)
    assert (int(logged["trace_id"], 16), int(logged["span_id"], 16)) == settle.key
    assert SECRET.decode() not in log
