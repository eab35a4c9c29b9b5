"""Wake-ups: entries that are due before the next sweep that lifecycle has planned (L7).

Pure. The answer to a scan includes when the next entry of the index is due; an entry that is added
later and is due earlier needs a wake-up. An index is known by any name; times are partition time.
"""

from collections.abc import Hashable

NEVER_MS = 1 << 62


class WakeUps:
    """When lifecycle will scan each index next, and the earliest wake-up that is not sent yet."""

    __slots__ = ("_known_ms", "_unsent_ms")

    def __init__(self) -> None:
        self._known_ms: dict[Hashable, int] = {}
        self._unsent_ms: int | None = None

    def scan_begins(self, index: Hashable) -> None:
        """The scan may miss entries that are added from here on."""
        self._known_ms[index] = NEVER_MS

    def scan_ended(self, index: Hashable, next_due_ms: int | None) -> None:
        """The answer of the scan includes when the next entry is due."""
        if next_due_ms is not None:
            self._known_ms[index] = min(self._known_ms.get(index, NEVER_MS), next_due_ms)

    def added(self, index: Hashable, due_ms: int) -> bool:
        """An entry is durable; returns whether it needs a wake-up."""
        if due_ms >= self._known_ms.get(index, NEVER_MS):
            return False
        self._known_ms[index] = due_ms
        self._unsent_ms = due_ms if self._unsent_ms is None else min(self._unsent_ms, due_ms)
        return True

    def take(self) -> int | None:
        """The earliest wake-up that is not sent; the caller sends it or puts it back."""
        due_ms, self._unsent_ms = self._unsent_ms, None
        return due_ms

    def put_back(self, due_ms: int) -> None:
        """The wake-up could not be sent."""
        self._unsent_ms = due_ms if self._unsent_ms is None else min(self._unsent_ms, due_ms)
