"""Telemetry: trace contexts on their way between processes, and where spans and figures go."""

import json
import os
import queue
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb2
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc

from tests.support.repository import ROOT
from tidemark import telemetry

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


class TestTraceContext:
    """S4: traces go from publisher to consumer across processes."""

    def test_without_a_trace_there_is_nothing_to_carry(self) -> None:
        assert telemetry.current_traceparent() == ""
        assert list(telemetry.inject([("key", "value")])) == [("key", "value")]

    def test_a_traceparent_survives_the_journey(self) -> None:
        context = telemetry.context_from_traceparent(TRACEPARENT)

        with telemetry.span(telemetry.tracer("test"), "work", context=context):
            assert telemetry.current_traceparent() == TRACEPARENT

        assert telemetry.current_traceparent() == ""

    def test_runs_that_are_not_recorded_carry_nothing_and_can_be_batched(self) -> None:
        traceparent = f"00-{TRACE_ID}-{SPAN_ID}-00"
        context = telemetry.context_from_traceparent(traceparent)

        with telemetry.span(telemetry.tracer("test"), "work", context=context):
            assert telemetry.current_traceparent() == ""
            assert list(telemetry.inject()) == [("traceparent", traceparent)]

    def test_metadata_carries_context_and_state_and_keeps_the_rest(self) -> None:
        arrived: list[tuple[str, str | bytes]] = [
            ("k", "v"),
            ("traceparent", TRACEPARENT),
            ("tracestate", "vendor=1"),
            ("b", b"x"),
        ]

        with telemetry.span(telemetry.tracer("test"), "work", context=telemetry.extract(arrived)):
            sent = list(telemetry.inject([("k", "v"), ("traceparent", "stale")]))

        assert sent == [("k", "v"), ("traceparent", TRACEPARENT), ("tracestate", "vendor=1")]

    def test_a_link_points_to_the_publisher(self) -> None:
        link = telemetry.link_from_traceparent(TRACEPARENT)

        assert link is not None
        assert f"{link.context.trace_id:032x}" == TRACE_ID
        assert f"{link.context.span_id:016x}" == SPAN_ID

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "junk",
            TRACEPARENT + "\n",
            TRACEPARENT.upper(),
            TRACEPARENT + "-more",
            f"ff-{TRACE_ID}-{SPAN_ID}-01",
            f"00-{'0' * 32}-{SPAN_ID}-01",
            f"00-{TRACE_ID}-{'0' * 16}-01",
            "\ud800" * 55,
            "0" * 1_000_000,
        ],
    )
    def test_what_is_not_a_context_is_ignored(self, text: str) -> None:
        """S3: bad input changes nothing."""
        assert telemetry.link_from_traceparent(text) is None
        for context in (
            telemetry.context_from_traceparent(text),
            telemetry.extract([("traceparent", text)]),
        ):
            assert not trace.get_current_span(context).get_span_context().is_valid

    @given(st.text(alphabet=st.characters()))
    def test_any_tracestate_is_survived(self, text: str) -> None:
        context = telemetry.extract([("traceparent", TRACEPARENT), ("tracestate", text)])

        assert trace.get_current_span(context).get_span_context().is_valid

    def test_binary_metadata_is_ignored(self) -> None:
        assert telemetry.extract([("traceparent", b"\xff")]) == {}
        assert telemetry.extract(None) == {}

    def test_without_a_destination_nothing_is_traced(self) -> None:
        with telemetry.span(telemetry.tracer("test"), "work") as span:
            span.set_attribute("key", 1)

            assert not telemetry.tracing_enabled()
            assert not span.is_recording()


# ------------------------------------------------------- a real service, and a real collector


class Collector(trace_grpc.TraceServiceServicer, metrics_grpc.MetricsServiceServicer):
    """An OTLP receiver that keeps what it is sent."""

    def __init__(self) -> None:
        self.requests: queue.Queue[Any] = queue.Queue()

    def Export(self, request: Any, context: object) -> Any:
        self.requests.put(request)
        if isinstance(request, trace_pb2.ExportTraceServiceRequest):
            return trace_pb2.ExportTraceServiceResponse()
        return metrics_pb2.ExportMetricsServiceResponse()

    def take_spans(self) -> dict[str, list[tuple[Any, Any]]]:
        """The (resource, span) pairs received since the last time, by the name of the span."""
        found: dict[str, list[tuple[Any, Any]]] = {}
        while not self.requests.empty():
            for resource in getattr(self.requests.get(), "resource_spans", ()):
                for span in (span for scope in resource.scope_spans for span in scope.spans):
                    found.setdefault(span.name, []).append((resource.resource, span))
        return found


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    receiver = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    trace_grpc.add_TraceServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
    metrics_grpc.add_MetricsServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield receiver, f"http://127.0.0.1:{port}"
    server.stop(None).wait()


ROOT_SPANS = 20
PROGRAM = """
import logging
from tidemark import telemetry
from tidemark.settings import BrokerSettings
tracer, meter = telemetry.tracer("before.setup"), telemetry.meter("before.setup")
counter = meter.create_counter("tidemark.published", unit="1")
running = telemetry.setup("broker", BrokerSettings.from_environment().telemetry)
remote = telemetry.context_from_traceparent("{traceparent}")
with telemetry.span(tracer, "publish", context=remote, attributes={{"messages": 3}}):
    link = telemetry.link_from_traceparent(telemetry.current_traceparent())
    logging.getLogger("program").info("published")
for _ in range({roots}):
    with telemetry.span(tracer, "root", links=[link, None]):
        pass
counter.add(3)
print(telemetry.tracing_enabled(), running.metrics_address, flush=True)
input()
running.shutdown()
"""

FIGURES = """
from tidemark import telemetry
from tidemark.settings import BrokerSettings
running = telemetry.setup("broker", BrokerSettings.from_environment().telemetry)
def broken():
    yield 7, {{}}
    raise RuntimeError("a set changed its size")
nan, endless = float("nan"), float("inf")
figures = dict(truth=True, nothing=None, nan=nan, endless=endless, large=2**64, text="7")
for name, value in figures.items():
    telemetry.observe("gauge", "tidemark." + name, "", lambda value=value: [(value, {{}})])
telemetry.observe("counter", "tidemark.sound", "", lambda: [(3, {{}}), (2.5, {{"topic": "a"}})])
telemetry.observe("counter", "tidemark.broken", "", broken)
input()
running.shutdown()
"""


def run_service(
    environ: dict[str, str],
    *,
    traceparent: str = TRACEPARENT,
    stderr: int = subprocess.PIPE,
    program: str = PROGRAM,
) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", program.format(traceparent=traceparent, roots=ROOT_SPANS)],
        env={"PATH": "/usr/bin", **environ},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


@pytest.mark.slow  # starts processes
class TestExport:
    """S4: traces, metrics and logs of a service reach those who collect them."""

    def test_spans_and_metrics_reach_the_collector(self, collector: tuple[Collector, str]) -> None:
        receiver, endpoint = collector
        service = run_service(
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
                "OTEL_TRACES_SAMPLER": "always_on",
                "OTEL_RESOURCE_ATTRIBUTES": "zone=a,service.instance.id=broker%2D0",
            }
        )

        said, logged = service.communicate("\n", timeout=60)

        assert (service.returncode, said) == (0, "True \n"), logged
        requests = list(receiver.requests.queue)
        assert any(isinstance(each, metrics_pb2.ExportMetricsServiceRequest) for each in requests)
        spans = receiver.take_spans()
        resource, published = spans["publish"][0]
        assert published.trace_id.hex() == TRACE_ID
        assert published.parent_span_id.hex() == SPAN_ID
        assert len(spans["root"]) == ROOT_SPANS
        assert spans["root"][0][1].links[0].span_id == published.span_id
        about = {each.key: each.value.string_value for each in resource.attributes}
        assert (about["service.name"], about["service.instance.id"]) == ("broker", "broker-0")
        assert about["zone"] == "a"
        line = json.loads(logged.splitlines()[0])
        assert (line["service"], line["instance"]) == ("broker", "broker-0")
        assert (line["trace_id"], line["span_id"]) == (TRACE_ID, published.span_id.hex())

    def test_every_process_is_an_instance_of_its_own(
        self, collector: tuple[Collector, str]
    ) -> None:
        """O1: two replicas, or a container before and after a restart, are two streams."""
        receiver, endpoint = collector
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_TRACES_SAMPLER": "always_on"}
        services = [run_service(environ) for _ in range(2)]

        logged = [service.communicate("\n", timeout=60)[1] for service in services]

        instances = {json.loads(lines.splitlines()[0])["instance"] for lines in logged}
        assert len(instances) == 2
        for service in services:
            place = f"{socket.gethostname()[:64]}-{service.pid}-"
            assert any(instance.startswith(place) for instance in instances)
        resources = [
            each.resource
            for request in receiver.requests.queue
            for each in getattr(request, "resource_spans", None) or request.resource_metrics
        ]
        assert len(resources) == 4, "spans and metrics of each"
        assert {
            each.value.string_value
            for resource in resources
            for each in resource.attributes
            if each.key == "service.instance.id"
        } == instances

    def test_unless_told_otherwise_the_callers_decision_is_followed_and_few_traces_begin_here(
        self, collector: tuple[Collector, str]
    ) -> None:
        receiver, endpoint = collector
        environ = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": endpoint}

        kept = run_service(environ)
        kept.communicate("\n", timeout=60)
        kept_spans = receiver.take_spans()
        left = run_service(environ, traceparent=f"00-{TRACE_ID}-{SPAN_ID}-00")
        left.communicate("\n", timeout=60)

        assert (kept.returncode, left.returncode) == (0, 0)
        assert "publish" in kept_spans
        assert len(kept_spans["root"]) == ROOT_SPANS, "they link to a trace that is kept"
        left_spans = receiver.take_spans()
        assert "publish" not in left_spans
        assert len(left_spans.get("root", [])) < ROOT_SPANS / 2

    @pytest.mark.parametrize(
        ("sampler", "share", "kept"),
        [
            ("parentbased_traceidratio", "0", True),
            ("parentbased_traceidratio", "0.5", True),
            ("parentbased_always_off", "", True),
            ("traceidratio", "0", True),
            ("always_off", "", False),
        ],
    )
    def test_what_belongs_to_a_trace_that_is_kept_is_kept_whatever_the_ratio(
        self, collector: tuple[Collector, str], sampler: str, share: str, kept: bool
    ) -> None:
        """O2: a commit links to the publishes in it, and begins a trace of its own."""
        receiver, endpoint = collector
        service = run_service(
            {
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": endpoint,
                "OTEL_TRACES_SAMPLER": sampler,
                "OTEL_TRACES_SAMPLER_ARG": share,
            }
        )

        service.communicate("\n", timeout=60)

        spans = receiver.take_spans()
        assert {name: len(found) for name, found in spans.items()} == (
            {"publish": 1, "root": ROOT_SPANS} if kept else {}
        )

    def test_a_disabled_sdk_exports_nothing(self, collector: tuple[Collector, str]) -> None:
        receiver, endpoint = collector
        service = run_service(
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
                "OTEL_SDK_DISABLED": "true",
                "TIDEMARK_METRICS_LISTEN": "127.0.0.1:0",
            }
        )

        said, logged = service.communicate("\n", timeout=60)

        assert (service.returncode, said) == (0, "False \n"), logged
        assert receiver.requests.empty()

    def test_a_figure_that_is_no_number_spoils_no_other(
        self, collector: tuple[Collector, str]
    ) -> None:
        """O1: it is left out and logged once, however often it is read."""
        receiver, endpoint = collector
        environ = {
            "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": endpoint,
            "OTEL_METRIC_EXPORT_INTERVAL": "20",
        }
        service = run_service(environ, program=FIGURES)
        exports = [receiver.requests.get(timeout=60) for _ in range(3)]

        _, logged = service.communicate("\n", timeout=60)

        metrics = exports[-1].resource_metrics[0].scope_metrics[0].metrics
        points = {
            each.name: [
                point.as_int or point.as_double
                for point in (*each.gauge.data_points, *each.sum.data_points)
            ]
            for each in metrics
        }
        assert points == {
            "tidemark.truth": [1],
            "tidemark.sound": [3, 2.5],
            "tidemark.broken": [7],
        }
        lines = [json.loads(line) for line in logged.splitlines()]
        assert sorted(line["metric"].removeprefix("tidemark.") for line in lines) == [
            *("broken", "endless", "large", "nan", "nothing", "text"),
        ]

    def test_prometheus_can_scrape_the_metrics(self) -> None:
        service = run_service({"TIDEMARK_METRICS_LISTEN": "127.0.0.1:0"})
        assert service.stdout is not None
        traced, address = service.stdout.readline().split()

        with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
            page = answer.read().decode()
        service.communicate("\n", timeout=60)

        assert (service.returncode, traced) == (0, "False")
        assert "tidemark_published_total" in page
        assert 'service_name="broker"' in page
        assert "process_resident_memory_bytes" in page

    def test_a_service_without_a_collector_or_a_stderr_stops_in_good_order(self) -> None:
        read_end, write_end = os.pipe()
        os.close(read_end)
        service = run_service(
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1",
                "OTEL_TRACES_SAMPLER": "always_on",
            },
            stderr=write_end,
        )
        os.close(write_end)

        said, _ = service.communicate("\n", timeout=60)

        assert (service.returncode, said) == (0, "True \n")
