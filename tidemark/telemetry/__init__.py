"""Telemetry: logs, traces and metrics of a service, set up once by its `__main__`.

Spans and instruments can be created with `tracer`, `span` and `meter` anywhere, at any time; until
`setup` finds a destination in the settings they do nothing. They contain no payload.
"""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidemark.service.identity import process_identity
from tidemark.settings import TelemetrySettings, unknown_variables
from tidemark.telemetry import logs
from tidemark.telemetry.metrics import Tally, counter, histogram, meter, observe, seconds
from tidemark.telemetry.traces import (
    LateSpan,
    context_from_traceparent,
    current_traceparent,
    extract,
    inject,
    is_in_trace_of,
    is_sampled,
    leave_trace,
    link_from_traceparent,
    span,
    traceparent_of,
    tracer,
    tracing_enabled,
)

if TYPE_CHECKING:
    from tidemark.telemetry.export import Exports

__all__ = [
    "LateSpan",
    "Tally",
    "Telemetry",
    "context_from_traceparent",
    "counter",
    "current_traceparent",
    "extract",
    "histogram",
    "inject",
    "is_in_trace_of",
    "is_sampled",
    "leave_trace",
    "link_from_traceparent",
    "meter",
    "observe",
    "seconds",
    "setup",
    "span",
    "traceparent_of",
    "tracer",
    "tracing_enabled",
]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Telemetry:
    """The exporters and providers that `setup` started. The caller shuts it down last."""

    _handler: logs.LineHandler
    _level_before: int
    _exports: "Exports | None" = None

    @property
    def metrics_address(self) -> str:
        """The address of the Prometheus endpoint, with the actual port; empty if there is none."""
        return "" if self._exports is None else self._exports.metrics_address

    def shutdown(self) -> None:
        """Send and write the rest. Blocks for a few seconds at most; safe to repeat."""
        exports, self._exports = self._exports, None
        if exports is not None:
            exports.stop()
        logs.remove(self._handler, self._level_before)


def setup(service_name: str, settings: TelemetrySettings) -> Telemetry:
    """Start logs, and traces and metrics if the settings name a destination.

    They name this process as a separate instance, unless the settings do. Once per process:
    OpenTelemetry keeps the first destination for good. Raises OSError when the Prometheus address
    cannot be listened on.
    """
    instance_id = settings.instance_id or process_identity()
    make_formatter = logs.JsonFormatter if settings.log_format == "json" else logs.TextFormatter
    handler = logs.LineHandler(logs.open_stderr(), make_formatter(service_name, instance_id))
    telemetry = Telemetry(handler, logs.install(handler, settings.log_level))
    try:
        telemetry._exports = _start_exports(service_name, settings, instance_id)
    except BaseException:
        telemetry.shutdown()
        raise
    # Logged here because a service cannot log earlier.
    for variable in unknown_variables():
        _log.warning("unknown variable in the environment", extra={"variable": variable})
    return telemetry


def _start_exports(
    service_name: str, settings: TelemetrySettings, instance_id: str
) -> "Exports | None":
    wanted = settings.traces_endpoint or settings.metrics_endpoint or settings.metrics_listen
    if settings.otel_sdk_disabled or not wanted:
        return None
    from tidemark.telemetry.export import Exports  # heavy: 0.5 s that idle telemetry does not pay

    return Exports(service_name, settings, instance_id)
