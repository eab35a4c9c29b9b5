"""The publish path: from a client's run to the partition of its queue.

Checks a run, without looking at single messages where it can, finds or creates its publisher, and
sends it over the link. Runs of one connection and queue are sent in the order of arrival.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from google.rpc.status_pb2 import Status
from opentelemetry.trace import Span

from broker_svc.consume.dispatcher import Dispatcher
from broker_svc.idle.activity_leases import ActivityLeases, Lease, has_failed
from broker_svc.links.partition_link import PartitionLink, refusal_of
from broker_svc.links.topic_cache import TopicCache
from broker_svc.links.unanswered_operations import Answer
from broker_svc.publish.publishers import Publisher, PublisherCache, WaitingRun
from tidemark import limits
from tidemark.api.broker.v1 import message_pb2
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.clock import Clock
from tidemark.errors import (
    BatchTooLarge,
    HeadersTooLarge,
    InvalidArgument,
    MessageTooLarge,
    TidemarkError,
    TopicNotFound,
    TopicVersionMismatch,
    Unavailable,
)
from tidemark.names import LmqName, is_lite, topic_of, validate_fairness_key, validate_producer_id
from tidemark.rpc.statuses import from_status, to_status
from tidemark.telemetry import Tally, is_sampled, messaging, traceparent_of, tracer
from tidemark.telemetry.messaging import Messages
from tidemark.topics import Topic, partitions_of

Done = Callable[[message_pb2.PublishResult], None]
"""Called exactly once for each run."""

_tracer = tracer(__name__)
_TOPIC_OUTDATED = (TopicVersionMismatch, TopicNotFound)
"""The partition does not have the topic, or not its newest version."""


class Attempt(NamedTuple):
    """A run in flight, with its publisher and the callback for its result."""

    run: message_pb2.PublishRun
    publisher: Publisher
    producer_id: str
    cache: PublisherCache
    done: Done
    body: bytes = b""
    """Its messages as they came in columns: a repeat must be the same to the byte."""
    span: Span | None = None


class PublishPath:
    """Publishes the runs of all connections of a broker."""

    def __init__(
        self,
        links: Mapping[int, PartitionLink],
        topics: TopicCache,
        leases: ActivityLeases,
        dispatcher: Dispatcher,
        clock: Clock,
    ) -> None:
        self._links = links
        self._topics = topics
        self._leases = leases
        self._dispatcher = dispatcher
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._outdated: dict[tuple[int, str], list[Attempt]] = {}
        """Runs that wait for the newest topic, by partition and topic, in the order in which they
        were refused."""
        self._turn = 0
        self.published = Tally()
        """Stored messages, including duplicates of earlier runs."""

    def submit(
        self,
        run: message_pb2.PublishRun,
        cache: PublisherCache,
        producer_id: str,
        done: Done,
        body: bytes = b"",
    ) -> None:
        """Publish a run; `done` gets its result, after the commit that stored it.

        `body` is that of a run which came in columns.
        """
        try:
            check_run(run, producer_id)
            name = LmqName.parse(run.lmq_name)
            topic = self._topics.known(name.topic)
            publisher = None
            if run.publisher_id:
                cache.check(run.publisher_id, run.lmq_name)
            if topic is not None and run.lmq_name not in cache.opening:
                publisher = self.publisher(run.lmq_name, topic, cache)
            if publisher is None or topic is None:
                self._open_first((run, body, producer_id, done), cache)
            else:
                self._append(Attempt(run, publisher, producer_id, cache, done, body), topic)
        except TidemarkError as error:
            done(refused(run.request_id, error))

    async def open(self, lmq_name: str, cache: PublisherCache) -> Publisher:
        """A publisher of a loaded queue; raises if the queue cannot be loaded."""
        topic = await self._topics.get(LmqName.parse(lmq_name).topic)
        publisher = cache.find(lmq_name, self._clock.monotonic_ms())
        if publisher is not None:
            self._widen(publisher, topic)
            if not publisher.lease.failed:
                with suppress(TidemarkError):  # loaded again below, or refused
                    await publisher.lease.loaded()  # a first publish may have just started it
                    return publisher
            cache.destroy(publisher)
        lease = await self._leases.acquire(lmq_name, topic)
        return cache.add(lmq_name, lease, self._clock.monotonic_ms())

    def open_soon(
        self, lmq_name: str, cache: PublisherCache, opened: Callable[[Publisher | None], None]
    ) -> bool:
        """As `open`, for a queue of one partition, whose loading nothing but a callback waits for:
        clients open thousands of publishers at once. False if that cannot be; then nothing is
        done.

        `opened` is called later, with None if the queue could not be loaded: `open` knows why, or
        what helps. It is not called once the connection has ended.
        """
        topic = self._topics.known(LmqName.parse(lmq_name).topic)
        if topic is None or cache.find(lmq_name, self._clock.monotonic_ms()) is not None:
            return False
        partitions = partitions_of(lmq_name, topic, len(self._links))
        if len(partitions) > 1:
            return False
        lease = self._leases.begin(lmq_name, partitions, topic.settings.idle_after_ms)
        if lease is None:
            return False
        cache.keep(lease)
        loading = lease.queues[0].loading
        assert loading is not None, "a lease loads its queue"
        loading.add_done_callback(partial(self._loaded, lmq_name, cache, lease, opened))
        return True

    def _loaded(
        self,
        lmq_name: str,
        cache: PublisherCache,
        lease: Lease,
        opened: Callable[[Publisher | None], None],
        loading: Answer,
    ) -> None:
        if not cache.give(lease):
            return
        if has_failed(loading):
            lease.release()
            opened(None)
        else:
            opened(cache.add(lmq_name, lease, self._clock.monotonic_ms()))

    def healthy(self, partitions: Sequence[int]) -> list[int]:
        """The partitions that accept publishes."""
        return [number for number in partitions if self._links[number].serving]

    def publisher(self, lmq_name: str, topic: Topic, cache: PublisherCache) -> Publisher | None:
        """The cached publisher, or one of a queue that is being loaded; None if that must wait."""
        now_ms = self._clock.monotonic_ms()
        publisher = cache.find(lmq_name, now_ms)
        if publisher is not None:
            self._widen(publisher, topic)
            if not publisher.lease.failed:
                return publisher
            cache.destroy(publisher)
        partitions = partitions_of(lmq_name, topic, len(self._links))
        lease = self._leases.begin(lmq_name, partitions, topic.settings.idle_after_ms)
        if lease is not None and lease.failed:
            lease.release()
            raise self._links[partitions[0]].refusal()
        return None if lease is None else cache.add(lmq_name, lease, now_ms)

    def _widen(self, publisher: Publisher, topic: Topic) -> None:
        """Let a publisher from before an update use the partitions that its queue grew into."""
        if len(publisher.partitions) >= topic.settings.partitions or is_lite(publisher.lmq_name):
            return
        partitions = partitions_of(publisher.lmq_name, topic, len(self._links))
        if partitions != publisher.partitions:
            idle_after_ms = topic.settings.idle_after_ms
            lease = self._leases.begin(publisher.lmq_name, partitions, idle_after_ms)
            if lease is not None:  # else one is being cleaned up: the next run widens
                publisher.widen(lease)

    def _open_first(self, waiting: WaitingRun, cache: PublisherCache) -> None:
        """The topic is unknown, or the queue is being cleaned up: the run waits, in order."""
        lmq_name = waiting[0].lmq_name
        before = cache.opening.get(lmq_name)
        if before is not None:
            before.append(waiting)
            return
        cache.opening[lmq_name] = [waiting]
        self._start(self._open_and_send(lmq_name, cache))

    async def _open_and_send(self, lmq_name: str, cache: PublisherCache) -> None:
        try:
            publisher = await self.open(lmq_name, cache)
            topic = await self._topics.get(topic_of(lmq_name))
        except TidemarkError as error:
            for run, _, _, done in cache.opening.pop(lmq_name):
                done(refused(run.request_id, error))
            return
        for run, body, producer_id, done in cache.opening.pop(lmq_name):
            try:
                self._append(Attempt(run, publisher, producer_id, cache, done, body), topic)
            except TidemarkError as error:
                done(refused(run.request_id, error))

    def _append(self, attempt: Attempt, topic: Topic, *, again: bool = True) -> None:
        run = attempt.run
        link = self._links[self._choose(run, attempt.publisher)]
        link.check_serving()
        operation = exchange_pb2.Operation()
        sent = Messages(run.lmq_name, run.count, partition=link.partition)
        span = messaging.begin_publish(_tracer, sent, run.traceparent)
        if span is not None:
            operation.traceparent = traceparent_of(span)
            # Stored with the run, for the spans of its later steps.
            run.traceparent = run.traceparent or operation.traceparent
            attempt = attempt._replace(span=span)
        elif is_sampled(run.traceparent):
            operation.traceparent = run.traceparent
        append = operation.append
        append.lmq_name = run.lmq_name
        append.count = run.count
        # Sorted headers: the repeat of a run is the same to the byte at any broker (S11).
        append.body = attempt.body or run.batch.SerializeToString(deterministic=True)
        append.topic_version = topic.version
        if run.fairness_key:
            append.fairness_key = run.fairness_key
        if run.delay_ms:
            append.delay_ms = run.delay_ms
        if run.ttl_ms:
            append.ttl_ms = run.ttl_ms
        if is_sampled(run.traceparent):
            append.traceparent = run.traceparent
        if run.sequence:
            append.producer_id = attempt.producer_id
            append.sequence = run.sequence
        link.ask(operation, partial(self._answered, attempt, link, again))
        if not run.delay_ms:
            queue = (link.partition, run.lmq_name)
            self._dispatcher.on_append_queued(queue, run.count, len(append.body))

    def _answered(
        self,
        attempt: Attempt,
        link: PartitionLink,
        again: bool,
        result: exchange_pb2.OperationResult | TidemarkError,
    ) -> None:
        run, publisher = attempt.run, attempt.publisher
        if publisher.lease.failed:
            attempt.cache.destroy(publisher)
        if isinstance(result, TidemarkError):
            messaging.end(attempt.span, result.reason)
            attempt.done(refused(run.request_id, result))
            return
        if attempt.span is not None:
            messaging.end(attempt.span, refusal_of(result))
        if not result.HasField("error"):
            self.published.add(run.count, run.lmq_name)
            stored = published(run.request_id, publisher, link.partition, result.append)
            attempt.done(stored)
        elif again and is_outdated(result.error):
            self.repeat(attempt, link.partition)
        else:
            refusal = message_pb2.PublishResult(request_id=run.request_id, error=result.error)
            attempt.done(refusal)

    def repeat(self, attempt: Attempt, partition: int) -> None:
        """Bring the newest topic to a partition that did not have it, and publish again.

        Runs that were refused together, or meanwhile, are published again in their order.
        """
        key = partition, topic_of(attempt.run.lmq_name)
        waiting = self._outdated.get(key)
        if waiting is not None:
            waiting.append(attempt)
            return
        self._outdated[key] = [attempt]
        self._start(self._repeat_all(*key))

    async def _repeat_all(self, partition: int, topic_name: str) -> None:
        key = partition, topic_name
        try:
            while attempts := self._outdated[key]:
                self._outdated[key] = []  # those that are refused from now on need it once more
                await self._repeat(partition, topic_name, attempts)
        finally:
            del self._outdated[key]

    async def _repeat(self, partition: int, topic_name: str, attempts: Sequence[Attempt]) -> None:
        key = partition, topic_name
        try:
            topic = await self._topics.renew(topic_name)
            await self._topics.bring(partition, topic)
        except TidemarkError as error:
            meanwhile, self._outdated[key] = self._outdated[key], []
            for each in (*attempts, *meanwhile):  # they must not overtake those before them
                each.done(refused(each.run.request_id, error))
            return
        of_queues: dict[str, list[Attempt]] = {}
        for each in attempts:
            of_queues.setdefault(each.run.lmq_name, []).append(each)
        await asyncio.gather(*(self._repeat_of(topic, queue) for queue in of_queues.values()))

    async def _repeat_of(self, topic: Topic, attempts: Sequence[Attempt]) -> None:
        """Runs of one queue, one after the other, up to one that cannot be sent: those behind it
        must not overtake its repeat."""
        refusal: TidemarkError | None = None
        for each in attempts:
            if refusal is not None:
                each.done(refused(each.run.request_id, refusal))
                continue
            try:
                # The queue could not be loaded either, so the publisher and its lease are gone.
                publisher = await self.open(each.run.lmq_name, each.cache)
                self._append(each._replace(publisher=publisher), topic, again=False)
            except TidemarkError as error:
                refusal = error
                each.done(refused(each.run.request_id, error))

    def _choose(self, run: message_pb2.PublishRun, publisher: Publisher) -> int:
        """The partition of a run: pinned, or the only one, or the next healthy one, round robin."""
        partitions = publisher.partitions
        if run.HasField("partition"):
            check_partition(run.lmq_name, run.partition, publisher)
            return run.partition
        if len(partitions) == 1:
            return partitions[0]
        healthy = self.healthy(partitions)
        if not healthy:
            raise Unavailable(f"no partition of {run.lmq_name} serves")
        self._turn += 1
        return healthy[self._turn % len(healthy)]

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def check_run(run: message_pb2.PublishRun, producer_id: str) -> None:
    """Raise for a run that can never be stored. Looks at single messages only where it must."""
    messages = len(run.batch.messages)
    if not messages or run.count != messages:
        raise InvalidArgument(f"count is {run.count}, the batch has {messages}", field="count")
    body_bytes = run.batch.ByteSize()
    check_body_bytes(body_bytes)
    if messages > limits.RUN_MESSAGES_MAX:
        raise BatchTooLarge(f"a run has at most {limits.RUN_MESSAGES_MAX} messages")
    _check_messages(run, look_at_payloads=body_bytes > limits.MESSAGE_BYTES_MAX)
    if len(run.traceparent) > limits.TRACEPARENT_BYTES_MAX:
        raise InvalidArgument("not a trace context", field="traceparent")
    if run.delay_ms > limits.DELAY_MS_MAX:
        raise InvalidArgument(f"at most {limits.DELAY_MS_MAX} ms", field="delay_ms")
    if run.ttl_ms > limits.TTL_MS_MAX:
        raise InvalidArgument(f"at most {limits.TTL_MS_MAX} ms", field="ttl_ms")
    validate_fairness_key(run.fairness_key)
    if run.sequence:
        validate_producer_id(producer_id)


def check_body_bytes(body_bytes: int) -> None:
    """Raise for a body that storage, and a frame to it, would not take."""
    if body_bytes > limits.RUN_BYTES_MAX:
        raise BatchTooLarge(f"a run has at most {limits.RUN_BYTES_MAX} bytes")


def _check_messages(run: message_pb2.PublishRun, *, look_at_payloads: bool) -> None:
    for message in run.batch.messages:
        if look_at_payloads and len(message.payload) > limits.MESSAGE_BYTES_MAX:
            raise MessageTooLarge(f"a payload has at most {limits.MESSAGE_BYTES_MAX} bytes")
        headers = message.headers
        if not headers:
            continue
        if len(headers) > limits.HEADERS_COUNT_MAX:
            raise HeadersTooLarge(f"a message has at most {limits.HEADERS_COUNT_MAX} headers")
        header_bytes = sum(len(k.encode()) + len(v.encode()) for k, v in headers.items())
        if header_bytes > limits.HEADERS_BYTES_MAX:
            raise HeadersTooLarge(f"headers have at most {limits.HEADERS_BYTES_MAX} bytes")


def check_partition(lmq_name: str, partition: int, publisher: Publisher) -> None:
    """Raise for a run that is pinned to a partition in which its queue does not live."""
    if partition not in publisher.partitions:
        raise InvalidArgument(
            f"queue {lmq_name} does not live in partition {partition}", field="partition"
        )


def is_outdated(error: Status) -> bool:
    """Whether a run was refused because its partition does not have the newest topic."""
    return isinstance(from_status(error), _TOPIC_OUTDATED)


def published(
    request_id: int, publisher: Publisher, partition: int, appended: exchange_pb2.AppendResult
) -> message_pb2.PublishResult:
    """The result of a run that is stored."""
    result = message_pb2.PublishResult(request_id=request_id)
    receipt = result.receipt
    receipt.partition = partition
    receipt.queue_id = appended.queue_id
    receipt.first_offset = appended.first_offset
    receipt.schedule_id = appended.schedule_id
    receipt.publisher_id = publisher.publisher_id
    receipt.duplicate = appended.duplicate
    return result


def refused(request_id: int, error: TidemarkError) -> message_pb2.PublishResult:
    """The result of a run that is not stored, or of which that is not known."""
    return message_pb2.PublishResult(request_id=request_id, error=to_status(error))
