"""Metrics: the instruments that services count with.

Uses OpenTelemetry's API alone: until `telemetry.setup` finds somewhere to send figures to, an
instrument does nothing and costs next to nothing.
"""

from opentelemetry import metrics
from opentelemetry.metrics import Meter

from tidemark import __version__


def meter(name: str) -> Meter:
    """The meter of a module, `meter(__name__)`. May be made before telemetry is set up."""
    return metrics.get_meter(name, __version__)
