"""Retries: when messages whose delivery failed are ready again, and where they go (V9).

Pure: randomness is an argument. A retry line keeps the slices of one lane that go behind messages
that were ready when they came back. Each has a turn: the end of the queue at that moment, so that
messages published later do not overtake it, then the reservation it came back from, so that a
message that fails again goes behind the others that wait.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from storage_svc.queue.run import Run, Slice
from tidemark.limits import NACK_DELAY_MS_MAX
from tidemark.topics import TopicSettings


class RetryPolicy(NamedTuple):
    """The settings of the topic for messages whose delivery failed."""

    delay_ms: int = 0
    delay_ms_max: int = 0  # 0: the longest delay of a nack
    multiplier: float = 1.0
    jitter: float = 0.0  # the share of the delay that chance may take off
    first: bool = False  # whether they go first, and hold back their lane while they are delayed

    @classmethod
    def of(cls, settings: TopicSettings) -> "RetryPolicy":
        return cls(
            settings.retry_delay_ms,
            settings.retry_delay_ms_max,
            settings.retry_multiplier,
            settings.retry_jitter,
            settings.retries_first,
        )

    def delay_after_ms(self, attempts: int, chance: float) -> int:
        """The delay after so many failed attempts, at least 1; `chance` is 0 up to 1."""
        if not self.delay_ms:
            return 0
        try:
            # Of floats: a power of whole numbers would take hours instead of overflowing.
            delay_ms = self.delay_ms * float(self.multiplier) ** (attempts - 1)
        except OverflowError:
            delay_ms = math.inf
        longest_ms = min(self.delay_ms_max or NACK_DELAY_MS_MAX, NACK_DELAY_MS_MAX)
        return math.ceil(min(delay_ms, longest_ms) * (1 - self.jitter * chance))


class Turn(NamedTuple):
    """When a slice of a retry line is handed out: the lower first."""

    after_offset: int = 0  # behind all messages before it
    reservation_id: int = 0  # that the slice came back from


class RetryLine:
    """Slices of one lane in the order of their turns; found by their start as well."""

    __slots__ = ("_order", "_slices")

    def __init__(self) -> None:
        self._order: list[tuple[Turn, int]] = []
        self._slices: dict[int, Slice] = {}

    def __len__(self) -> int:
        return len(self._order)

    @property
    def slices(self) -> list[Slice]:
        """All slices, in the order of their turns."""
        return [self._slices[start] for _, start in self._order]

    @property
    def after_offset(self) -> int:
        """The messages before it go before the first slice."""
        return self._order[0][0].after_offset

    def head(self) -> Slice:
        return self._slices[self._order[0][1]]

    def rest_at(self, start: int) -> tuple[Slice, Turn] | None:
        """The first slice with its turn, if it begins at an offset."""
        turn, first = self._order[0] if self._order else (Turn(), -1)
        return (self._slices[first], turn) if first == start else None

    def take(self, messages: int) -> Slice:
        """The first messages of the first slice."""
        turn, start = self._order[0]
        head = self._slices.pop(start)
        taken = head._replace(end=start + messages)
        if taken.end == head.end:
            del self._order[0]
        else:
            self._order[0] = turn, taken.end
            self._slices[taken.end] = head._replace(start=taken.end)
        return taken

    def add(self, slice_: Slice, turn: Turn) -> tuple[Slice, list[int]]:
        """Add a slice; returns it merged with its neighbours, and the starts of those."""
        swallowed: list[int] = []
        at = bisect_left(self._order, (turn, slice_.start))
        if at < len(self._order) and self._order[at] == (turn, slice_.end):
            joined = slice_.joined(self._slices[slice_.end])
            if joined is not None:
                del self._order[at], self._slices[slice_.end]
                swallowed.append(slice_.end)
                slice_ = joined
        if at > 0 and self._order[at - 1][0] == turn:
            joined = self._slices[self._order[at - 1][1]].joined(slice_)
            if joined is not None:
                at -= 1
                del self._order[at], self._slices[joined.start]
                swallowed.append(slice_.start)
                slice_ = joined
        self._order.insert(at, (turn, slice_.start))
        self._slices[slice_.start] = slice_
        return slice_, swallowed

    def of(self, run: Run) -> list[Slice]:
        """The slices of one run."""
        return [self._slices[start] for start in starts_within([run], self._slices)]

    def drop(self, runs: Sequence[Run]) -> list[int]:
        """Forget the slices of runs; returns their starts."""
        dropped = starts_within(runs, self._slices)
        for start in dropped:
            del self._slices[start]
        if dropped:
            self._order = [each for each in self._order if each[1] in self._slices]
        return dropped

    def keep(self, runs: Mapping[int, Run]) -> "list[dict[Any, Any] | list[Any]]":
        """Forget the slices of all other runs; returns the containers that held them."""
        before: list[dict[Any, Any] | list[Any]] = [self._slices, self._order]
        starts = starts_of(runs, self._slices)
        self._slices = {start: self._slices[start] for start in starts}
        self._order = [each for each in self._order if each[1] in self._slices] if starts else []
        return before


def starts_within(runs: Sequence[Run], starts: Collection[int]) -> list[int]:
    """Those of `starts` that lie in runs; the cost follows the smaller of the two."""
    if sum(run.messages for run in runs) < len(starts):
        return [at for run in runs for at in range(run.first_offset, run.end) if at in starts]
    runs = sorted(runs)
    first_offsets = [run.first_offset for run in runs]
    found = ((start, bisect_right(first_offsets, start) - 1) for start in starts)
    return [start for start, at in found if at >= 0 and start < runs[at].end]


def starts_of(runs: Mapping[int, Run], slices: Mapping[int, Slice]) -> list[int]:
    """The starts of slices of runs by their first offsets; the cost follows the smaller."""
    if len(slices) > len(runs):
        return starts_within(list(runs.values()), slices)
    return [start for start, each in slices.items() if each.run.first_offset in runs]
