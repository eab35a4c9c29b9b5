"""Export of traces and metrics to an OTLP collector, and of metrics to Prometheus.

The only module that imports OpenTelemetry's SDK and exporters. They are heavy, so it is imported
only once the settings name a destination. Endpoints, headers, certificates, batch sizes and
samplers come from the standard OTEL_ variables, which the SDK reads itself.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    Decision,
    ParentBased,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util.types import Attributes
from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

from tidemark import __version__
from tidemark.clock import SystemClock
from tidemark.settings import TelemetrySettings
from tidemark.settings.variables import split_address
from tidemark.telemetry.metrics import begin
from tidemark.telemetry.traces import draw_share, is_drawn

_log = logging.getLogger(__name__)

# A collector that does not answer must not use up the grace period of a stopping service.
_STOP_MS_MAX: Final = 3_000

# As for all channels: the exporters repeat calls themselves, with a limit (ADR 39).
_CHANNEL_OPTIONS: Final[Any] = (("grpc.enable_retries", 0),)


class _WholeTraces(TraceIdRatioBased):
    """Samples a share of all traces by their ids, and every span that belongs to a sampled trace.

    A commit begins its own trace, with links to those of the publishers. If it was drawn at random,
    sampled traces would end without their commit. A trace that the broker has drawn is not drawn
    again. A sampled caller is followed also without `parentbased_`.
    """

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        parent = trace.get_current_span(parent_context).get_span_context()
        linked = any(link.context.trace_flags.sampled for link in links or ())
        if linked or parent.trace_flags.sampled or is_drawn(parent_context):
            return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes, trace_state)
        return super().should_sample(
            parent_context, trace_id, name, kind, attributes, links, trace_state
        )


class Exports:
    """The background exporters of traces and metrics."""

    def __init__(self, service_name: str, settings: TelemetrySettings, instance_id: str) -> None:
        ours = {
            "service.name": service_name,
            "service.instance.id": instance_id,
            "service.version": __version__,
        }
        resource = Resource.create(ours).merge(OTELResourceDetector().detect())
        self._stops: list[Callable[[], object]] = []
        self.metrics_address = ""
        readers: list[MetricReader] = []
        if settings.metrics_listen:  # first, because only this one can fail
            readers.append(self._start_prometheus(settings.metrics_listen))
        if settings.metrics_endpoint:
            exporter = OTLPMetricExporter(
                endpoint=settings.metrics_endpoint, channel_options=_CHANNEL_OPTIONS
            )
            readers.append(PeriodicExportingMetricReader(exporter))
        if readers:
            provider = MeterProvider(readers, resource=resource, shutdown_on_exit=False)
            metrics.set_meter_provider(provider)
            begin()
            self._stops.append(provider.shutdown)
        if settings.traces_endpoint:
            self._start_traces(settings, resource)

    def stop(self) -> None:
        """Send the rest, within a bounded time."""
        threads = [threading.Thread(target=_run, args=(stop,), daemon=True) for stop in self._stops]
        for thread in threads:
            thread.start()
        clock = SystemClock()
        deadline_ms = clock.monotonic_ms() + _STOP_MS_MAX
        for thread in threads:
            thread.join(max(deadline_ms - clock.monotonic_ms(), 0) / 1000)

    def _start_traces(self, settings: TelemetrySettings, resource: Resource) -> None:
        share = settings.sampled_share
        sampler: Sampler = _WholeTraces(share)
        if settings.traces_sampler == "always_off":
            sampler = ALWAYS_OFF
        elif settings.follows_caller:
            sampler = ParentBased(sampler)
        draw_share(share)
        provider = TracerProvider(sampler, resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(
            endpoint=settings.traces_endpoint, channel_options=_CHANNEL_OPTIONS
        )
        provider.add_span_processor(BatchSpanProcessor(exporter))
        trace.set_tracer_provider(provider)
        self._stops.append(provider.shutdown)

    def _start_prometheus(self, listen: str) -> MetricReader:
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        host, port = split_address(listen)
        server, _ = start_http_server(port, host, registry)
        self.metrics_address = f"{listen.rpartition(':')[0]}:{server.server_port}"

        def close() -> None:
            server.shutdown()
            server.server_close()

        self._stops.append(close)
        return PrometheusMetricReader(registry=registry)


def _run(stop: Callable[[], object]) -> None:
    try:
        stop()
    except Exception:
        _log.warning("an exporter did not stop cleanly", exc_info=True)
