"""The figures of `tidemark top`, with rates from two samples of the partitions.

Pure. Rates are derived from counters in storage, so a sample costs the same for ten queues and for
a million. A counter that went back gives no rate rather than a wrong one.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tidemark.client.admin.values import Partition, Sweeper

_BARS: Final = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Sample:
    """The partitions and their sweepers at one moment."""

    at_ms: int
    """By the monotonic clock."""
    partitions: Sequence[Partition]
    sweepers: Mapping[int, Sweeper]
    sweeps_unknown: str = ""
    """Why the sweepers are unknown."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates per second; None if unknown."""

    published: float | None = None
    delivered: float | None = None
    acked: float | None = None
    commits: float | None = None


@dataclass(frozen=True, slots=True)
class PartitionView:
    """One partition: its figures, its rates, its sweep."""

    partition: Partition
    rates: Rates
    sweeper: Sweeper | None

    @property
    def healthy(self) -> bool:
        failing = self.sweeper is not None and self.sweeper.failures > 0
        return self.partition.state == "SERVING" and not failing


@dataclass(frozen=True, slots=True)
class View:
    """The whole cluster."""

    rates: Rates
    partitions: tuple[PartitionView, ...]
    serving: int
    queues: int
    loaded: int
    messages: int
    bytes: int
    reservations: int
    paused_queues: int
    paused_topics: int
    sweeps_unknown: str

    @property
    def idle(self) -> int:
        return self.queues - self.loaded


def view_of(before: Sample | None, after: Sample) -> View:
    """The current figures, with rates since the previous sample."""
    earlier = {each.partition: each for each in before.partitions} if before is not None else {}
    seconds = (after.at_ms - before.at_ms) / 1000 if before is not None else 0.0
    partitions = tuple(
        PartitionView(
            each,
            _rates(earlier.get(each.partition), each, seconds),
            after.sweepers.get(each.partition),
        )
        for each in after.partitions
    )
    known = after.partitions
    return View(
        rates=_sum([each.rates for each in partitions]),
        partitions=partitions,
        serving=sum(each.state == "SERVING" for each in known),
        queues=sum(each.queues for each in known),
        loaded=sum(each.materialized_queues for each in known),
        messages=sum(each.messages for each in known),
        bytes=sum(each.bytes for each in known),
        reservations=sum(each.reservations for each in known),
        paused_queues=sum(each.paused_queues for each in known),
        paused_topics=max((each.paused_topics for each in known), default=0),
        sweeps_unknown=after.sweeps_unknown,
    )


def _rates(before: Partition | None, after: Partition, seconds: float) -> Rates:
    if before is None or seconds <= 0:
        return Rates()

    def rate(earlier: int, now: int) -> float | None:
        return (now - earlier) / seconds if now >= earlier else None

    return Rates(
        rate(before.published, after.published),
        rate(before.delivered, after.delivered),
        rate(before.acked, after.acked),
        rate(before.commits, after.commits),
    )


def _sum(rates: Sequence[Rates]) -> Rates:
    """The sums of the known rates; None if none is known."""

    def total(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) if known else None

    return Rates(
        total([each.published for each in rates]),
        total([each.delivered for each in rates]),
        total([each.acked for each in rates]),
        total([each.commits for each in rates]),
    )


class History:
    """The last values of one rate, drawn as a row of bars."""

    def __init__(self, size_max: int = 500) -> None:
        self._values: deque[float] = deque(maxlen=size_max)

    def add(self, value: float | None) -> None:
        if value is not None:
            self._values.append(value)

    def bars(self, width: int) -> str:
        """The newest value is on the right; the highest one shown has full height."""
        shown = list(self._values)[-width:] if width > 0 else []
        highest = max(shown, default=0)
        if not highest:
            return (" " * len(shown)).rjust(max(0, width))
        steps = len(_BARS) - 1
        # Rounded up, so that every non-zero value is visible.
        line = "".join(_BARS[min(steps, int(-(-value * steps // highest)))] for value in shown)
        return line.rjust(width)
