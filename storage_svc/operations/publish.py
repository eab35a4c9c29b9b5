"""Appending: runs into queues, at once or when they are due.

Owns the checks of a publish (topic version, quotas, repeats, a full disk) and the schedule. A
scheduled run waits in the schedule and gets its offsets when it is due, never before.
"""

from struct import Struct

from storage_svc.engines import rows
from storage_svc.engines.engine import Table
from storage_svc.engines.keys import read_text, read_u64, text, u64, u64x2
from storage_svc.engines.paging import scan_all
from storage_svc.loading.handles import Handle
from storage_svc.operations import (
    Acted,
    ActionOutcome,
    Append,
    Appended,
    PromoteScheduled,
    Removed,
    Unschedule,
)
from storage_svc.partition import producers
from storage_svc.partition.commit import CommitContext
from storage_svc.queue.lane import Run
from storage_svc.queue.queue import QueueRecord
from tidemark.errors import (
    DataCorrupt,
    DiskFull,
    QueueFull,
    RunNotScheduled,
    TopicVersionMismatch,
)
from tidemark.names import topic_of
from tidemark.topics import Topic

_SCHEDULED = Struct(">QIQQ")  # queue, messages, publish time, dead deadline


async def append(commit: CommitContext, operation: Append) -> Appended:
    """Store a run, or answer a repeat with the first answer."""
    if commit.publishes_refused is not None:
        raise commit.publishes_refused
    topic = commit.topics.get(topic_of(operation.lmq_name))
    if operation.topic_version > topic.version:
        raise TopicVersionMismatch(
            f"version {operation.topic_version} of topic {topic.name} has not arrived here",
            version=str(topic.version),
        )
    answer = producers.Answer(0, 0, 0, operation.messages, 0)
    if operation.sequence:
        checksum = producers.checksum(operation.lmq_name, operation.body)
        answer = answer._replace(checksum=checksum)
        first = await commit.state.producers.find(operation.producer_id, operation.sequence, answer)
        if first is not None:
            return Appended(first.queue_id, first.first_offset, first.schedule_id, duplicate=True)
    if commit.disk_full:
        raise DiskFull("the disk is past its watermark: nothing new is stored")
    handle = await room_for(commit, topic, operation.lmq_name, operation.messages, operation.body)
    if operation.delay_ms:
        appended = _schedule(commit, handle, operation)
    else:
        appended = _append(commit, handle, operation)
    if operation.sequence:
        await commit.state.producers.remember(
            operation.producer_id,
            operation.sequence,
            answer._replace(
                queue_id=appended.queue_id,
                first_offset=appended.first_offset,
                schedule_id=appended.schedule_id,
            ),
            commit.now_ms,
            commit.journal.batch,
        )
    return appended


def append_run(
    commit: CommitContext,
    handle: Handle,
    body: bytes,
    messages: int,
    *,
    fairness_key: str,
    publish_time_ms: int,
    dead_deadline_ms: int,
    traceparent: str,
) -> Run:
    """Give a run the next offsets of its queue."""
    run = Run(
        handle.state.record.next_offset,
        messages,
        len(body),
        publish_time_ms,
        dead_deadline_ms,
        fairness_key,
        traceparent,
    )
    handle.state.append(run, body, commit.now_ms, commit.journal)
    if dead_deadline_ms:
        commit.indexed(Table.TTL, dead_deadline_ms)
    return run


async def room_for(
    commit: CommitContext, topic: Topic, lmq_name: str, messages: int, body: bytes
) -> Handle:
    """The handle of a queue that can take another run, created if there is none yet.

    Raises QueueFull, and creates nothing, if the quotas of the topic leave no room.
    """
    handle = await commit.find_queue(lmq_name)
    body_bytes = len(body)
    if handle is not None:
        record = handle.state.record
        messages += record.messages + record.scheduled
        body_bytes += record.body_bytes
    settings = topic.settings
    if 0 < settings.queue_messages_max < messages:
        raise QueueFull(
            f"queue {lmq_name} may hold {settings.queue_messages_max} messages",
            limit="queue_messages_max",
        )
    if 0 < settings.queue_bytes_max < body_bytes:
        raise QueueFull(
            f"queue {lmq_name} may hold {settings.queue_bytes_max} bytes",
            limit="queue_bytes_max",
        )
    return handle or await commit.queue_or_new(lmq_name)


async def promote(commit: CommitContext, operation: PromoteScheduled) -> Acted:
    """A scheduled run is due: it joins its queue, once and never early (L5)."""
    key = u64x2(operation.expected_due_ms, operation.schedule_id)
    (value,) = await commit.engine.load(Table.SCHEDULE, [key])
    gone = value is None or (Table.SCHEDULE, key) in commit.journal.erased_rows
    if value is None or gone or operation.expected_due_ms > commit.now_ms:
        return Acted(ActionOutcome.STALE)
    queue_id, messages, publish_time_ms, dead_deadline_ms = _SCHEDULED.unpack_from(value)
    fairness_key, at = read_text(value, _SCHEDULED.size)
    body_key = u64(operation.schedule_id)
    (body,) = await commit.engine.load(Table.SCHEDULE_BODIES, [body_key])
    _forget(commit, queue_id, operation.schedule_id, key)
    handle = await commit.queue_by_id(queue_id)
    if handle is None:  # its queue was deleted
        return Acted(ActionOutcome.STALE)
    if body is None:
        raise DataCorrupt(f"scheduled run {operation.schedule_id} has no body")
    handle.state.record.scheduled -= messages
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


async def unschedule(commit: CommitContext, operation: Unschedule) -> Removed:
    """Forget a scheduled run that is not yet due."""
    handle = await commit.queue(operation.lmq_name)
    record = handle.state.record
    due = await commit.engine.load(Table.SCHEDULED, [u64x2(record.queue_id, operation.schedule_id)])
    key = (due[0] or b"") + u64(operation.schedule_id)
    (value,) = await commit.engine.load(Table.SCHEDULE, [key])
    due_now = value is not None and read_u64(key) <= commit.now_ms
    if value is None or due_now or (Table.SCHEDULE, key) in commit.journal.erased_rows:
        raise RunNotScheduled(f"queue {operation.lmq_name} has no such scheduled run")
    messages = int(_SCHEDULED.unpack_from(value)[1])
    record.scheduled -= messages
    commit.journal.queue_changed(record)
    _forget(commit, record.queue_id, operation.schedule_id, key)
    return Removed(messages)


async def forget_schedules(commit: CommitContext, record: QueueRecord) -> None:
    """Forget all scheduled runs of a queue that is deleted or purged."""
    start, end = rows.queue_range(record.queue_id)
    stored = [row async for row in scan_all(commit.engine, Table.SCHEDULED, start, end)]
    for key, due in stored + commit.journal.puts_in(Table.SCHEDULED, start, end):
        _forget(commit, record.queue_id, read_u64(key, 8), due + key[8:])


def _append(commit: CommitContext, handle: Handle, operation: Append) -> Appended:
    run = append_run(
        commit,
        handle,
        operation.body,
        operation.messages,
        fairness_key=operation.fairness_key,
        publish_time_ms=commit.now_ms,
        dead_deadline_ms=_dead_deadline_ms(commit, handle, operation),
        traceparent=operation.traceparent,
    )
    return Appended(handle.state.record.queue_id, run.first_offset)


def _schedule(commit: CommitContext, handle: Handle, operation: Append) -> Appended:
    record = handle.state.record
    commit.counters.schedule_id += 1
    schedule_id = commit.counters.schedule_id
    due_ms = commit.now_ms + operation.delay_ms
    value = _SCHEDULED.pack(
        record.queue_id,
        operation.messages,
        commit.now_ms,
        _dead_deadline_ms(commit, handle, operation),
    )
    value += text(operation.fairness_key.encode()) + operation.traceparent.encode()
    batch = commit.journal.batch
    batch.put(Table.SCHEDULE, u64x2(due_ms, schedule_id), value)
    batch.put(Table.SCHEDULED, u64x2(record.queue_id, schedule_id), u64(due_ms))
    batch.put(Table.SCHEDULE_BODIES, u64(schedule_id), operation.body)
    record.scheduled += operation.messages
    record.last_activity_ms = commit.now_ms
    commit.journal.queue_changed(record)
    commit.indexed(Table.SCHEDULE, due_ms)
    return Appended(record.queue_id, 0, schedule_id)


def _forget(commit: CommitContext, queue_id: int, schedule_id: int, key: bytes) -> None:
    commit.journal.erase(Table.SCHEDULE, key)
    commit.journal.batch.delete(Table.SCHEDULED, u64x2(queue_id, schedule_id))
    commit.journal.batch.delete(Table.SCHEDULE_BODIES, u64(schedule_id))


def _dead_deadline_ms(commit: CommitContext, handle: Handle, operation: Append) -> int:
    """Counts from publishing, also for a run that waits for its time."""
    ttl_ms = operation.ttl_ms or handle.topic.settings.default_ttl_ms
    return commit.now_ms + ttl_ms if ttl_ms else 0
