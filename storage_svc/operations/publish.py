"""Publishing: a run is appended to its queue, or scheduled until it is due.

Most runs come in columns, with one operation and one result for many queues. Owns the checks of a
publish: topic version, repeats, a full disk and, with `runs.py`, quotas.
"""

from collections.abc import Sequence
from typing import NamedTuple

from storage_svc.empty_containers import NO_LIST
from storage_svc.operations.fields import check_body, queue_name
from storage_svc.operations.operation import ExchangeDecoders
from storage_svc.operations.runs import append_run, queue_with_room
from storage_svc.operations.schedule import add_scheduled
from storage_svc.partition import producers
from storage_svc.partition.commit import CommitContext
from storage_svc.queue.run import Run
from storage_svc.turns import TURN_OPERATIONS_MAX, give_way
from tidemark import limits
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.errors import (
    DataCorrupt,
    DiskFull,
    InvalidArgument,
    TidemarkError,
    TopicVersionMismatch,
)
from tidemark.field_checks import check_range
from tidemark.names import LmqName, topic_of, validate_fairness_key, validate_producer_id
from tidemark.rpc.statuses import to_status


class Appended(NamedTuple):
    """The run is on disk."""

    queue_id: int
    first_offset: int
    schedule_id: int = 0
    duplicate: bool = False

    def write_to(self, proto: exchange_pb2.OperationResult) -> None:
        append = proto.append
        append.queue_id = self.queue_id
        append.first_offset = self.first_offset
        if self.schedule_id:
            append.schedule_id = self.schedule_id
        if self.duplicate:
            append.duplicate = True


class Append(NamedTuple):
    """Store a run at the end of its queue, which is created if it does not exist."""

    lmq_name: str
    messages: int
    body: bytes
    fairness_key: str = ""
    delay_ms: int = 0
    ttl_ms: int = 0
    traceparent: str = ""
    producer_id: str = ""
    sequence: int = 0
    topic_version: int = 0

    @classmethod
    def from_proto(cls, proto: exchange_pb2.Append) -> "Append":
        validate_fairness_key(proto.fairness_key)
        check_body(proto.count, proto.body, limits.RUN_BYTES_MAX)
        check_range("delay_ms", proto.delay_ms, 0, limits.DELAY_MS_MAX)
        check_range("ttl_ms", proto.ttl_ms, 0, limits.TTL_MS_MAX)
        if proto.sequence:
            validate_producer_id(proto.producer_id)
        return cls(
            queue_name(proto.lmq_name),
            proto.count,
            proto.body,
            proto.fairness_key,
            proto.delay_ms,
            proto.ttl_ms,
            proto.traceparent,
            proto.producer_id,
            proto.sequence,
            proto.topic_version,
        )

    async def apply(self, commit: CommitContext) -> Appended:
        """Store the run, or answer a repeat with the first answer (S11)."""
        if commit.publishes_refused is not None:
            commit.state.refused_epoch = commit.counters.broker_epoch
            raise commit.publishes_refused
        topic = commit.topics.get(topic_of(self.lmq_name))
        if self.topic_version > topic.version:
            raise TopicVersionMismatch(
                f"version {self.topic_version} of topic {topic.name} has not arrived here",
                version=str(topic.version),
            )
        checksum = 0
        if self.sequence:
            checksum = producers.checksum(self.lmq_name, self.body)
            first = await commit.state.producers.find(
                self.producer_id, self.sequence, self.messages, checksum
            )
            if first is not None:
                return Appended(
                    first.queue_id, first.first_offset, first.schedule_id, duplicate=True
                )
        if commit.disk_full:
            raise DiskFull("the disk is past its watermark: nothing new is stored")
        handle = await queue_with_room(commit, topic, self.lmq_name, self.messages, self.body)
        queue_id = handle.state.record.queue_id
        ttl_ms = self.ttl_ms or handle.topic.settings.default_ttl_ms
        # Counts from publishing, also for a run that waits until it is due.
        dead_deadline_ms = commit.now_ms + ttl_ms if ttl_ms else 0
        if self.delay_ms:
            schedule_id = add_scheduled(
                commit,
                handle,
                self.body,
                self.messages,
                due_ms=commit.now_ms + self.delay_ms,
                fairness_key=self.fairness_key,
                dead_deadline_ms=dead_deadline_ms,
                traceparent=self.traceparent,
            )
            appended = Appended(queue_id, 0, schedule_id)
        else:
            run = append_run(
                commit,
                handle,
                self.body,
                self.messages,
                fairness_key=self.fairness_key,
                publish_time_ms=commit.now_ms,
                dead_deadline_ms=dead_deadline_ms,
                traceparent=self.traceparent,
            )
            appended = Appended(queue_id, run.first_offset)
        if self.sequence:
            answer = producers.Answer(
                queue_id, appended.first_offset, appended.schedule_id, self.messages, checksum
            )
            remembered = commit.state.producers
            producer = await remembered.load(self.producer_id)
            remembered.remember(
                producer, self.sequence, answer, commit.now_ms, commit.journal.batch
            )
        return appended


class AppendedRuns(NamedTuple):
    """The runs that were not refused are on disk."""

    places: Sequence[int]
    """Queue id and first offset of each run, one run after the other."""
    repeats: Sequence[tuple[int, int]] = ()
    """The places of runs that were stored before, each with its schedule id."""
    refused: Sequence[tuple[int, TidemarkError]] = ()
    """The places of runs that were refused, and why."""

    def write_to(self, proto: exchange_pb2.OperationResult) -> None:
        appends = proto.appends
        appends.queue_ids.extend(self.places[::2])
        appends.first_offsets.extend(self.places[1::2])
        for index, schedule_id in self.repeats:
            appends.repeated_runs.add(index=index, schedule_id=schedule_id)
        for index, error in self.refused:
            appends.refused.add(index=index, error=to_status(error))


_Run = tuple[str, bytes, tuple[int, ...]]
"""Queue and body, and its number of messages and sequence."""


class AppendRuns(NamedTuple):
    """Store runs of many queues, each at the end of its own."""

    runs: Sequence[_Run]
    producer_id: str = ""
    topic_version: int = 0

    @classmethod
    def from_proto(cls, proto: exchange_pb2.AppendRuns) -> "AppendRuns":
        # By slices: an iterator over a repeated field ends with an exception.
        names, counts = proto.lmq_names[:], proto.counts[:]
        bodies, sequences = proto.bodies[:], proto.sequences[:]
        if not len(names) == len(counts) == len(bodies) == len(sequences):
            raise InvalidArgument("columns of different lengths", field="appends")
        numbers = zip(counts, sequences, strict=True)
        runs = [*zip(names, bodies, numbers, strict=True)]
        return cls.from_rows(runs, proto.producer_id, proto.topic_version)

    @classmethod
    def from_rows(cls, runs: Sequence[_Run], producer_id: str, topic_version: int) -> "AppendRuns":
        """Raises for a run that is malformed."""
        check_range("lmq_names", len(runs), 1, limits.APPENDS_PER_OPERATION_MAX)
        validated = False
        for name, body, (count, sequence) in runs:
            if sequence and not validated:
                validate_producer_id(producer_id)
                validated = True
            check_body(count, body, limits.RUN_BYTES_MAX)
            LmqName.parse(name)
        return cls(runs, producer_id, topic_version)

    async def apply(self, commit: CommitContext) -> AppendedRuns:
        """Each is stored, or answered as before (S11), or refused without any change."""
        _, producer_id, topic_version = self
        places: list[int] = []
        repeats: list[tuple[int, int]] = NO_LIST
        refused: list[tuple[int, TidemarkError]] = NO_LIST
        producer = commit.state.producers.loaded(producer_id)
        for index, run in enumerate(self.runs):
            if index and index % TURN_OPERATIONS_MAX == 0:
                await give_way()
            place = _append_plain(commit, run, producer, topic_version)
            if place is None:
                try:
                    appended = await self._append(commit, run)
                except DataCorrupt:
                    raise  # a fault of the partition
                except TidemarkError as error:
                    appended = _NOT_STORED
                    refused = refused or []
                    refused.append((index, error))
                if appended.duplicate:
                    repeats = repeats or []
                    repeats.append((index, appended.schedule_id))
                place = appended.queue_id, appended.first_offset
                producer = commit.state.producers.loaded(producer_id)
            places += place
        return AppendedRuns(places, repeats, refused)

    async def _append(self, commit: CommitContext, run: _Run) -> Appended:
        lmq_name, body, (messages, sequence) = run
        return await Append(
            lmq_name,
            messages,
            body,
            producer_id=self.producer_id,
            sequence=sequence,
            topic_version=self.topic_version,
        ).apply(commit)


_NOT_STORED = Appended(0, 0)


def _append_plain(
    commit: CommitContext,
    run: _Run,
    producer: producers.Producer | None,
    topic_version: int,
) -> tuple[int, int] | None:
    """Store a run as nearly all are: its queue and its producer are in memory, and nothing limits
    or delays it. Returns its queue id and first offset; None, without any change, if any of this is
    not so. Then `Append` decides."""
    lmq_name, body, (messages, sequence) = run
    handle = commit.loaded_queue(lmq_name)
    if handle is None or commit.publishes_refused is not None or commit.disk_full:
        return None
    topic = handle.topic
    settings = topic.settings
    if (
        topic_version > topic.version
        or settings.queue_messages_max
        or settings.queue_bytes_max
        or settings.default_ttl_ms
        or commit.topics.find(topic.name) is not topic
    ):
        return None
    if sequence and (producer is None or not producer.is_new(sequence)):
        return None
    state, now_ms, journal = handle.state, commit.now_ms, commit.journal
    queue_id, first_offset = state.record.queue_id, state.record.next_offset
    state.append(Run(first_offset, messages, len(body), now_ms, 0, "", ""), body, now_ms, journal)
    if producer is not None and sequence:
        checksum = producers.checksum(lmq_name, body)
        answer = (queue_id, first_offset, 0, messages, checksum)
        commit.state.producers.remember(producer, sequence, answer, now_ms, journal.batch)
    return queue_id, first_offset


OPERATIONS: ExchangeDecoders = {"append": Append.from_proto, "appends": AppendRuns.from_proto}
