"""Figures: statistics of a series of measurements. Pure arithmetic.

A series is represented by its median, its spread by the median absolute deviation: both are robust
against rounds that other work on the machine disturbed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Figure:
    """One quantity, measured once per round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.rounds)

    @property
    def spread(self) -> float:
        """Median absolute deviation from the median."""
        middle = self.median
        return median(abs(value - middle) for value in self.rounds)

    def over(self, other: "Figure") -> "Figure":
        """Ratios round by round, so that a slow phase affects both sides."""
        pairs = zip(self.rounds, other.rounds, strict=True)
        return Figure(tuple(mine / theirs for mine, theirs in pairs))


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of the values do not exceed."""
    ordered = sorted(values)
    rank = math.ceil(len(ordered) * percent / 100)
    return ordered[max(rank, 1) - 1]
