"""The outbox by destination: which destinations have entries, where those begin, who refuses.

Pure; in memory, so that nothing is read while nothing waits (L7). Scans start at the first entry of
a destination and never pass over cleared ones or over the entries of a destination that refuses. A
destination that refused is left alone for a pause that grows with each refusal (L6).
"""

from collections import OrderedDict
from heapq import heappop, heappush
from itertools import islice

PAUSE_MS_MIN = 500
PAUSE_MS_MAX = 60_000


class _Destination:
    """A queue that outbox entries wait for."""

    __slots__ = ("first", "last", "partition", "refusals", "retry_ms")

    def __init__(self, partition: int, first: int, last: int) -> None:
        self.partition = partition
        self.first = first
        """Sequence before which it has no entry."""
        self.last = last
        """Sequence of its last entry."""
        self.refusals = 0
        self.retry_ms = 0
        """The end of its pause; 0 for none."""


class OutboxIndex:
    """The destinations of one partition's outbox. Dropped with the partition's state."""

    __slots__ = ("_destinations", "_pauses", "_ready")

    def __init__(self) -> None:
        self._destinations: dict[str, _Destination] = {}
        self._ready: dict[int, OrderedDict[str, None]] = {}
        """Destinations that are not paused, by partition, in the order of their turns."""
        self._pauses: list[tuple[int, str]] = []
        """A heap of the ends of pauses; some may have ended early."""

    def __len__(self) -> int:
        """Destinations that entries wait for."""
        return len(self._destinations)

    def added(self, name: str, partition: int, first: int, last: int) -> None:
        """Entries from `first` to `last` were stored; the sequence only grows."""
        destination = self._destinations.get(name)
        if destination is not None:
            destination.last = last
            return
        self._destinations[name] = _Destination(partition, first, last)
        self._ready.setdefault(partition, OrderedDict())[name] = None

    def begins(self, name: str, first: int) -> None:
        """A scan found no entry before that one."""
        destination = self._destinations.get(name)
        if destination is not None:
            destination.first = max(destination.first, first)

    def cleared(self, name: str, sequence: int) -> None:
        """The destination has the entry; entries arrive in order, so the last one is the end."""
        destination = self._destinations.get(name)
        if destination is None:
            return
        self._resume(name, destination)
        destination.refusals = 0
        if sequence >= destination.last:
            del self._destinations[name]
            self._remove_ready(name, destination)

    def postpone(self, name: str, now_ms: int) -> int | None:
        """A destination refused; returns when it may be tried again. None if nothing waits."""
        destination = self._destinations.get(name)
        if destination is None:
            return None
        pause_ms = min(PAUSE_MS_MIN << min(destination.refusals, 10), PAUSE_MS_MAX)
        destination.refusals += 1
        destination.retry_ms = now_ms + pause_ms
        heappush(self._pauses, (destination.retry_ms, name))
        self._remove_ready(name, destination)
        return destination.retry_ms

    def partitions(self, now_ms: int) -> list[int]:
        """Partitions with a destination that may be tried now."""
        self._end_pauses(now_ms)
        return sorted(self._ready)

    def take_turns(self, partition: int, limit: int, now_ms: int) -> list[tuple[str, int]]:
        """The next destinations of a partition, each with the sequence where its entries begin."""
        self._end_pauses(now_ms)
        ready = self._ready.get(partition, OrderedDict())
        names = list(islice(ready, limit))
        for name in names:
            ready.move_to_end(name)
        return [(name, self._destinations[name].first) for name in names]

    def next_retry_ms(self) -> int | None:
        """When the first pause ends, or a time before that; None without any."""
        return self._pauses[0][0] if self._pauses else None

    def _end_pauses(self, now_ms: int) -> None:
        while self._pauses and self._pauses[0][0] <= now_ms:
            retry_ms, name = heappop(self._pauses)
            destination = self._destinations.get(name)
            if destination is not None and destination.retry_ms == retry_ms:
                self._resume(name, destination)

    def _resume(self, name: str, destination: _Destination) -> None:
        if destination.retry_ms:
            destination.retry_ms = 0
            self._ready.setdefault(destination.partition, OrderedDict())[name] = None

    def _remove_ready(self, name: str, destination: _Destination) -> None:
        ready = self._ready.get(destination.partition)
        if ready is not None:
            ready.pop(name, None)
            if not ready:
                del self._ready[destination.partition]
