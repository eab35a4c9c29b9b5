"""Traces from publisher to consumer, as links."""

import asyncio
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind

import tidemark
from tests.support.local_broker import in_time

QUEUE = "orders/a"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """What is traced. The provider of a process can be set once, so it is put in place by hand."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    monkeypatch.setattr("tidemark.client.spans._tracer", provider.get_tracer("test"))
    yield exporter
    provider.shutdown()


def of_kind(exporter: InMemorySpanExporter, kind: SpanKind) -> list[ReadableSpan]:
    return [
        span
        for span in exporter.get_finished_spans()
        if span.kind is kind and span.name.endswith(" orders")
    ]


async def test_handling_a_message_links_to_the_span_that_published_it(
    client: tidemark.Client, spans: InMemorySpanExporter
) -> None:
    """S4."""
    publisher = await client.publisher(QUEUE)
    await publisher.publish_many([b"first frame"])
    await in_time(asyncio.gather(*(publisher.publish(b"secret") for _ in range(3))))

    async with client.subscribe([QUEUE]) as deliveries:
        for _ in range(4):
            delivery = await in_time(anext(deliveries))
            with delivery.span():
                await delivery.ack()

    sent, processed = of_kind(spans, SpanKind.PRODUCER), of_kind(spans, SpanKind.CONSUMER)
    assert [span.name for span in sent] == ["publish orders"] * 4
    assert [span.name for span in processed] == ["process orders"] * 4
    published = {span.context.span_id for span in sent if span.context}
    linked = {link.context.span_id for span in processed for link in span.links}
    assert linked == published
    assert "secret" not in "".join(span.to_json() for span in spans.get_finished_spans())


async def test_publishes_whose_traces_are_not_kept_share_a_run(
    client: tidemark.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O2: each has a span of its own, and none of them is worth a run of its own."""
    provider = TracerProvider(ALWAYS_OFF, shutdown_on_exit=False)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    monkeypatch.setattr("tidemark.client.spans._tracer", provider.get_tracer("test"))
    publisher = await client.publisher(QUEUE)
    await publisher.publish_many([b"first frame"])

    await in_time(asyncio.gather(*(publisher.publish(b"x") for _ in range(100))))
    pulled = await client.pull(QUEUE)

    assert sum(len(batch) for batch in pulled.batches) > 10
    assert len(pulled.batches) <= 3
    assert {batch.traceparent for batch in pulled.batches} == {""}


async def test_without_tracing_a_run_carries_no_context(client: tidemark.Client) -> None:
    publisher = await client.publisher(QUEUE)
    await asyncio.gather(*(publisher.publish(b"x") for _ in range(10)))

    pulled = await client.pull(QUEUE)

    assert {batch.traceparent for batch in pulled.batches} == {""}
    with pulled.batches[0].span() as span:
        assert not span.is_recording()
