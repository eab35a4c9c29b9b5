"""The earliest deadline of a partition, known without reading the engine.

Pure. Counts deadlines in buckets of 10 ms, the resolution of expiry, so that removing a deadline
costs nothing and the next one is found without passing over removed ones.

A partition that opens has the number of stored deadlines, and reads the first page of them
(`loading/deadline_pages.py`). Those from the horizon on are only counted until their page is read.
"""

from collections import defaultdict
from collections.abc import Mapping
from heapq import heapify, heappop, heappush

BUCKET_MS = 10
_EMPTY_MIN = 64


class Deadlines:
    """The number of deadlines per bucket; at most as many buckets are empty as are not."""

    __slots__ = ("_counts", "_empty", "_heap", "_unread", "horizon_ms", "total")

    def __init__(self, stored: int = 0) -> None:
        self._counts: defaultdict[int, int] = defaultdict(int)
        self._heap: list[int] = []
        self._empty = 0
        self._unread = stored
        self.total = stored
        self.horizon_ms: int | None = 0 if stored else None
        """Deadlines from here on are counted, but not known; None if all are known."""

    def __len__(self) -> int:
        """Buckets that take up memory."""
        return len(self._heap)

    @property
    def needs_page(self) -> bool:
        """No deadline is known, and the engine holds some."""
        return self.horizon_ms is not None and self._earliest_bucket() is None

    def add_page(self, deadlines_ms: Mapping[int, int], horizon_ms: int | None) -> None:
        """Take the deadlines from the horizon to the next one; None if nothing lies behind.

        Many reservations of one moment share a deadline, so each time comes with their number.
        """
        known = self.total - self._unread
        self.horizon_ms, self.total = None, known
        for deadline_ms, count in deadlines_ms.items():
            self.add(deadline_ms, count)
        self._unread = max(0, self._unread - (self.total - known)) if horizon_ms else 0
        self.total += self._unread
        self.horizon_ms = horizon_ms if self._unread else None

    def add(self, deadline_ms: int, count: int = 1) -> None:
        self.total += count
        if self.horizon_ms is not None and deadline_ms >= self.horizon_ms:
            self._unread += count
            return
        bucket = deadline_ms // BUCKET_MS
        if bucket not in self._counts:
            heappush(self._heap, bucket)
        elif not self._counts[bucket]:
            self._empty -= 1
        self._counts[bucket] += count

    def discard(self, deadline_ms: int) -> None:
        """Remove a deadline that was added before."""
        self.total -= 1
        if self.horizon_ms is not None and deadline_ms >= self.horizon_ms:
            self._unread -= 1
            if not self._unread:
                self.horizon_ms = None
            return
        bucket = deadline_ms // BUCKET_MS
        assert self._counts[bucket] > 0, "a deadline is discarded after it was added"
        self._counts[bucket] -= 1
        if not self._counts[bucket]:
            self._empty += 1
            if self._empty > max(_EMPTY_MIN, len(self._heap) // 2):
                self._forget_empty()

    def earliest_ms(self) -> int | None:
        """When the earliest bucket ends: everything in it is due then. None if there is none.

        While a page has to be read first, the time at which that page begins.
        """
        heap = self._heap
        if heap and self._counts[heap[0]] > 0:  # as nearly always: asked twice in every commit
            return (heap[0] + 1) * BUCKET_MS
        bucket = self._earliest_bucket()
        if bucket is None and self.horizon_ms is not None:
            bucket = self.horizon_ms // BUCKET_MS
        return None if bucket is None else (bucket + 1) * BUCKET_MS

    def is_due(self, now_ms: int) -> bool:
        """Whether `earliest_ms` is at that time or before."""
        if self._heap and (self._heap[0] + 1) * BUCKET_MS > now_ms:
            return False  # as nearly always, also if the first bucket is empty by now
        earliest_ms = self.earliest_ms()
        return earliest_ms is not None and earliest_ms <= now_ms

    def _earliest_bucket(self) -> int | None:
        while self._heap:
            bucket = self._heap[0]
            if self._counts[bucket] > 0:
                return bucket
            heappop(self._heap)
            del self._counts[bucket]
            self._empty -= 1
        return None

    def _forget_empty(self) -> None:
        """Empty buckets behind an early deadline that stays would pile up."""
        self._heap = [bucket for bucket in self._heap if self._counts[bucket]]
        heapify(self._heap)
        self._counts = defaultdict(int, {bucket: self._counts[bucket] for bucket in self._heap})
        self._empty = 0
