"""The trace of a pass: from the driver over the executors down to the commits in storage."""

from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.spark.conftest import RunPass
from tests.support.exchange_client import append
from tests.support.storage_client import RunningStorage
from tidemark.clock import ManualClock

APPLY = "tidemark.api.storage.v1.RetentionService/ApplyRetention"
TRACERS = ("spark_batch.passes.jobs", "storage_svc.partition.spans", "tidemark.rpc.interceptors")


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """What is traced. The provider of a process can be set once, so it is put in place by hand."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    for module in TRACERS:
        monkeypatch.setattr(f"{module}._tracer", provider.get_tracer("test"))
    yield exporter
    provider.shutdown()


def named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


def id_of(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


def parent_id(span: ReadableSpan) -> int:
    return 0 if span.parent is None else span.parent.span_id


async def test_a_pass_is_one_trace_down_to_the_storage_commit(
    storage: RunningStorage, clock: ManualClock, retention: RunPass, spans: InMemorySpanExporter
) -> None:
    """S4: the executors, which are processes of their own, included."""
    await storage.create_topic("old", retention_enabled=True, retention_seconds=10)
    async with storage.exchange(0) as exchange:
        await exchange.ask(append("old/a", b"secret"))
        await clock.advance_ms(10_000)

        done = await retention()

    assert done.counts["expired"] == 1
    (began,) = named(spans, "retention pass")
    assert began.parent is None
    (call,) = named(spans, APPLY)
    assert parent_id(call) == id_of(began)
    (applied,) = named(spans, "storage applyretention")
    assert parent_id(applied) == id_of(call)
    commits = named(spans, "storage commit")
    assert id_of(call) in {link.context.span_id for span in commits for link in span.links}
    assert "secret" not in "".join(span.to_json() for span in spans.get_finished_spans())
