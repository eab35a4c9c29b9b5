"""Arrays of runs: the runs of one client frame go to storage in one operation for each partition
and topic.

The short form of the publish that there is most of, a small run for each of many queues: it costs
entries in columns, not an operation, a callback and a result for each run. A run that has to wait,
for its topic or for a queue that is being unloaded, takes the path of a single run, and so do all
runs while traces are recorded: a span belongs to one run.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Final, Protocol

from google.protobuf.message import DecodeError

from broker_svc.consume.dispatcher import Dispatcher
from broker_svc.links.frame_columns import (
    OPERATION_BYTES,
    OperationColumns,
    PlainOperation,
    WrongResult,
    check_named,
)
from broker_svc.links.partition_link import PartitionLink
from broker_svc.links.topic_cache import TopicCache
from broker_svc.publish.publish_path import (
    Attempt,
    PublishPath,
    check_body_bytes,
    check_partition,
    check_run,
    is_outdated,
    published,
    refused,
)
from broker_svc.publish.publishers import Publisher, PublisherCache
from tidemark import limits
from tidemark.api.broker.v1 import message_pb2
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.bodies import has_payloads
from tidemark.errors import InvalidArgument, TidemarkError
from tidemark.names import LmqName, topic_of, validate_producer_id
from tidemark.rpc.statuses import from_status
from tidemark.telemetry import Tally, tracing_enabled
from tidemark.topics import Topic

OPERATION_BYTES_MAX: Final = 512 * 1024
"""Bodies in one operation, unless one alone is larger: frames and commits take whole operations."""

_RUN_BYTES: Final = 64
"""A generous size of what a run has in a frame beside its name and body."""

Run = tuple[str, bytes, tuple[int, ...]]
"""Its lmq_name, its body, and the four numbers of a run in a `RunArray`."""

_Key = tuple[int, str]
"""Partition and topic."""


def runs_of(array: message_pb2.RunArray) -> list[Run]:
    """The runs of an array; raises InvalidArgument if its columns do not belong together."""
    try:
        number = iter(array.runs[:])
        numbers = zip(number, number, number, number, strict=True)
        return list(zip(array.lmq_names[:], array.bodies[:], numbers, strict=True))
    except ValueError:
        detail = "the columns of an array are of one length"
        raise InvalidArgument(detail, field="run_arrays") from None


class Results(Protocol):
    """Receives the results of an array: of each run once, with the bytes that it counted for."""

    def published(self, result: message_pb2.PublishResult, size: int) -> None: ...

    def stored(
        self,
        runs: Sequence[Run],
        places: Sequence[int],
        publishers: Sequence[Publisher],
        share_bytes: int,
    ) -> None:
        """Results of several runs that are stored: `places` has the queue id and the first offset
        of each, and each counted for `share_bytes`."""


class _Runs(PlainOperation):
    """Runs of one array for one partition and topic, until storage has answered."""

    __slots__ = (
        "_arrays",
        "array",
        "body_bytes",
        "link",
        "messages",
        "publishers",
        "runs",
        "source",
        "topic",
    )

    def __init__(
        self, arrays: "RunArrays", array: "_Array", link: PartitionLink, topic: Topic
    ) -> None:
        self.array = array
        self.link = link
        self.topic = topic
        self._arrays = arrays
        self.source = ""
        """The producer, if any of them has a sequence."""
        self.size = array.operation_bytes
        self.messages = self.body_bytes = 0
        self.runs: list[Run] = []
        self.publishers: list[Publisher] = []

    def has_room(self, body_bytes: int) -> bool:
        fits = self.body_bytes + body_bytes <= OPERATION_BYTES_MAX
        return fits and len(self.runs) < limits.APPENDS_PER_OPERATION_MAX

    def add(self, run: Run, publisher: Publisher) -> None:
        lmq_name, body, (_, count, sequence, _) = run
        self.runs.append(run)
        self.publishers.append(publisher)
        self.messages += count
        self.body_bytes += len(body)
        self.size += len(body) + 4 * len(lmq_name) + _RUN_BYTES
        if sequence:
            self.source = self.array.producer_id

    def add_to(self, columns: OperationColumns, partition: int, broker_epoch: int) -> None:
        for lmq_name, body, (_, count, sequence, _) in self.runs:
            columns.lmq_names.append(lmq_name)
            columns.bodies.append(body)
            columns.runs += (count, sequence)
        columns.operations += (
            partition,
            broker_epoch,
            self.request_id,
            columns.sources[self.source],
            self.topic.version,
            self.steps,
            0,
        )

    def long_form(self) -> exchange_pb2.Operation:
        operation = exchange_pb2.Operation()
        appends = operation.appends
        for lmq_name, body, (_, count, sequence, _) in self.runs:
            appends.lmq_names.append(lmq_name)
            appends.bodies.append(body)
            appends.counts.append(count)
            appends.sequences.append(sequence)
        appends.producer_id = self.source
        appends.topic_version = self.topic.version
        return operation

    def stored(self, places: Sequence[int]) -> None:
        if len(places) != 2 * self.steps:
            raise WrongResult("not as many places as runs")
        array = self.array
        array.published.add(self.messages, self.topic.name)
        array.results.stored(self.runs, places, self.publishers, array.share_bytes)

    def __call__(self, result: exchange_pb2.OperationResult | TidemarkError) -> None:
        self._arrays.answered(self, result)


class _Array:
    """One array of a client, and the values that all of its runs share."""

    __slots__ = (
        "cache",
        "gathered",
        "now_ms",
        "operation_bytes",
        "producer_id",
        "published",
        "results",
        "share_bytes",
        "traced",
    )

    def __init__(
        self,
        cache: PublisherCache,
        producer_id: str,
        results: Results,
        share_bytes: int,
        now_ms: int,
        published: Tally,
    ) -> None:
        self.cache = cache
        self.producer_id = producer_id
        self.results = results
        self.share_bytes = share_bytes
        """The share of each of its runs in the bytes that the client may leave unanswered."""
        self.now_ms = now_ms
        self.published = published
        """Messages that were stored, of all arrays."""
        self.operation_bytes = OPERATION_BYTES + len(producer_id.encode())
        """About how many bytes an operation takes beside its runs."""
        self.traced = tracing_enabled()
        self.gathered: dict[_Key, _Runs] = {}
        """Runs that wait for the next operation."""

    def refuse(self, request_id: int, error: TidemarkError) -> None:
        self.results.published(refused(request_id, error), self.share_bytes)


class RunArrays:
    """Publishes the arrays of all sessions of a broker."""

    def __init__(
        self,
        publish_path: PublishPath,
        links: Mapping[int, PartitionLink],
        topics: TopicCache,
        dispatcher: Dispatcher,
    ) -> None:
        self._publish_path = publish_path
        self._links = links
        self._topics = topics
        self._dispatcher = dispatcher

    def submit(
        self,
        runs: Sequence[Run],
        cache: PublisherCache,
        producer_id: str,
        results: Results,
        share_bytes: int,
        now_ms: int,
    ) -> None:
        """Publish an array; `results` gets the result of each run, after its commit."""
        published = self._publish_path.published
        array = _Array(cache, producer_id, results, share_bytes, now_ms, published)
        for run in runs:
            try:
                self._take(array, run)
            except TidemarkError as error:
                array.refuse(run[2][0], error)
        self._send_all(array)

    def _take(self, array: _Array, run: Run) -> None:
        lmq_name, body, (_, count, sequence, partition) = run
        body_bytes = len(body)
        bytes_max = min(limits.RUN_BYTES_MAX, count * limits.MESSAGE_BYTES_MAX)
        if (  # else it passes all checks of its messages, as most do, without being parsed
            count > limits.RUN_MESSAGES_MAX
            or body_bytes > bytes_max
            or not has_payloads(body, count)
        ):
            check_body_bytes(body_bytes)  # as it is sent on: parsed, it may be smaller
            check_run(_single(run), array.producer_id)
        elif sequence:
            validate_producer_id(array.producer_id)
        publisher = self._publisher(array, lmq_name)
        if publisher is not None and partition not in publisher.partitions:
            check_partition(lmq_name, partition, publisher)
        key = partition, topic_of(lmq_name)
        runs = array.gathered.get(key)
        if runs is not None and not runs.has_room(body_bytes):
            self._send(array.gathered.pop(key))
            runs = None
        if runs is None and publisher is not None:
            runs = self._begin(array, key)
        if publisher is None or runs is None:
            self._publish_alone(array, run)
            return
        runs.add(run, publisher)

    def _publisher(self, array: _Array, lmq_name: str) -> Publisher | None:
        """The publisher of a queue; None if the run must be published alone."""
        cache = array.cache
        if array.traced or lmq_name in cache.opening:
            return None
        publisher = cache.find(lmq_name, array.now_ms)
        if publisher is not None and "/" in lmq_name and not publisher.lease.failed:
            return publisher
        topic = self._topics.known(LmqName.parse(lmq_name).topic)
        return None if topic is None else self._publish_path.publisher(lmq_name, topic, cache)

    def _begin(self, array: _Array, key: _Key) -> _Runs | None:
        """An operation for further runs; None if its topic is not known."""
        partition, topic_name = key
        link, topic = self._links.get(partition), self._topics.known(topic_name)
        if link is None or topic is None:
            return None
        if not link.serving:
            link.check_serving()
        runs = array.gathered[key] = _Runs(self, array, link, topic)
        return runs

    def _publish_alone(self, array: _Array, run: Run) -> None:
        self._send_all(array)  # an earlier run of the same queue may be among them
        done = partial(array.results.published, size=array.share_bytes)
        self._publish_path.submit(_single(run), array.cache, array.producer_id, done, run[1])

    # --- to storage ----------------------------------------------------------------------------

    def _send_all(self, array: _Array) -> None:
        gathered, array.gathered = array.gathered, {}
        for runs in gathered.values():
            self._send(runs)

    def _send(self, runs: _Runs) -> None:
        partition, sent = runs.link.partition, runs.runs
        runs.steps = len(sent)
        runs.link.ask_plain(runs)
        on_append_queued = self._dispatcher.on_append_queued
        for lmq_name, body, (_, count, _, _) in sent:
            on_append_queued((partition, lmq_name), count, len(body))

    def answered(self, runs: _Runs, result: exchange_pb2.OperationResult | TidemarkError) -> None:
        """Storage has answered in the long form, or will not answer."""
        array = runs.array
        if isinstance(result, TidemarkError) or result.HasField("error"):
            _drop_failed(array.cache, runs.publishers)
            error = result if isinstance(result, TidemarkError) else from_status(result.error)
            for _, _, (request_id, _, _, _) in runs.runs:
                array.refuse(request_id, error)
            return
        appends = result.appends
        if not len(appends.queue_ids) == len(appends.first_offsets) == runs.steps:
            raise WrongResult("not as many places as runs")
        if appends.refused or appends.repeated_runs:
            refused = [each.index for each in appends.refused]
            repeated = [each.index for each in appends.repeated_runs]
            check_named(refused + repeated, runs.steps)
            _drop_failed(array.cache, runs.publishers)
            self._answer_each(array, runs, appends)
            return
        places = zip(appends.queue_ids, appends.first_offsets, strict=True)
        runs.stored(list(chain.from_iterable(places)))

    def _answer_each(
        self, array: _Array, runs: _Runs, appends: exchange_pb2.AppendRunsResult
    ) -> None:
        """Some were refused or stored before: each run gets its own result."""
        refusals = {each.index: each.error for each in appends.refused}
        repeats = {each.index: each.schedule_id for each in appends.repeated_runs}
        for index, publisher in enumerate(runs.publishers):
            run, error = runs.runs[index], refusals.get(index)
            request_id, count, _, partition = run[2]
            if error is None:
                self._publish_path.published.add(count, runs.topic.name)
                appended = exchange_pb2.AppendResult(
                    queue_id=appends.queue_ids[index],
                    first_offset=appends.first_offsets[index],
                    schedule_id=repeats.get(index, 0),
                    duplicate=index in repeats,
                )
                result = published(request_id, publisher, partition, appended)
                array.results.published(result, array.share_bytes)
            elif is_outdated(error):
                done = partial(array.results.published, size=array.share_bytes)
                single = (_single(run), publisher, array.producer_id, array.cache, done, run[1])
                self._publish_path.repeat(Attempt(*single), partition)
            else:
                result = message_pb2.PublishResult(request_id=request_id, error=error)
                array.results.published(result, array.share_bytes)


def _drop_failed(cache: PublisherCache, publishers: Iterable[Publisher]) -> None:
    """Where runs fail, their queues may not be loaded: the next run loads them again."""
    for publisher in publishers:
        if publisher.lease.failed:
            cache.destroy(publisher)


def _single(run: Run) -> message_pb2.PublishRun:
    """The same run in the long form, whose numbers have less room."""
    lmq_name, body, (request_id, count, sequence, partition) = run
    try:
        single = message_pb2.PublishRun(
            request_id=request_id,
            lmq_name=lmq_name,
            count=count,
            sequence=sequence,
            partition=partition,
        )
    except ValueError:
        raise InvalidArgument("a number is out of range", field="runs") from None
    try:
        single.batch.MergeFromString(body)
    except DecodeError:
        raise InvalidArgument("not a batch of messages", field="bodies") from None
    return single
