"""Settings of logs, traces and metrics, the same in every service."""

from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from tidemark.settings.declaration import Settings, setting
from tidemark.settings.variables import LISTEN, Choice, Share, Switch, Text

_FOLLOWS_CALLER: Final = "parentbased_"
_SAMPLERS: Final = ("always_on", "always_off", "traceidratio")
"""Those of OpenTelemetry, each with and without the prefix."""

_COLLECTOR: Final = Text("a URL, such as http://collector:4317")


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySettings(Settings):
    """Logs, traces and metrics. Variables that begin with OTEL_ are defined by OpenTelemetry; only
    those that decide whether data is exported are read here, the others by its SDK."""

    log_level: str = setting(
        "TIDEMARK_LOG_LEVEL",
        Choice(("debug", "info", "warning", "error")),
        default="info",
        doc="Minimum severity of log lines.",
    )
    log_format: str = setting(
        "TIDEMARK_LOG_FORMAT",
        Choice(("json", "text")),
        default="json",
        doc="One JSON object per line, or plain text.",
    )
    metrics_listen: str = setting(
        "TIDEMARK_METRICS_LISTEN",
        LISTEN,
        default="",
        doc="Address at which Prometheus scrapes metrics; empty: off.",
    )
    otel_sdk_disabled: bool = setting(
        "OTEL_SDK_DISABLED",
        Switch(),
        default=False,
        doc="Turns off all traces and metrics.",
    )
    otlp_endpoint: str = setting(
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        _COLLECTOR,
        default="",
        doc="Collector for traces and metrics over OTLP/gRPC; empty: off.",
    )
    otlp_traces_endpoint: str = setting(
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        _COLLECTOR,
        default="",
        doc="Collector for traces, if different.",
    )
    otlp_metrics_endpoint: str = setting(
        "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
        _COLLECTOR,
        default="",
        doc="Collector for metrics, if different.",
    )
    traces_exporter: str = setting(
        "OTEL_TRACES_EXPORTER",
        Choice(("otlp", "none")),
        default="otlp",
        doc="`none` turns traces off, although a collector is set for both.",
    )
    metrics_exporter: str = setting(
        "OTEL_METRICS_EXPORTER",
        Choice(("otlp", "none")),
        default="otlp",
        doc="`none` turns metrics off, although a collector is set for both.",
    )
    traces_sampler: str = setting(
        "OTEL_TRACES_SAMPLER",
        Choice(tuple(f"{prefix}{name}" for prefix in ("", _FOLLOWS_CALLER) for name in _SAMPLERS)),
        default="parentbased_traceidratio",
        doc="Which traces are kept. Those that begin with `parentbased_` follow the decision of a "
        "caller that traces. All but `always_off` also keep a trace that links to a kept one.",
    )
    traces_sampler_arg: float = setting(
        "OTEL_TRACES_SAMPLER_ARG",
        Share(),
        default=0.01,
        doc="The share of traces that `traceidratio` keeps; of messages, where the publisher does "
        "not trace.",
    )

    resource_attributes: str = setting(
        "OTEL_RESOURCE_ATTRIBUTES",
        Text("pairs name=value, separated by commas"),
        default="",
        doc="Added to all traces and metrics. `service.instance.id` replaces the one that is made "
        "of host and process.",
    )

    @property
    def follows_caller(self) -> bool:
        """Whether a caller that traces decides for all of the trace."""
        return self.traces_sampler.startswith(_FOLLOWS_CALLER)

    @property
    def sampled_share(self) -> float:
        """The share of the traces that begin here which is kept."""
        shares = {"always_on": 1.0, "always_off": 0.0, "traceidratio": self.traces_sampler_arg}
        return shares[self.traces_sampler.removeprefix(_FOLLOWS_CALLER)]

    @property
    def instance_id(self) -> str:
        """The name that was chosen for this process; empty if none was."""
        for pair in self.resource_attributes.split(","):
            key, _, value = pair.partition("=")
            if key.strip() == "service.instance.id":
                return unquote(value.strip())
        return ""

    @property
    def traces_endpoint(self) -> str:
        """Collector for spans; empty if traces are off."""
        if self.otel_sdk_disabled or self.traces_exporter == "none":
            return ""
        return self.otlp_traces_endpoint or self.otlp_endpoint

    @property
    def metrics_endpoint(self) -> str:
        """Collector for metrics; empty if they are not pushed."""
        if self.otel_sdk_disabled or self.metrics_exporter == "none":
            return ""
        return self.otlp_metrics_endpoint or self.otlp_endpoint
