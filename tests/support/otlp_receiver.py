"""A collector for tests: takes spans and metrics over OTLP, as a real one would.

It keeps what the services sent, in order of arrival, with the name and the instance of the service
that sent it; it never drops, samples or forwards.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import (
    MetricsServiceServicer,
    add_MetricsServiceServicer_to_server,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1 import trace_pb2

from tidemark.clock import SystemClock

_WITHIN_MS = 60_000

T = TypeVar("T")

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
    instance: str = ""
    begin_ns: int = 0
    end_ns: int = 0
    failed: bool = False
    """Whether its status is ERROR."""

    @property
    def key(self) -> tuple[int, int]:
        return self.trace_id, self.span_id


@dataclass(frozen=True, slots=True)
class ReceivedPoint:
    """The figure of one series as it arrived; of a histogram, the number of what it counted."""

    service: str
    instance: str
    name: str
    attributes: Mapping[str, str | int]
    value: float


@dataclass
class OtlpReceiver:
    """What has arrived so far."""

    address: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)
    points: list[ReceivedPoint] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    """Spans and metrics as they came."""
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

    @property
    def metrics_environment(self) -> dict[str, str]:
        """What a service needs to send its metrics here, and soon."""
        return {
            "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": f"http://{self.address}",
            "OTEL_METRIC_EXPORT_INTERVAL": "200",
        }

    async def span(self, what: str, matches: Callable[[ReceivedSpan], bool]) -> ReceivedSpan:
        """The first span that matches, waiting for it to arrive; `what` names it in a failure."""

        def find() -> ReceivedSpan | None:
            return next(filter(matches, self.spans), None)

        def seen() -> str:
            return f"{what} never arrived; these did:\n" + "\n".join(map(str, self.spans))

        return await self.until(find, seen)

    async def picture(self, begin: ReceivedSpan, *wanted: Part) -> list[ReceivedSpan]:
        """The spans that parents and links connect with one, once these are among them."""

        def missing(found: list[ReceivedSpan]) -> set[Part]:
            return set(wanted) - {(span.service, span.name) for span in found}

        def find() -> list[ReceivedSpan] | None:
            found = connected_with(begin, self.spans)
            return None if missing(found) else found

        def seen() -> str:
            found = connected_with(begin, self.spans)
            others = "\n".join(str(span) for span in self.spans if span not in found)
            return f"{missing(found)} is not connected; these are not:\n{others}"

        return await self.until(find, seen)

    async def metrics(self, *names: str, within_ms: int = _WITHIN_MS) -> None:
        """Return once each of these metrics has arrived."""

        def missing() -> set[str]:
            return set(names) - {point.name for point in self.points}

        await self.until(
            lambda: None if missing() else True, lambda: f"{missing()} never arrived", within_ms
        )

    async def until(
        self, find: Callable[[], T | None], seen: Callable[[], str], within_ms: int = _WITHIN_MS
    ) -> T:
        """What `find` finds, looking again whenever something has arrived."""

        async def look() -> T:
            async with self._arrived:
                while (found := find()) is None:
                    await self._arrived.wait()
                return found

        try:
            return await SystemClock().wait_for(look(), within_ms)
        except TimeoutError:
            raise AssertionError(seen()) from None

    async def take(self, request: ExportTraceServiceRequest | ExportMetricsServiceRequest) -> None:
        async with self._arrived:
            self.raw.append(request.SerializeToString())
            if isinstance(request, ExportTraceServiceRequest):
                self.spans += _spans_of(request)
            else:
                self.points += _points_of(request)
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


class _Traces(TraceServiceServicer):
    def __init__(self, receiver: OtlpReceiver) -> None:
        self._receiver = receiver

    async def Export(
        self, request: ExportTraceServiceRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> ExportTraceServiceResponse:
        await self._receiver.take(request)
        return ExportTraceServiceResponse()


class _Metrics(MetricsServiceServicer):
    def __init__(self, receiver: OtlpReceiver) -> None:
        self._receiver = receiver

    async def Export(
        self, request: ExportMetricsServiceRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> ExportMetricsServiceResponse:
        await self._receiver.take(request)
        return ExportMetricsServiceResponse()


@asynccontextmanager
async def otlp_receiver() -> AsyncIterator[OtlpReceiver]:
    """A receiver on a free port."""
    receiver = OtlpReceiver()
    server = grpc.aio.server()
    add_TraceServiceServicer_to_server(_Traces(receiver), server)  # type: ignore[no-untyped-call]
    add_MetricsServiceServicer_to_server(_Metrics(receiver), server)  # type: ignore[no-untyped-call]
    receiver.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield receiver
    finally:
        await server.stop(None)


def _spans_of(request: ExportTraceServiceRequest) -> list[ReceivedSpan]:
    return [
        ReceivedSpan(
            service=_of_service(resource_spans.resource, "name"),
            name=span.name,
            trace_id=_number(span.trace_id),
            span_id=_number(span.span_id),
            parent_id=_number(span.parent_span_id),
            links=frozenset((_number(link.trace_id), _number(link.span_id)) for link in span.links),
            kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
            attributes=_attributes(span.attributes),
            instance=_of_service(resource_spans.resource, "instance.id"),
            begin_ns=span.start_time_unix_nano,
            end_ns=span.end_time_unix_nano,
            failed=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        )
        for resource_spans in request.resource_spans
        for scope_spans in resource_spans.scope_spans
        for span in scope_spans.spans
    ]


def _points_of(request: ExportMetricsServiceRequest) -> list[ReceivedPoint]:
    return [
        ReceivedPoint(
            _of_service(resource_metrics.resource, "name"),
            _of_service(resource_metrics.resource, "instance.id"),
            metric.name,
            attributes,
            value,
        )
        for resource_metrics in request.resource_metrics
        for scope_metrics in resource_metrics.scope_metrics
        for metric in scope_metrics.metrics
        for attributes, value in _series_of(metric)
    ]


def _series_of(metric: Metric) -> Iterable[tuple[dict[str, str | int], float]]:
    for counted in metric.histogram.data_points:
        yield _attributes(counted.attributes), counted.count
    for point in [*metric.gauge.data_points, *metric.sum.data_points]:
        yield _attributes(point.attributes), point.as_double or point.as_int


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, str | int]:
    return {each.key: each.value.string_value or each.value.int_value for each in pairs}


def _of_service(resource: Resource, what: str) -> str:
    return str(_attributes(resource.attributes).get(f"service.{what}", ""))


def _number(identity: bytes) -> int:
    return int.from_bytes(identity, "big")
