"""Wake-ups: what lifecycle must be told because it would look too late otherwise (L7).

Pure. A scan tells lifecycle when the earliest entry of an index is due; what is added later and is
due earlier must be told. An index goes by whatever name its owner gives it; times are partition
time.
"""

from collections.abc import Hashable

NEVER_MS = 1 << 62


class WakeUps:
    """When lifecycle will look into each index, and the earliest time it does not know of yet."""

    __slots__ = ("_known_ms", "_unsent_ms")

    def __init__(self) -> None:
        self._known_ms: dict[Hashable, int] = {}
        self._unsent_ms: int | None = None

    def scan_begins(self, index: Hashable) -> None:
        """From here on the scan may miss what is added, until it says what it has seen."""
        self._known_ms[index] = NEVER_MS

    def scan_ended(self, index: Hashable, next_due_ms: int | None) -> None:
        """Lifecycle knows now when the next entry is due."""
        if next_due_ms is not None:
            self._known_ms[index] = min(self._known_ms.get(index, NEVER_MS), next_due_ms)

    def added(self, index: Hashable, due_ms: int) -> bool:
        """An entry is durable; returns whether lifecycle must be told."""
        if due_ms >= self._known_ms.get(index, NEVER_MS):
            return False
        self._known_ms[index] = due_ms
        self._unsent_ms = due_ms if self._unsent_ms is None else min(self._unsent_ms, due_ms)
        return True

    def take(self) -> int | None:
        """The earliest time that is untold; whoever takes it tells it, or puts it back."""
        due_ms, self._unsent_ms = self._unsent_ms, None
        return due_ms

    def put_back(self, due_ms: int) -> None:
        """It could not be told."""
        self._unsent_ms = due_ms if self._unsent_ms is None else min(self._unsent_ms, due_ms)
