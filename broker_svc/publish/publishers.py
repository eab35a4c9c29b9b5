"""Publishers: one sink and one activity lease each, cached where they are used (I5, I7, I8).

A session keeps its publishers until it ends; beyond the limit, the least recently used is
destroyed. Publishers of unary calls end by an idle timeout. The broker issues each publisher an id,
by which it can be destroyed at any time.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn

from broker_svc.idle.activity_leases import Lease
from tidemark.api.broker.v1.message_pb2 import PublishResult, PublishRun
from tidemark.errors import PublisherNotFound, SessionNotFound


class Publisher:
    """The right to publish to one queue. Cannot be copied: a second publisher is a second call.

    Its sink is the link of the partition that a run goes to; nothing waits here, so an idle
    publisher costs no task.
    """

    __slots__ = ("last_used_ms", "lease", "lmq_name", "partitions", "publisher_id")

    def __init__(self, publisher_id: int, lmq_name: str, lease: Lease, now_ms: int) -> None:
        self.publisher_id = publisher_id
        self.lmq_name = lmq_name
        self.lease = lease
        self.partitions = tuple(queue.partition for queue in lease.queues)
        self.last_used_ms = now_ms

    def widen(self, lease: Lease) -> None:
        """Its queue spans more partitions now: the same publisher uses all of them."""
        self.lease.release()
        self.lease = lease
        self.partitions = tuple(queue.partition for queue in lease.queues)

    def __copy__(self) -> NoReturn:
        raise TypeError("a publisher owns its lease and cannot be copied")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError("a publisher owns its lease and cannot be copied")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a publisher owns its lease and cannot be pickled")


WaitingRun = tuple[PublishRun, bytes, str, Callable[[PublishResult], None]]
"""A run, its body as it came, its producer id, and the callback for its result."""


class PublisherCache:
    """The publishers of one connection, or of all unary calls, least recently used first."""

    def __init__(self, registry: "PublisherRegistry", publishers_max: int) -> None:
        self._registry = registry
        self._publishers_max = publishers_max
        self._by_name: OrderedDict[str, Publisher] = OrderedDict()
        self.opening: dict[str, list[WaitingRun]] = {}
        """Runs that wait, in order, until their queue has a publisher."""
        self._loading: dict[Lease, None] = {}
        """Leases on queues that storage has not loaded yet, for publishers that nothing waits
        for."""
        self._closed = False

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, lmq_name: str, now_ms: int) -> Publisher | None:
        """The publisher of a queue, which counts as used."""
        publisher = self._by_name.get(lmq_name)
        if publisher is not None:
            publisher.last_used_ms = now_ms
            self._by_name.move_to_end(lmq_name)
        return publisher

    def add(self, lmq_name: str, lease: Lease, now_ms: int) -> Publisher:
        """A new publisher; if there is one already, that one, and the lease is released."""
        if self._closed:
            lease.release()
            raise SessionNotFound("the connection is gone")
        publisher = self.find(lmq_name, now_ms)
        if publisher is not None:
            lease.release()
            return publisher
        publisher = self._registry.issue(self, lmq_name, lease, now_ms)
        self._by_name[lmq_name] = publisher
        while len(self._by_name) > self._publishers_max:
            self.destroy(next(iter(self._by_name.values())))
        return publisher

    def keep(self, lease: Lease) -> None:
        """Hold a lease until its queue is loaded, or the connection ends."""
        self._loading[lease] = None

    def give(self, lease: Lease) -> bool:
        """Hold it no longer; False if the connection has ended, and released it."""
        return self._loading.pop(lease, self) is None

    def check(self, publisher_id: int, lmq_name: str) -> None:
        """Raise unless the publisher belongs to this connection and that queue."""
        publisher = self._by_name.get(lmq_name)
        if publisher is None or publisher.publisher_id != publisher_id:
            raise PublisherNotFound(
                f"there is no publisher {publisher_id} of {lmq_name} here",
                publisher=str(publisher_id),
            )

    def destroy(self, publisher: Publisher) -> None:
        """Drop a publisher and its lease."""
        if self._by_name.get(publisher.lmq_name) is publisher:
            del self._by_name[publisher.lmq_name]
            self._registry.revoke(publisher)
            publisher.lease.release()

    def expire(self, now_ms: int, idle_ms: int) -> int:
        """Destroy publishers that were not used for that long; returns how many."""
        expired = 0
        while self._by_name:
            oldest = next(iter(self._by_name.values()))
            if now_ms - oldest.last_used_ms < idle_ms:
                break
            self.destroy(oldest)
            expired += 1
        return expired

    def close(self) -> None:
        """The connection has ended: destroy all publishers, and accept no more."""
        self._closed = True
        loading, self._loading = self._loading, {}
        for lease in loading:
            lease.release()
        for publisher in list(self._by_name.values()):
            self.destroy(publisher)


class PublisherRegistry:
    """Every publisher of the broker by its id."""

    def __init__(self, first_id: int) -> None:
        self._last_id = first_id
        self._by_id: dict[int, tuple[PublisherCache, Publisher]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def issue(self, cache: PublisherCache, lmq_name: str, lease: Lease, now_ms: int) -> Publisher:
        self._last_id += 1
        publisher = Publisher(self._last_id, lmq_name, lease, now_ms)
        self._by_id[publisher.publisher_id] = (cache, publisher)
        return publisher

    def revoke(self, publisher: Publisher) -> None:
        self._by_id.pop(publisher.publisher_id, None)

    def partition_left(self, is_away: Callable[[int], bool]) -> None:
        """Destroy the publishers of queues that live in no partition of this broker any more."""
        for cache, publisher in list(self._by_id.values()):
            if all(map(is_away, publisher.partitions)):
                cache.destroy(publisher)

    def destroy(self, publisher_id: int) -> None:
        """Destroy a publisher by its id, wherever it is cached (I8)."""
        found = self._by_id.get(publisher_id)
        if found is None:
            raise PublisherNotFound(
                f"there is no publisher {publisher_id}", publisher=str(publisher_id)
            )
        cache, publisher = found
        cache.destroy(publisher)
