"""A collector for tests: takes spans over OTLP as a real one would, and lets tests wait for them.

It keeps what the services sent, in order of arrival, with the name of the service that sent it; it
never drops, samples or forwards.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1 import trace_pb2

from tidemark.clock import SystemClock

_SPANS_WITHIN_MS = 60_000

Part = tuple[str, str]
"""The service and the name of a span."""


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """A span as it arrived. Ids are numbers; a root has the parent 0."""

    service: str
    name: str
    trace_id: int
    span_id: int
    parent_id: int
    links: frozenset[tuple[int, int]]
    """Trace and span ids."""
    kind: str = ""
    attributes: Mapping[str, str | int] = field(default_factory=dict)

    @property
    def key(self) -> tuple[int, int]:
        return self.trace_id, self.span_id


@dataclass
class OtlpReceiver:
    """What has arrived so far."""

    address: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    """Everything as it came."""
    _arrived: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def environment(self) -> dict[str, str]:
        """What a service needs to send every span here, and soon."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{self.address}",
            "OTEL_METRICS_EXPORTER": "none",
            "OTEL_TRACES_SAMPLER": "parentbased_always_on",
            "OTEL_BSP_SCHEDULE_DELAY": "10",
        }

    async def span(self, what: str, matches: Callable[[ReceivedSpan], bool]) -> ReceivedSpan:
        """The first span that matches, waiting for it to arrive; `what` names it in a failure."""

        async def find() -> ReceivedSpan:
            async with self._arrived:
                while True:
                    for span in self.spans:
                        if matches(span):
                            return span
                    await self._arrived.wait()

        try:
            return await SystemClock().wait_for(find(), _SPANS_WITHIN_MS)
        except TimeoutError:
            seen = "\n".join(map(str, self.spans))
            raise AssertionError(f"{what} never arrived; these did:\n{seen}") from None

    async def picture(self, begin: ReceivedSpan, *wanted: Part) -> list[ReceivedSpan]:
        """The spans that parents and links connect with one, once these are among them."""

        async def grow() -> list[ReceivedSpan]:
            async with self._arrived:
                while True:
                    found = connected_with(begin, self.spans)
                    if set(wanted) <= {(span.service, span.name) for span in found}:
                        return found
                    await self._arrived.wait()

        try:
            return await SystemClock().wait_for(grow(), _SPANS_WITHIN_MS)
        except TimeoutError:
            found = connected_with(begin, self.spans)
            missing = set(wanted) - {(span.service, span.name) for span in found}
            others = "\n".join(str(span) for span in self.spans if span not in found)
            raise AssertionError(f"{missing} is not connected; these are not:\n{others}") from None

    async def take(self, request: ExportTraceServiceRequest) -> None:
        async with self._arrived:
            self.raw.append(request.SerializeToString())
            self.spans += _received(request)
            self._arrived.notify_all()


def connected_with(begin: ReceivedSpan, spans: Iterable[ReceivedSpan]) -> list[ReceivedSpan]:
    """Spans that are reached over parents and links, in either direction."""
    left = [span for span in spans if span.key != begin.key]
    found, frontier = [begin], [begin]
    while frontier:
        neighbours = [span for span in left if any(_touch(span, each) for each in frontier)]
        left = [span for span in left if span not in neighbours]
        found += neighbours
        frontier = neighbours
    return found


def _touch(one: ReceivedSpan, other: ReceivedSpan) -> bool:
    child = (one.trace_id, one.parent_id) == other.key or (
        other.trace_id,
        other.parent_id,
    ) == one.key
    return child or one.key in other.links or other.key in one.links


class _Collector(TraceServiceServicer):
    def __init__(self, receiver: OtlpReceiver) -> None:
        self._receiver = receiver

    async def Export(
        self, request: ExportTraceServiceRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> ExportTraceServiceResponse:
        await self._receiver.take(request)
        return ExportTraceServiceResponse()


@asynccontextmanager
async def otlp_receiver() -> AsyncIterator[OtlpReceiver]:
    """A receiver on a free port."""
    receiver = OtlpReceiver()
    server = grpc.aio.server()
    add_TraceServiceServicer_to_server(_Collector(receiver), server)  # type: ignore[no-untyped-call]
    receiver.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield receiver
    finally:
        await server.stop(None)


def _received(request: ExportTraceServiceRequest) -> list[ReceivedSpan]:
    return [
        ReceivedSpan(
            service=_service_name(resource_spans),
            name=span.name,
            trace_id=_number(span.trace_id),
            span_id=_number(span.span_id),
            parent_id=_number(span.parent_span_id),
            links=frozenset((_number(link.trace_id), _number(link.span_id)) for link in span.links),
            kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
            attributes={
                each.key: each.value.string_value or each.value.int_value
                for each in span.attributes
            },
        )
        for resource_spans in request.resource_spans
        for scope_spans in resource_spans.scope_spans
        for span in scope_spans.spans
    ]


def _service_name(resource_spans: trace_pb2.ResourceSpans) -> str:
    attributes = resource_spans.resource.attributes
    return next(each.value.string_value for each in attributes if each.key == "service.name")


def _number(identity: bytes) -> int:
    return int.from_bytes(identity, "big")
