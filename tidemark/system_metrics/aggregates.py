"""Aggregates of many samples of a figure, in constant space. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Aggregate:
    """The aggregate of one figure."""

    name: str
    samples: int
    least: float
    most: float
    mean: float
    last: float


class Aggregates:
    """Aggregates samples of any number of figures until cleared."""

    def __init__(self) -> None:
        self._figures: dict[str, tuple[int, float, float, float, float]] = {}

    def add(self, figures: Mapping[str, float]) -> None:
        """Add one sample of each given figure."""
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
        """The aggregates since the last `clear`, by name."""
        return [
            Aggregate(name, count, least, most, total / count, last)
            for name, (count, least, most, total, last) in sorted(self._figures.items())
        ]

    def clear(self) -> None:
        self._figures.clear()
