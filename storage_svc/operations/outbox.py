"""The outbox: messages on their way to a dead-letter topic, or back from one (L6).

A slice that must leave becomes an outbox entry in the commit that settles it at its source; the
destination appends it if its sequence is above the high-water mark for that source; then the source
clears it. Whoever dies in between, the entry is neither lost nor appended twice.
"""

import logging
from collections.abc import Mapping
from struct import Struct
from typing import NamedTuple

from storage_svc.engines.engine import Table
from storage_svc.engines.keys import read_text, read_u64, text, u32, u64
from storage_svc.loading.handles import Handle
from storage_svc.operations import (
    Acted,
    ActionOutcome,
    AppendFromOutbox,
    ClearOutbox,
    DeadReason,
    OutboxEntry,
    RetentionType,
    history,
)
from storage_svc.operations import publish as appending
from storage_svc.partition.commit import CommitContext
from storage_svc.queue import bodies
from storage_svc.queue.lane import Slice
from tidemark.errors import DiskFull, Unavailable
from tidemark.limits import RUN_BYTES_MAX
from tidemark.names import partition_of, topic_of
from tidemark.telemetry import counter, messaging, tracer
from tidemark.telemetry.messaging import Messages

HEADER_PREFIX = "tidemark-dead-"
HEADER_REASON = "tidemark-dead-reason"
HEADER_DETAIL = "tidemark-dead-detail"
HEADER_TOPIC = "tidemark-dead-topic"
HEADER_QUEUE = "tidemark-dead-queue"
HEADER_OFFSET = "tidemark-dead-offset"
HEADER_GROUP = "tidemark-dead-group"
HEADER_ATTEMPTS = "tidemark-dead-attempts"
HEADER_TIME = "tidemark-dead-time-ms"

_ENTRY = Struct(">IIQQ")  # destination partition, messages, create time, previous sequence

_log = logging.getLogger(__name__)
_tracer = tracer(__name__)
_buried = counter(
    "tidemark.storage.dead_messages",
    description="Messages that were dead-lettered or deleted",
    zeros=[{"reason": reason.value} for reason in DeadReason],
)
_HISTORY_TYPES = {
    DeadReason.ATTEMPTS_EXHAUSTED: RetentionType.ATTEMPTS_EXHAUSTED,
    DeadReason.TIME_TO_LIVE: RetentionType.TIME_TO_LIVE,
    DeadReason.REJECTED: RetentionType.ATTEMPTS_EXHAUSTED,
    DeadReason.MAX_WAIT_TIME: RetentionType.MAX_WAIT_TIME_EVICTION,
}


class Death(NamedTuple):
    """Why messages can not be delivered, and to whom."""

    reason: DeadReason
    groups: str  # comma-separated where several are concerned
    detail: str = ""


async def dispose(
    commit: CommitContext, handle: Handle, slice_: Slice, body: bytes, death: Death
) -> None:
    """Messages that were just settled go to the dead-letter topic, or away for good."""
    record = handle.state.record
    run = slice_.run
    _buried.add(slice_.messages, {"reason": death.reason.value})
    dead = Messages(
        record.lmq_name, slice_.messages, death.groups, commit.partition, slice_.attempts
    )
    messaging.moment(_tracer, messaging.DEAD_LETTER, dead, run.traceparent)
    destination = handle.topic.settings.dead_letter_topic
    if not destination:
        _log.info(
            "messages were deleted",
            extra={
                "queue": record.lmq_name,
                "offset": slice_.start,
                "messages": slice_.messages,
                "reason": death.reason.value,
                "group": death.groups,
            },
        )
        bytes_removed = slice_.messages * run.message_bytes
        kind = _HISTORY_TYPES[death.reason]
        history.write(commit, record.lmq_name, kind, "sweep", slice_.messages, bytes_removed)
        return
    if slice_.messages != run.messages:
        body = bodies.cut(body, slice_.start - run.first_offset, slice_.end - run.first_offset)
    headers = {
        HEADER_REASON: death.reason.value,
        HEADER_TOPIC: handle.topic.name,
        HEADER_QUEUE: record.lmq_name,
        HEADER_GROUP: death.groups,
        HEADER_ATTEMPTS: str(slice_.attempts),
        HEADER_TIME: str(commit.now_ms),
    }
    if death.detail:
        headers[HEADER_DETAIL] = death.detail
    await _put_labelled(commit, destination, slice_, body, headers, death.reason)


async def _put_labelled(
    commit: CommitContext,
    destination: str,
    slice_: Slice,
    body: bytes,
    headers: Mapping[str, str],
    reason: DeadReason,
) -> None:
    """In parts where the headers make it larger than a run may be: no frame would take it."""
    labelled = bodies.label(body, headers, slice_.start, HEADER_OFFSET)
    half = slice_.messages // 2
    if not half or len(labelled) <= RUN_BYTES_MAX:
        await put(commit, destination, slice_, labelled, reason)
        return
    middle = slice_.start + half
    for part, at in ((slice_._replace(end=middle), 0), (slice_._replace(start=middle), half)):
        part_body = bodies.cut(body, at, at + part.messages)
        await _put_labelled(commit, destination, part, part_body, headers, reason)


async def put(
    commit: CommitContext, destination: str, slice_: Slice, body: bytes, reason: DeadReason
) -> None:
    """Write an entry; the commit that writes it also takes the messages from their queue."""
    counters = commit.counters
    counters.outbox_sequence += 1
    tail_key = text(destination.encode())
    previous = commit.journal.outbox_tails.get(destination)
    if previous is None:
        (stored,) = await commit.engine.load(Table.OUTBOX_TAILS, [tail_key])
        previous = 0 if stored is None else read_u64(stored)
    commit.journal.outbox_tails[destination] = counters.outbox_sequence
    commit.journal.batch.put(Table.OUTBOX_TAILS, tail_key, u64(counters.outbox_sequence))
    entry = OutboxEntry(
        counters.outbox_sequence,
        destination,
        partition_of(destination, commit.partitions),
        slice_.messages,
        body,
        slice_.run.fairness_key,
        reason,
        slice_.run.traceparent,
        commit.now_ms,
        previous,
    )
    key = u64(entry.sequence)
    commit.journal.batch.put(Table.OUTBOX, key, encode(entry))
    commit.journal.batch.put(Table.OUTBOX_BODIES, key, body)
    commit.journal.indexed.append((Table.OUTBOX, commit.now_ms))


async def append_from(commit: CommitContext, operation: AppendFromOutbox) -> Acted:
    """The destination's half: append once, whatever is repeated."""
    entry = operation.entry
    source = (operation.source_partition, entry.destination_lmq_name)
    mark_key = u32(source[0]) + text(source[1].encode())
    mark = commit.journal.high_water.get(source)
    if mark is None:
        (stored,) = await commit.engine.load(Table.HIGH_WATER, [mark_key])
        mark = 0 if stored is None else read_u64(stored)
    if entry.sequence <= mark:
        return Acted(ActionOutcome.STALE, entry.messages)
    if entry.previous > mark:
        # An earlier one was refused: taking this one first would make the earlier look done.
        raise Unavailable(
            f"entry {entry.sequence} comes after {entry.previous}, which is still to come",
            missing=str(entry.previous),
        )
    if commit.publishes_refused is not None:
        raise commit.publishes_refused
    if commit.disk_full:
        raise DiskFull("the disk is past its watermark: nothing new is stored")
    topic = commit.topics.get(topic_of(entry.destination_lmq_name))
    handle = await appending.room_for(
        commit, topic, entry.destination_lmq_name, entry.messages, entry.body
    )
    appending.append_run(
        commit,
        handle,
        entry.body,
        entry.messages,
        fairness_key=entry.fairness_key,
        publish_time_ms=commit.now_ms,
        dead_deadline_ms=0,
        traceparent=entry.traceparent,
    )
    moved = Messages(entry.destination_lmq_name, entry.messages, partition=commit.partition)
    messaging.moment(_tracer, messaging.PUBLISH, moved, entry.traceparent)
    commit.journal.high_water[source] = entry.sequence
    commit.journal.batch.put(Table.HIGH_WATER, mark_key, u64(entry.sequence))
    return Acted(ActionOutcome.DONE, entry.messages)


async def clear(commit: CommitContext, operation: ClearOutbox) -> Acted:
    """The source's half: the destination has it."""
    key = u64(operation.sequence)
    (value,) = await commit.engine.load(Table.OUTBOX, [key])
    if value is None or (Table.OUTBOX, key) in commit.journal.erased_rows:
        return Acted(ActionOutcome.STALE)
    commit.journal.erase(Table.OUTBOX, key)
    commit.journal.batch.delete(Table.OUTBOX_BODIES, key)
    return Acted(ActionOutcome.DONE, decode(key, value, b"").messages)


def encode(entry: OutboxEntry) -> bytes:
    """An entry without its body, which nobody reads while the entry has to wait."""
    return (
        _ENTRY.pack(
            entry.destination_partition, entry.messages, entry.create_time_ms, entry.previous
        )
        + text(entry.destination_lmq_name.encode())
        + text(entry.fairness_key.encode())
        + text(entry.reason.value.encode())
        + text(entry.traceparent.encode())
    )


def destination_of(value: bytes) -> str:
    """Where an entry goes, without looking at the rest."""
    return read_text(value, _ENTRY.size)[0].decode()


def decode(key: bytes, value: bytes, body: bytes) -> OutboxEntry:
    partition, messages, create_time_ms, previous = _ENTRY.unpack_from(value)
    destination, at = read_text(value, _ENTRY.size)
    fairness_key, at = read_text(value, at)
    reason, at = read_text(value, at)
    traceparent, _ = read_text(value, at)
    return OutboxEntry(
        read_u64(key),
        destination.decode(),
        partition,
        messages,
        body,
        fairness_key.decode(),
        DeadReason(reason.decode()),
        traceparent.decode(),
        create_time_ms,
        previous,
    )
