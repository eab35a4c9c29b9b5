"""Activity leases: "this queue is in use", in memory (I2, I3).

Creating a lease is serialized with cleanup of that queue: a lease counts from the moment it is
requested, and waits for the end of a cleanup in progress. The queue is loaded before any other
operation on it, because a link keeps the order; if loading fails, the lease is dropped and the
caller gets the reason.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from broker_svc.idle.tracking import TrackedQueue, Tracking
from broker_svc.links.partition_link import PartitionLink
from broker_svc.links.topic_cache import TopicCache
from broker_svc.links.unanswered_operations import Answer
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.clock import Clock
from tidemark.errors import (
    NotOwner,
    PartitionFaulty,
    TidemarkError,
    TopicNotFound,
    Unavailable,
)
from tidemark.rpc.statuses import from_status
from tidemark.topics import Topic, partitions_of

REPORTED_MAX: Final = 128
"""Queues in one report of a group: a commit that takes it must not take long."""


class Lease:
    """Holds a queue, in all its partitions, until it is released."""

    __slots__ = ("_group", "_leases", "queues")

    def __init__(
        self, leases: "ActivityLeases", queues: tuple[TrackedQueue, ...], group: str
    ) -> None:
        self._leases: ActivityLeases | None = leases
        self._group = group
        self.queues = queues

    @property
    def failed(self) -> bool:
        """Whether no partition has the queue loaded, or all may have unloaded it since."""
        for queue in self.queues:  # a plain loop: asked twice for each run
            if queue.loading is not None and not has_failed(queue.loading):
                return False
        return True

    async def loaded(self) -> None:
        """Return once storage has loaded the queue; raise if it could not, or the link broke.

        An unreachable partition takes no share of the queue (L4): the queue is loaded there once
        the link is up again. One reachable partition is enough.
        """
        # Collected before the first await: a link that breaks meanwhile resets `loading`.
        loading = [queue.loading for queue in self.queues if queue.loading is not None]
        assert loading, "a lease loads its queue first, and the caller has seen no failure"
        away: list[TidemarkError] = []
        for answer in loading:
            try:
                result = await asyncio.shield(answer)
                if result.HasField("error"):
                    raise from_status(result.error)
            except (Unavailable, NotOwner, PartitionFaulty) as error:
                away.append(error)
        if len(away) == len(loading):
            raise away[0]

    def is_last_of_group(self, queue: TrackedQueue) -> bool:
        """Whether its release leaves the group of a queue, which ends what stands there."""
        return self._leases is not None and queue.groups.get(self._group) == 1

    def release(self) -> None:
        """Release the lease; a second call does nothing."""
        leases, self._leases = self._leases, None
        if leases is not None:
            if self._group:
                leases.leave(self.queues, self._group)
            leases.drop(self.queues)


class ActivityLeases:
    """Creates and drops leases."""

    def __init__(
        self,
        links: Mapping[int, PartitionLink],
        topics: TopicCache,
        tracking: Tracking,
        clock: Clock,
    ) -> None:
        self._links = links
        self._topics = topics
        self._tracking = tracking
        self._clock = clock
        self.active = 0
        """Publisher and subscriber leases, counted per partition."""
        self.busy_queues = 0
        """Queues with at least one lease."""
        self._reports: _Reports | None = None
        """Changes of groups that are reported together."""

    async def acquire(self, lmq_name: str, topic: Topic, group: str = "") -> Lease:
        """A lease on a queue; brings the topic to partitions that do not have it yet.

        With `group`, a client subscribes: until the release, storage keeps the group (R14).
        """
        partitions = partitions_of(lmq_name, topic, len(self._links))
        idle_after_ms = topic.settings.idle_after_ms
        try:
            return await self.create(lmq_name, partitions, idle_after_ms, group)
        except TopicNotFound:
            topic = await self._topics.renew(topic.name)
            reachable = [each for each in partitions if self._links[each].connected.is_set()]
            await asyncio.gather(*(self._topics.bring(number, topic) for number in reachable))
            return await self.create(lmq_name, partitions, idle_after_ms, group)

    async def create(
        self, lmq_name: str, partitions: tuple[int, ...], idle_after_ms: int, group: str = ""
    ) -> Lease:
        """A lease on a queue that storage has loaded, created if it did not exist."""
        while (lease := self.begin(lmq_name, partitions, idle_after_ms, group)) is None:
            await self._cleaned(lmq_name, partitions)
        try:
            await lease.loaded()
        except BaseException:
            lease.release()
            raise
        return lease

    def begin(
        self, lmq_name: str, partitions: tuple[int, ...], idle_after_ms: int, group: str = ""
    ) -> Lease | None:
        """A lease on a queue that is being loaded: later operations on it follow the loading.

        None during a cleanup of the queue: wait for it, or use `create`.
        """
        now_ms = self._clock.monotonic_ms()
        queues = [
            self._tracking.get((partition, lmq_name), idle_after_ms, now_ms)
            for partition in partitions
        ]
        for queue in queues:
            if queue.cleaning is not None:
                return None
        for queue in queues:
            queue.leases += 1
            self.active += 1
            self.busy_queues += queue.leases == 1
            if group:
                queue.groups[group] = queue.groups.get(group, 0) + 1
            is_loaded = queue.loading is not None and not has_failed(queue.loading)
            if not is_loaded:
                queue.loading = self._load(queue)
            elif queue.groups.get(group) == 1:  # the group is reported
                self._report(queue, group)
        return Lease(self, tuple(queues), group)

    def begin_loaded(
        self, lmq_name: str, partitions: tuple[int, ...], topic: Topic, group: str
    ) -> Lease | None:
        """A lease on a queue that is loaded, with nothing to wait for; None if it is not."""
        for partition in partitions:
            queue = self._tracking.find((partition, lmq_name))
            loading = None if queue is None else queue.loading
            if loading is None or not loading.done() or has_failed(loading):
                return None
        return self.begin(lmq_name, partitions, topic.settings.idle_after_ms, group)

    @contextmanager
    def reporting_together(self) -> Iterator[None]:
        """Report groups of many queues in few operations, behind all others that are sent here.

        Nothing may be awaited in it: an operation that is sent later must follow the report.
        """
        assert self._reports is None, "reports are not nested"
        self._reports = reports = _Reports()
        try:
            yield
        finally:
            self._reports = None
            for partition, operation in reports.operations():
                self._links[partition].ask(operation, _ignore)

    def reload(self, partition: int) -> None:
        """Storage may have unloaded its queues: load those with a lease again.

        The others are loaded on their next use.
        """
        for queue in self._tracking:
            if queue.partition == partition:
                queue.loading = self._load(queue) if queue.leases else None

    def leave(self, queues: tuple[TrackedQueue, ...], group: str) -> None:
        """A subscription has ended; the age of a group counts from the end of the last one."""
        for queue in queues:
            queue.groups[group] -= 1
            if not queue.groups[group]:
                del queue.groups[group]
                if self._reports is None:
                    leave = exchange_pb2.LeaveGroup(lmq_names=(queue.lmq_name,), group=group)
                    operation = exchange_pb2.Operation(leave_group=leave)
                    self._links[queue.partition].ask(operation, _ignore)
                else:
                    self._reports.leave(queue, group)

    def drop(self, queues: tuple[TrackedQueue, ...]) -> None:
        now_ms = self._clock.monotonic_ms()
        for queue in queues:
            queue.leases -= 1
            self.active -= 1
            if not queue.leases:
                self.busy_queues -= 1
                queue.idle_since_ms = now_ms
                self._tracking.watch(queue, now_ms + queue.idle_after_ms)

    def _report(self, queue: TrackedQueue, group: str) -> None:
        """Report the first subscription of a group to a queue that is loaded."""
        if self._reports is not None:
            self._reports.join(queue, group)
            return
        join = exchange_pb2.JoinGroup(lmq_names=(queue.lmq_name,), group=group)
        self._links[queue.partition].ask(exchange_pb2.Operation(join_group=join), _ignore)

    def _load(self, queue: TrackedQueue) -> Answer:
        operation = exchange_pb2.Operation()
        materialize = operation.materialize
        materialize.lmq_name = queue.lmq_name
        materialize.create = True
        if queue.groups:
            materialize.groups.extend(queue.groups)
        return self._links[queue.partition].send(operation)

    async def _cleaned(self, lmq_name: str, partitions: tuple[int, ...]) -> None:
        for partition in partitions:
            queue = self._tracking.find((partition, lmq_name))
            if queue is not None and queue.cleaning is not None:
                await asyncio.shield(queue.cleaning)


class _Reports:
    """Groups that have got their first consumer, and those that have lost the last."""

    __slots__ = ("_joined", "_left")

    def __init__(self) -> None:
        self._joined: dict[tuple[int, str], list[str]] = {}
        self._left: dict[tuple[int, str], list[str]] = {}
        """Names of queues, by partition and group."""

    def join(self, queue: TrackedQueue, group: str) -> None:
        self._joined.setdefault((queue.partition, group), []).append(queue.lmq_name)

    def leave(self, queue: TrackedQueue, group: str) -> None:
        self._left.setdefault((queue.partition, group), []).append(queue.lmq_name)

    def operations(self) -> Iterator[tuple[int, exchange_pb2.Operation]]:
        """Each with its partition. A group that is left at once was joined before."""
        for (partition, group), names in self._joined.items():
            for start in range(0, len(names), REPORTED_MAX):
                part = names[start : start + REPORTED_MAX]
                join = exchange_pb2.JoinGroup(lmq_names=part, group=group)
                yield partition, exchange_pb2.Operation(join_group=join)
        for (partition, group), names in self._left.items():
            for start in range(0, len(names), REPORTED_MAX):
                part = names[start : start + REPORTED_MAX]
                leave = exchange_pb2.LeaveGroup(lmq_names=part, group=group)
                yield partition, exchange_pb2.Operation(leave_group=leave)


def _ignore(_: exchange_pb2.OperationResult | TidemarkError) -> None:
    """A link that is down reports all groups again once it is up."""


def has_failed(loading: Answer) -> bool:
    """Whether a queue could not be loaded."""
    return loading.done() and (
        loading.cancelled() or loading.exception() is not None or loading.result().HasField("error")
    )
