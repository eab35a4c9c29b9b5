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

    def __init__(self, partition: int, first: int, last: int | None) -> None:
        self.partition = partition
        self.first = first
        """Sequence before which it has no entry."""
        self.last = last
        """Sequence of its last entry; None if it is not known: after a restart, and after that
        entry was dropped."""
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

    def added(self, name: str, partition: int, sequence: int) -> None:
        """An entry is stored; the sequence only grows."""
        destination = self._destinations.get(name)
        if destination is not None:
            destination.last = sequence
        else:
            self._add(name, _Destination(partition, sequence, sequence))

    def found(self, name: str, partition: int, first: int) -> None:
        """Entries from `first` on were found when the partition was opened."""
        self._add(name, _Destination(partition, first, None))

    def first(self, name: str) -> int:
        """The sequence before which a destination has no entry."""
        destination = self._destinations.get(name)
        return 0 if destination is None else destination.first

    def knows_last(self, name: str) -> bool:
        """Whether `removed` notices the last entry; true if nothing waits."""
        destination = self._destinations.get(name)
        return destination is None or destination.last is not None

    def begins(self, name: str, first: int) -> None:
        """A scan found no entry before that one."""
        destination = self._destinations.get(name)
        if destination is not None:
            destination.first = max(destination.first, first)

    def arrived(self, name: str) -> None:
        """The destination took an entry: its pause ends."""
        destination = self._destinations.get(name)
        if destination is not None:
            self._resume(name, destination)
            destination.refusals = 0

    def removed(self, name: str, sequence: int) -> None:
        """An entry is erased. After the first or one in between, the last is still to come; after
        the last, others may be left that were not dropped."""
        destination = self._destinations.get(name)
        if destination is None:
            return
        if sequence == destination.first:
            destination.first += 1
        if sequence != destination.last:
            return
        if destination.first > sequence:
            self.forget(name)
        else:
            destination.last = None

    def forget(self, name: str) -> None:
        """Nothing waits for the destination."""
        destination = self._destinations.pop(name, None)
        if destination is not None:
            self._remove_ready(name, destination)

    def retry_ms(self, name: str) -> int:
        """When a destination that refused is tried again; 0 if it has not refused."""
        destination = self._destinations.get(name)
        return 0 if destination is None else destination.retry_ms

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

    def _add(self, name: str, destination: _Destination) -> None:
        self._destinations[name] = destination
        self._ready.setdefault(destination.partition, OrderedDict())[name] = None

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
