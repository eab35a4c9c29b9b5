"""Settled reservations that a queue keeps for a while, to answer repeated settlements (V6).

Pure. Every queue may keep some; beyond that the queues of a partition share a budget.
"""

from collections.abc import Iterator
from itertools import islice

SETTLED_PER_QUEUE_MIN = 1024
"""Settled reservations that every queue may keep."""

SETTLED_SHARED_MAX = 25_000
"""Settled reservations that the queues of a partition share beyond that, at some 800 bytes each. A
queue may use the rest: half of them if it is alone, more than a frame of settlements holds."""

_FORGOTTEN_AT_ONCE = 2
"""A queue that is above its share gives it up gradually."""


class SettledBudget:
    """How many settled reservations the queues of a partition keep together."""

    __slots__ = ("total",)

    def __init__(self) -> None:
        self.total = 0


class SettledReservations:
    """Those of one queue, by id, oldest first."""

    __slots__ = ("_budget", "_ids")

    def __init__(self, budget: SettledBudget) -> None:
        self._budget = budget
        self._ids: dict[int, None] = {}  # an empty deque weighs ten times as much

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def add(self, reservation_id: int) -> bool:
        """Returns whether there may be a surplus."""
        self._ids[reservation_id] = None
        self._budget.total += 1
        return len(self._ids) > SETTLED_PER_QUEUE_MIN

    def discard(self, reservation_id: int) -> None:
        if reservation_id in self._ids:
            del self._ids[reservation_id]
            self._budget.total -= 1

    def clear(self) -> None:
        self._budget.total -= len(self._ids)
        self._ids = {}

    def surplus(self) -> list[int]:
        """The oldest that are to be forgotten now."""
        if len(self._ids) <= SETTLED_PER_QUEUE_MIN:
            return []
        share = max(SETTLED_PER_QUEUE_MIN, SETTLED_SHARED_MAX - self._budget.total)
        count = min(max(0, len(self._ids) - share), _FORGOTTEN_AT_ONCE)
        return list(islice(self._ids, count))
