"""Tracking: the broker's light record of each queue in use, and of no other.

Counts activity leases, delivery tags and pending settlements per queue, so that cleanup decides
from one record whether to unload it (I4). The record of an unloaded queue is dropped (I9).
"""

import asyncio
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush

from broker_svc.links.unanswered_operations import Answer
from tidemark.names import topic_of
from tidemark.topics import Topic

QueueKey = tuple[int, str]
"""Partition and lmq_name."""


class TrackedQueue:
    """One queue in one partition. `leases` is the number of activity leases on it."""

    __slots__ = (
        "check_at_ms",
        "cleaning",
        "deliveries",
        "groups",
        "idle_after_ms",
        "idle_since_ms",
        "leases",
        "lmq_name",
        "loading",
        "partition",
        "pending_settlements",
        "place_ms",
    )

    def __init__(self, partition: int, lmq_name: str, idle_after_ms: int, now_ms: int) -> None:
        self.partition = partition
        self.lmq_name = lmq_name
        self.idle_after_ms = idle_after_ms
        self.leases = 0
        self.deliveries = 0
        self.groups: dict[str, int] = {}
        """Groups with subscriptions here, and how many each has: they do not expire."""
        self.pending_settlements = 0
        self.idle_since_ms = now_ms
        self.check_at_ms: int | None = None
        """When cleanup checks it; None while no check is planned."""
        self.place_ms: int | None = None
        """Its position in the heap of candidates, never after `check_at_ms`; None without one."""
        self.loading: Answer | None = None
        """The answer to loading it in storage; None if storage must be asked (again)."""
        self.cleaning: asyncio.Future[None] | None = None
        """Pending while storage is asked to unload it: new leases wait for it."""

    @property
    def key(self) -> QueueKey:
        return self.partition, self.lmq_name


class Tracking:
    """All tracked queues, and when each becomes a candidate for cleanup."""

    def __init__(self) -> None:
        self._queues: dict[QueueKey, TrackedQueue] = {}
        self._candidates: list[tuple[int, int, TrackedQueue]] = []
        self._pushed = 0
        self.earlier_candidate = asyncio.Event()
        """Set when a candidate is due earlier than all others were."""

    def __len__(self) -> int:
        return len(self._queues)

    def __iter__(self) -> Iterator[TrackedQueue]:
        return iter(self._queues.values())

    def find(self, key: QueueKey) -> TrackedQueue | None:
        return self._queues.get(key)

    def get(self, key: QueueKey, idle_after_ms: int, now_ms: int) -> TrackedQueue:
        """The record of a queue, created if missing; it gets the given idle window."""
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = TrackedQueue(*key, idle_after_ms, now_ms)
            self.watch(queue, now_ms + idle_after_ms)
        queue.idle_after_ms = idle_after_ms
        return queue

    def forget(self, queue: TrackedQueue) -> None:
        if self._queues.get(queue.key) is queue:
            del self._queues[queue.key]

    def watch(self, queue: TrackedQueue, due_ms: int) -> None:
        """Check the queue at that time, and not before.

        An earlier heap entry is kept until it is due: otherwise a busy queue would leave an entry
        behind with every use.
        """
        queue.check_at_ms = due_ms
        if queue.place_ms is not None and queue.place_ms <= due_ms:
            return
        if not self._candidates or due_ms < self._candidates[0][0]:
            self.earlier_candidate.set()
        self._line_up(queue, due_ms)

    def next_candidate_ms(self) -> int | None:
        self._tidy_front()
        return self._candidates[0][0] if self._candidates else None

    def take_candidates(self, now_ms: int, limit: int) -> list[TrackedQueue]:
        """Queues whose window may have elapsed. Queues in use are watched once they are idle."""
        due: list[TrackedQueue] = []
        while len(due) < limit:
            self._tidy_front()
            if not self._candidates or self._candidates[0][0] > now_ms:
                break
            queue = heappop(self._candidates)[2]
            queue.check_at_ms = queue.place_ms = None
            if not queue.leases:
                due.append(queue)
        return due

    def topic_changed(self, topic: Topic) -> None:
        """Apply a topic's new idle window to its queues, including those already waiting."""
        for queue in self._queues.values():
            if topic_of(queue.lmq_name) == topic.name:
                queue.idle_after_ms = topic.settings.idle_after_ms
                if not queue.leases:
                    self.watch(queue, queue.idle_since_ms + queue.idle_after_ms)

    def queue_deleted(self, lmq_name: str, partitions: Iterable[int]) -> None:
        """Storage may have unloaded the queue: its next use loads it again."""
        for partition in partitions:
            queue = self._queues.get((partition, lmq_name))
            if queue is not None:
                queue.loading = None

    def _line_up(self, queue: TrackedQueue, due_ms: int) -> None:
        queue.place_ms = due_ms
        self._pushed += 1
        heappush(self._candidates, (due_ms, self._pushed, queue))

    def _tidy_front(self) -> None:
        """Drop stale heap entries and put entries back that are due later."""
        while self._candidates:
            place_ms, _, queue = self._candidates[0]
            current = self._queues.get(queue.key) is queue and queue.place_ms == place_ms
            if current and queue.check_at_ms == place_ms:
                return
            heappop(self._candidates)
            if current and queue.check_at_ms is not None:
                self._line_up(queue, queue.check_at_ms)

    def partition_left(self, partition: int) -> None:
        """Another broker holds the partition: its queues stay only while something leases them."""
        left = [each for each in self._queues.values() if each.partition == partition]
        for queue in left:
            if not queue.leases:
                self.forget(queue)

    def link_lost(self, partition: int) -> None:
        """Storage may have unloaded the queues of the partition."""
        for queue in self._queues.values():
            if queue.partition == partition:
                queue.loading = None
