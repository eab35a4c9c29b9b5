"""Which messages are traced: the broker draws the sample where the publisher has not decided.

One cluster, which keeps everything, serves most tests: each has a topic of its own.
"""

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

import tidemark
from tests.support import unary_client
from tests.support.local_broker import in_time
from tests.support.otlp_receiver import OtlpReceiver, Part, ReceivedSpan, otlp_receiver
from tidemark.local.cluster import SERVICES, LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="module")

BROKER, STORAGE = "tidemark-broker", "tidemark-storage"
COMMIT: Part = (STORAGE, "storage commit")
SECRET = b"a secret payload"

CONSUMER = """
import asyncio, sys, tidemark
async def main(address, queue):
    async with tidemark.connect(address) as client, client.subscribe([queue]) as deliveries:
        print(await anext(deliveries), flush=True)
        await asyncio.Event().wait()
asyncio.run(main(*sys.argv[1:]))
"""


def life(topic: str) -> tuple[Part, ...]:
    """The spans of a message from its publish to its end."""
    return (
        (BROKER, f"publish {topic}"),
        (STORAGE, "storage append"),
        (BROKER, f"deliver {topic}"),
        (BROKER, f"ack {topic}"),
        (STORAGE, "storage settle"),
    )


@dataclass(frozen=True)
class Traced:
    """A cluster, and the receiver of its spans."""

    cluster: LocalCluster
    receiver: OtlpReceiver

    def connect(self) -> tidemark.Client:
        """A client that does not trace."""
        return tidemark.connect(self.cluster.address("broker"), client_id="plain")

    async def publishes(self, topic: str, wanted: int) -> list[ReceivedSpan]:
        """The broker's spans of publishes, once there are so many."""

        def find() -> list[ReceivedSpan] | None:
            part = life(topic)[0]
            found = [span for span in self.receiver.spans if (span.service, span.name) == part]
            return found if len(found) >= wanted else None

        def seen() -> str:
            return str(Counter(span.name for span in self.receiver.spans))

        return await self.receiver.until(find, seen)


@asynccontextmanager
async def running(directory: Path, **sampler: str) -> AsyncIterator[Traced]:
    async with otlp_receiver() as receiver:
        environment = {name: {**receiver.environment, **sampler} for name in SERVICES}
        data_dir, log_dir = directory / "data", directory / "logs"
        async with LocalCluster(
            data_dir, log_dir=log_dir, environment=environment, partitions=4
        ) as cluster:
            yield Traced(cluster, receiver)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def traced(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Traced]:
    async with running(tmp_path_factory.mktemp("sampling")) as traced:
        yield traced


async def cycle(client: tidemark.Client, queue: str, messages: int) -> None:
    """Messages that are published one by one, delivered and acknowledged."""
    publisher = await client.publisher(queue)
    for _ in range(messages):
        await publisher.publish(SECRET)
    async with client.subscribe([queue]) as deliveries:
        for _ in range(messages):
            await (await in_time(anext(deliveries))).ack()
        await deliveries.flush()


async def test_every_message_of_a_publisher_that_does_not_trace_has_one_whole_trace_at_ratio_1(
    traced: Traced,
) -> None:
    """O2: from the broker's publish to the settlement, down to the commits."""
    async with traced.connect() as client:
        await client.create_topic("whole")
        await cycle(client, "whole/ada", 20)

    roots = await traced.publishes("whole", 20)
    assert len({root.trace_id for root in roots}) == 20
    for root in roots:
        assert root.parent_id == 0
        spans = await traced.receiver.picture(root, *life("whole"), COMMIT)
        of_trace = [span for span in spans if span.trace_id == root.trace_id]
        names = Counter((span.service, span.name) for span in of_trace)
        assert names == Counter(life("whole")), "once each, in the trace of the publish"
    everything = b"".join(traced.receiver.raw)
    assert SECRET not in everything
    assert b"whole/ada" not in everything, "there may be millions of lite queues"


async def test_a_share_of_the_messages_is_traced_and_each_of_those_from_publish_to_settle(
    tmp_path: Path,
) -> None:
    """O2: bounds of ten standard deviations, so that chance never fails this test."""
    sampler = {
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "0.25",
    }
    async with running(tmp_path, **sampler) as traced:
        async with traced.connect() as client:
            await client.create_topic("some")
            await cycle(client, "some/ada", 400)

        roots = await traced.publishes("some", 14)

        def parts() -> dict[int, Counter[Part]]:
            found: dict[int, Counter[Part]] = {root.trace_id: Counter() for root in roots}
            for span in traced.receiver.spans:
                found.get(span.trace_id, Counter())[span.service, span.name] += 1
            return found

        def all_whole() -> bool | None:
            return all(each == Counter(life("some")) for each in parts().values()) or None

        await traced.receiver.until(all_whole, lambda: str(parts()))
    assert len(await traced.publishes("some", 14)) <= 186, "100 is to be expected"


async def test_a_publisher_that_decided_against_a_trace_is_followed(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O2: or the share of a publisher that samples by itself would be drawn a second time."""
    provider = TracerProvider(ALWAYS_OFF, shutdown_on_exit=False)

    async with traced.connect() as client:
        await client.create_topic("decided")
        with monkeypatch.context() as patched:
            patched.setattr(trace, "_TRACER_PROVIDER", provider)
            patched.setattr("tidemark.client.spans._tracer", provider.get_tracer("test"))
            await cycle(client, "decided/ada", 5)
        await cycle(client, "decided/ada", 1)

    (root,) = await traced.publishes("decided", 1)
    await traced.receiver.picture(root, *life("decided"))
    assert len([span for span in traced.receiver.spans if span.name == "ack decided"]) == 1


async def test_what_a_client_held_that_is_gone_ends_in_the_trace_of_its_publish(
    traced: Traced,
) -> None:
    """O2, V8: its messages go back without a word of its own."""
    async with traced.connect() as client:
        await client.create_topic("held")
        await (await client.publisher("held/ada")).publish(SECRET)
    command = (sys.executable, "-c", CONSUMER, traced.cluster.address("broker"), "held/ada")
    consumer = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
    assert consumer.stdout is not None
    await in_time(consumer.stdout.readline())

    consumer.kill()
    await consumer.wait()

    (publish,) = await traced.publishes("held", 1)
    ended = (STORAGE, "disconnect held")
    spans = await traced.receiver.picture(publish, (BROKER, "deliver held"), ended)
    (disconnect,) = [span for span in spans if (span.service, span.name) == ended]
    assert (disconnect.trace_id, disconnect.parent_id) == publish.key


async def test_a_message_that_plain_calls_publish_pull_and_settle_is_one_picture(
    traced: Traced,
) -> None:
    """O2: the sample is drawn once, for the call that publishes."""
    topic = unary_client.TOPIC
    async with unary_client.connected(traced.cluster) as client:
        await client.store(f"{topic}/ada", SECRET)
        (delivery,) = await client.pull(f"{topic}/ada", wait_ms=60_000)

    await traced.cluster.restart("broker")  # it knows nothing of the delivery any more
    async with unary_client.connected(traced.cluster) as client:
        await client.ack(delivery)

    (publish,) = await traced.publishes(topic, 1)
    ended = (STORAGE, f"ack {topic}")
    spans = await traced.receiver.picture(
        publish,
        (BROKER, "tidemark.api.broker.v1.BrokerService/Publish"),
        (STORAGE, "storage append"),
        COMMIT,
        (BROKER, f"deliver {topic}"),
        ended,
    )
    assert publish.parent_id != 0, "below the call"
    ids = f"{publish.trace_id:032x}-{publish.span_id:016x}"
    assert delivery.traceparent.startswith(f"00-{ids}-")
    (ack,) = [span for span in spans if (span.service, span.name) == ended]
    assert ack.links == {publish.key}
