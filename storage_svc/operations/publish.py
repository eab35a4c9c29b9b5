"""Publishing: a run is appended to its queue, or scheduled until it is due.

Most runs come in columns, with one operation and one result for many queues. Owns the checks of a
publish: topic version, repeats, a full disk and, with `runs.py`, quotas.
"""

from collections.abc import Sequence
from typing import NamedTuple

from storage_svc.operations.fields import check_body, queue_name
from storage_svc.operations.operation import ExchangeDecoders
from storage_svc.operations.runs import append_run, queue_with_room
from storage_svc.operations.schedule import add_scheduled
from storage_svc.partition import producers
from storage_svc.partition.commit import CommitContext
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
from tidemark.names import topic_of, validate_fairness_key, validate_producer_id
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
            await commit.state.producers.remember(
                self.producer_id, self.sequence, answer, commit.now_ms, commit.journal.batch
            )
        return appended


class AppendedRuns(NamedTuple):
    """The runs that were not refused are on disk."""

    runs: tuple[Appended | TidemarkError, ...]

    def write_to(self, proto: exchange_pb2.OperationResult) -> None:
        appends = proto.appends
        queue_ids, first_offsets = [], []
        for index, each in enumerate(self.runs):
            if isinstance(each, TidemarkError):
                appends.refused.add(index=index, error=to_status(each))
                each = _NOT_STORED
            elif each.duplicate:
                appends.repeated_runs.add(index=index, schedule_id=each.schedule_id)
            queue_ids.append(each.queue_id)
            first_offsets.append(each.first_offset)
        appends.queue_ids.extend(queue_ids)
        appends.first_offsets.extend(first_offsets)


_NOT_STORED = Appended(0, 0)


class AppendRuns(NamedTuple):
    """Store runs of many queues, each at the end of its own."""

    appends: tuple[Append, ...]

    @classmethod
    def from_proto(cls, proto: exchange_pb2.AppendRuns) -> "AppendRuns":
        # As lists: every look at a column of a proto costs as much as one of these.
        names, counts = list(proto.lmq_names), list(proto.counts)
        bodies, sequences = list(proto.bodies), list(proto.sequences)
        if not len(names) == len(counts) == len(bodies) == len(sequences):
            raise InvalidArgument("columns of different lengths", field="appends")
        runs = [*zip(names, counts, bodies, sequences, strict=True)]
        return cls.from_rows(runs, proto.producer_id, proto.topic_version)

    @classmethod
    def from_rows(
        cls, runs: Sequence[tuple[str, int, bytes, int]], producer_id: str, topic_version: int
    ) -> "AppendRuns":
        """Each run as its queue, count, body and sequence. Raises for one that is malformed."""
        check_range("lmq_names", len(runs), 1, limits.APPENDS_PER_OPERATION_MAX)
        appends = []
        validated = False
        for name, count, body, sequence in runs:
            if sequence and not validated:
                validate_producer_id(producer_id)
                validated = True
            check_body(count, body, limits.RUN_BYTES_MAX)
            plain = (queue_name(name), count, body, "", 0, 0, "")
            appends.append(Append(*plain, producer_id, sequence, topic_version))
        return cls(tuple(appends))

    async def apply(self, commit: CommitContext) -> AppendedRuns:
        """Each is stored, or answered as before (S11), or refused without any change."""
        runs: list[Appended | TidemarkError] = []
        for index, each in enumerate(self.appends):
            if index and index % TURN_OPERATIONS_MAX == 0:
                await give_way()
            try:
                runs.append(await each.apply(commit))
            except DataCorrupt:
                raise  # a fault of the partition
            except TidemarkError as error:
                runs.append(error)
        return AppendedRuns(tuple(runs))


OPERATIONS: ExchangeDecoders = {"append": Append.from_proto, "appends": AppendRuns.from_proto}
