"""Figures: what a series of measurements comes to. Pure arithmetic.

The median stands for a series and the median absolute deviation for its spread: on a machine that
does other things too, both ignore the rounds that were disturbed.
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
        """Ratios round by round, so that a slow minute slows both sides of each."""
        pairs = zip(self.rounds, other.rounds, strict=True)
        return Figure(tuple(mine / theirs for mine, theirs in pairs))


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of the values do not exceed."""
    ordered = sorted(values)
    rank = math.ceil(len(ordered) * percent / 100)
    return ordered[max(rank, 1) - 1]
