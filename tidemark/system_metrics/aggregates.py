"""Aggregates: what many samples of a figure come to, in constant space.

Pure: it is given samples and never takes one.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Aggregate:
    """The samples of one figure."""

    name: str
    samples: int
    least: float
    most: float
    mean: float
    last: float


class Aggregates:
    """Samples of any number of figures, until they are cleared."""

    def __init__(self) -> None:
        self._figures: dict[str, tuple[int, float, float, float, float]] = {}

    def add(self, figures: Mapping[str, float]) -> None:
        """One sample of each figure; one that is missing was not sampled this time."""
        for name, value in figures.items():
            count, least, most, total, _ = self._figures.get(name, (0, value, value, 0.0, value))
            self._figures[name] = (
                count + 1,
                min(least, value),
                max(most, value),
                total + value,
                value,
            )

    def read(self) -> list[Aggregate]:
        """What the samples since the last `clear` come to, by name."""
        return [
            Aggregate(name, count, least, most, total / count, last)
            for name, (count, least, most, total, last) in sorted(self._figures.items())
        ]

    def clear(self) -> None:
        self._figures.clear()
