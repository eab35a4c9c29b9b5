"""The earliest deadline of a partition, known without reading the engine.

Pure. Counts deadlines in buckets of 10 ms, the resolution of expiry, so that removing a deadline
costs nothing and the next one is found without passing over removed ones.
"""

from collections import defaultdict
from heapq import heapify, heappop, heappush

BUCKET_MS = 10
_EMPTY_MIN = 64


class Deadlines:
    """The number of deadlines per bucket; at most as many buckets are empty as are not."""

    __slots__ = ("_counts", "_empty", "_heap", "total")

    def __init__(self) -> None:
        self._counts: defaultdict[int, int] = defaultdict(int)
        self._heap: list[int] = []
        self._empty = 0
        self.total = 0

    def __len__(self) -> int:
        """Buckets that take up memory."""
        return len(self._heap)

    def add(self, deadline_ms: int) -> None:
        bucket = deadline_ms // BUCKET_MS
        if bucket not in self._counts:
            heappush(self._heap, bucket)
        elif not self._counts[bucket]:
            self._empty -= 1
        self._counts[bucket] += 1
        self.total += 1

    def discard(self, deadline_ms: int) -> None:
        """Remove a deadline that was added before."""
        bucket = deadline_ms // BUCKET_MS
        assert self._counts[bucket] > 0, "a deadline is discarded after it was added"
        self._counts[bucket] -= 1
        self.total -= 1
        if not self._counts[bucket]:
            self._empty += 1
            if self._empty > max(_EMPTY_MIN, len(self._heap) // 2):
                self._forget_empty()

    def earliest_ms(self) -> int | None:
        """When the earliest bucket ends: everything in it is due then. None if there is none."""
        while self._heap:
            bucket = self._heap[0]
            if self._counts[bucket] > 0:
                return (bucket + 1) * BUCKET_MS
            heappop(self._heap)
            del self._counts[bucket]
            self._empty -= 1
        return None

    def is_due(self, now_ms: int) -> bool:
        earliest_ms = self.earliest_ms()
        return earliest_ms is not None and earliest_ms <= now_ms

    def _forget_empty(self) -> None:
        """Empty buckets behind an early deadline that stays would pile up."""
        self._heap = [bucket for bucket in self._heap if self._counts[bucket]]
        heapify(self._heap)
        self._counts = defaultdict(int, {bucket: self._counts[bucket] for bucket in self._heap})
        self._empty = 0
