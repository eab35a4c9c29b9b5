"""The schedule: runs that are published with a delay and get their offsets when they are due.

A scheduled run is in no queue until then: it cannot be delivered early, and it becomes ready once.
"""

from struct import Struct
from typing import NamedTuple

from storage_svc.engines import queue_rows
from storage_svc.engines.engine import Table
from storage_svc.engines.keys import read_text, read_u64, text, u64, u64x2
from storage_svc.engines.paging import scan_all
from storage_svc.loading.handles import Handle
from storage_svc.operations.fields import queue_name
from storage_svc.operations.operation import (
    STALE,
    Acted,
    ActionDecoders,
    ActionOutcome,
    ExchangeDecoders,
    Removed,
)
from storage_svc.operations.runs import append_run
from storage_svc.partition.commit import CommitContext
from storage_svc.queue.record import QueueRecord
from tidemark.api.storage.v1 import action_pb2, exchange_pb2
from tidemark.errors import RecordUnreadable, RunNotScheduled

_SCHEDULED = Struct(">QIQQ")  # queue, messages, publish time, dead deadline


class PromoteScheduled(NamedTuple):
    """Append a scheduled run to its queue, if it is due at the time that was read (L5)."""

    schedule_id: int
    expected_due_ms: int

    @classmethod
    def from_proto(cls, proto: action_pb2.PromoteScheduled) -> "PromoteScheduled":
        return cls(proto.schedule_id, proto.expected_due_ms)

    def write_to(self, proto: action_pb2.Action) -> None:
        proto.promote_scheduled.schedule_id = self.schedule_id
        proto.promote_scheduled.expected_due_ms = self.expected_due_ms

    async def apply(self, commit: CommitContext) -> Acted:
        key = u64x2(self.expected_due_ms, self.schedule_id)
        (value,) = await commit.engine.load(Table.SCHEDULE, [key])
        erased = (Table.SCHEDULE, key) in commit.journal.erased_rows
        if value is None or erased or self.expected_due_ms > commit.now_ms:
            return STALE
        queue_id, messages, publish_time_ms, dead_deadline_ms = _SCHEDULED.unpack_from(value)
        fairness_key, at = read_text(value, _SCHEDULED.size)
        handle = await commit.queue_by_id(queue_id, briefly=True)
        if handle is None or _is_purged(commit, queue_id, self.schedule_id):
            remove_scheduled(commit, queue_id, self.schedule_id, key)
            return STALE
        record = handle.state.record
        try:
            body = await commit.readable(
                Table.SCHEDULE_BODIES, u64(self.schedule_id), record.lmq_name
            )
        except RecordUnreadable:
            commit.state.left_out.add(Table.SCHEDULE, key, commit.now_ms)
            raise
        commit.state.left_out.discard(Table.SCHEDULE, key)
        remove_scheduled(commit, queue_id, self.schedule_id, key)
        record.scheduled -= messages
        append_run(
            commit,
            handle,
            body,
            messages,
            fairness_key=fairness_key.decode(),
            publish_time_ms=publish_time_ms,
            dead_deadline_ms=dead_deadline_ms,
            traceparent=value[at:].decode(),
        )
        return Acted(ActionOutcome.DONE, messages)


class Unschedule(NamedTuple):
    """Remove a scheduled run that is not yet due."""

    lmq_name: str
    schedule_id: int

    @classmethod
    def from_proto(cls, proto: exchange_pb2.Unschedule) -> "Unschedule":
        return cls(queue_name(proto.lmq_name), proto.schedule_id)

    async def apply(self, commit: CommitContext) -> Removed:
        handle = await commit.queue(self.lmq_name)
        record = handle.state.record
        due = await commit.engine.load(Table.SCHEDULED, [u64x2(record.queue_id, self.schedule_id)])
        key = (due[0] or b"") + u64(self.schedule_id)
        (value,) = await commit.engine.load(Table.SCHEDULE, [key])
        due_now = value is not None and read_u64(key) <= commit.now_ms
        gone = (Table.SCHEDULE, key) in commit.journal.erased_rows
        gone = gone or _is_purged(commit, record.queue_id, self.schedule_id)
        if value is None or due_now or gone:
            raise RunNotScheduled(f"queue {self.lmq_name} has no such scheduled run")
        messages = int(_SCHEDULED.unpack_from(value)[1])
        record.scheduled -= messages
        commit.journal.queue_changed(record)
        remove_scheduled(commit, record.queue_id, self.schedule_id, key)
        return Removed(messages)


def add_scheduled(
    commit: CommitContext,
    handle: Handle,
    body: bytes,
    messages: int,
    *,
    due_ms: int,
    fairness_key: str,
    dead_deadline_ms: int,
    traceparent: str,
) -> int:
    """Write a run into the schedule; returns its schedule id."""
    record = handle.state.record
    commit.counters.schedule_id += 1
    schedule_id = commit.counters.schedule_id
    value = _SCHEDULED.pack(record.queue_id, messages, commit.now_ms, dead_deadline_ms)
    value += text(fairness_key.encode()) + traceparent.encode()
    batch = commit.journal.batch
    batch.put(Table.SCHEDULE, u64x2(due_ms, schedule_id), value)
    batch.put(Table.SCHEDULED, u64x2(record.queue_id, schedule_id), u64(due_ms))
    batch.put(Table.SCHEDULE_BODIES, u64(schedule_id), body)
    record.scheduled += messages
    record.last_activity_ms = commit.now_ms
    commit.journal.queue_changed(record)
    commit.add_due(Table.SCHEDULE, due_ms)
    return schedule_id


async def remove_all_scheduled(commit: CommitContext, record: QueueRecord) -> None:
    """Remove every scheduled run of a queue that is deleted or purged."""
    start, end = queue_rows.queue_range(record.queue_id)
    stored = [row async for row in scan_all(commit.engine, Table.SCHEDULED, start, end)]
    for key, due in stored + commit.journal.puts_in(Table.SCHEDULED, start, end):
        remove_scheduled(commit, record.queue_id, read_u64(key, 8), due + key[8:])


def _is_purged(commit: CommitContext, queue_id: int, schedule_id: int) -> bool:
    purge = commit.state.erasures.purge_of(queue_id)
    return purge is not None and schedule_id <= purge.schedules_to


def remove_scheduled(commit: CommitContext, queue_id: int, schedule_id: int, key: bytes) -> None:
    """Remove a run from the schedule; `key` is that of its row there."""
    commit.journal.erase(Table.SCHEDULE, key)
    commit.journal.batch.delete(Table.SCHEDULED, u64x2(queue_id, schedule_id))
    commit.journal.batch.delete(Table.SCHEDULE_BODIES, u64(schedule_id))


OPERATIONS: ExchangeDecoders = {"unschedule": Unschedule.from_proto}
ACTIONS: ActionDecoders = {"promote_scheduled": PromoteScheduled.from_proto}
