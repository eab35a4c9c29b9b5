"""Metrics: the instruments of the services.

Uses only OpenTelemetry's API: until `telemetry.setup` finds a destination, an instrument does
nothing and costs next to nothing. Figures that a service keeps anyway are read at export.
Attributes have few values: topics at most, never queues.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Counter, Histogram, Meter, Observation

from tidemark import __version__

TOPICS_MAX: Final = 100
"""Topics with their own series; later ones count as OTHER."""

OTHER: Final = "other"

SECONDS: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0, 600.0),
)
BYTES: Final = tuple(4.0**power for power in range(4, 13))
COUNTS: Final = (1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 10_000.0)

Attributes = Mapping[str, str | int]
Reading = tuple[float, Attributes]
"""A value and its attributes."""

_INT64_MAX: Final = 2**63 - 1
"""OTLP integers have 64 bits."""

_log = logging.getLogger(__name__)
_NO_ATTRIBUTES: Final[Sequence[Attributes]] = ({},)
_zeros: list[tuple[Counter, Sequence[Attributes]]] = []
_exported = False
_faulty: set[str] = set()
"""Metrics that could not be read; logged once each, because they are read at every interval."""


def meter(name: str) -> Meter:
    """The meter of a module, `meter(__name__)`. It can be created before telemetry is set up."""
    return metrics.get_meter(name, __version__)


def counter(
    name: str, description: str, *, unit: str = "", zeros: Sequence[Attributes] = _NO_ATTRIBUTES
) -> Counter:
    """A counter that starts at 0 for each of `zeros`: rates need a start value."""
    made = meter("tidemark").create_counter(name, unit, description)
    _zeros.append((made, zeros))
    return made


def histogram(
    name: str, description: str, buckets: Sequence[float], *, unit: str = ""
) -> Histogram:
    """A histogram with suitable buckets; see `SECONDS`, `BYTES` and `COUNTS`."""
    return meter("tidemark").create_histogram(
        name, unit, description, explicit_bucket_boundaries_advisory=buckets
    )


def seconds(name: str, description: str) -> Histogram:
    """A histogram of durations."""
    return histogram(name, description, SECONDS, unit="s")


def observe(
    kind: Literal["gauge", "counter"],
    name: str,
    description: str,
    read: Callable[[], Iterable[Reading]],
    *,
    unit: str = "",
) -> None:
    """Expose figures that are kept anyway. Another thread calls `read`, which must only read.

    No effect if metrics have no destination. A value that cannot be exported is skipped, because an
    exporter would reject the whole batch.
    """
    if not _exported:
        return

    def callback(_: CallbackOptions) -> Iterator[Observation]:
        try:
            for value, attributes in read():
                number = exportable(value)
                if number is None:
                    _warn_once(name, f"{type(value).__name__} is not a finite number")
                else:
                    yield Observation(number, attributes)
        except Exception as error:
            _warn_once(name, f"{type(error).__name__}: {error}")

    tidemark_meter = meter("tidemark")
    if kind == "gauge":
        tidemark_meter.create_observable_gauge(name, [callback], unit, description)
    else:
        tidemark_meter.create_observable_counter(name, [callback], unit, description)


def exportable(value: object) -> int | float | None:
    """The value in a form that every exporter accepts; None if there is none.

    A bool is a number for Python and for Prometheus, but OTLP rejects the batch.
    """
    if isinstance(value, int):
        return int(value) if -_INT64_MAX <= value <= _INT64_MAX else None
    return value if isinstance(value, float) and math.isfinite(value) else None


def _warn_once(name: str, why: str) -> None:
    if name not in _faulty:
        _faulty.add(name)
        _log.warning("a metric cannot be read", extra={"metric": name, "why": why})


def begin() -> None:
    """Metrics have a destination from now on. Called once, by the exporter setup."""
    global _exported
    _exported = True
    for each, zeros in _zeros:
        for attributes in zeros:
            each.add(0, attributes)


class Tally:
    """Counts messages by topic and word in plain integers, cheaply enough to be always on."""

    __slots__ = ("_counts", "_word")

    def __init__(self, word: str = "") -> None:
        """`word` is the name of the second attribute, if any."""
        self._word = word
        self._counts: dict[str, dict[str, int]] = {}

    def add(self, messages: int, lmq_name: str, word: str = "") -> None:
        topic = lmq_name.partition("/")[0]
        counts = self._counts.get(topic)
        if counts is None:
            if len(self._counts) >= TOPICS_MAX or not topic:
                topic = OTHER
            counts = self._counts.setdefault(topic, {})
        counts[word] = counts.get(word, 0) + messages

    def read(self) -> Iterator[Reading]:
        # Atomic copies: the event loop keeps counting in another thread.
        for topic, counts in list(self._counts.items()):
            for word, messages in list(counts.items()):
                yield (
                    messages,
                    {"topic": topic, self._word: word} if self._word else {"topic": topic},
                )
