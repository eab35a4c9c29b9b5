"""The earliest deadline of a partition, known without reading the engine.

Pure. Counts deadlines in buckets of 10 ms, the finest that expiry works at, so that a deadline that
goes away costs nothing and the next one is found without passing over those that are gone.
"""

from collections import defaultdict
from heapq import heappop, heappush

BUCKET_MS = 10


class Deadlines:
    """How many deadlines lie in which bucket. Fewer than one entry per deadline."""

    __slots__ = ("_counts", "_heap", "total")

    def __init__(self) -> None:
        self._counts: defaultdict[int, int] = defaultdict(int)
        self._heap: list[int] = []
        self.total = 0

    def add(self, deadline_ms: int) -> None:
        bucket = deadline_ms // BUCKET_MS
        if bucket not in self._counts:
            heappush(self._heap, bucket)
        self._counts[bucket] += 1
        self.total += 1

    def discard(self, deadline_ms: int) -> None:
        """A deadline that was added before is gone."""
        bucket = deadline_ms // BUCKET_MS
        assert self._counts[bucket] > 0, "only what was added is discarded"
        self._counts[bucket] -= 1
        self.total -= 1

    def earliest_ms(self) -> int | None:
        """When the earliest bucket ends: everything in it is due then. None if there is none."""
        while self._heap:
            bucket = self._heap[0]
            if self._counts[bucket] > 0:
                return (bucket + 1) * BUCKET_MS
            heappop(self._heap)
            del self._counts[bucket]
        return None
