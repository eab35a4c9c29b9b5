"""The outbox: messages on their way to a dead-letter topic, or back from one (L6).

A slice that must leave becomes an outbox entry in the commit that settles it at its source; the
destination appends it if its sequence is above the high-water mark for that source; then the source
clears it. A crash at any point neither loses the entry nor appends it twice. An operator may drop
what waits.
"""

from collections.abc import Sequence
from enum import Enum
from struct import Struct
from typing import NamedTuple

from storage_svc.engines import outbox_rows
from storage_svc.engines.engine import Row, Table
from storage_svc.engines.keys import prefix_end, read_text, read_u64, successor, text, u32, u64
from storage_svc.engines.paging import scan_all
from storage_svc.operations import history
from storage_svc.operations.fields import check_body, queue_name
from storage_svc.operations.history import RetentionType
from storage_svc.operations.operation import (
    STALE,
    Acted,
    ActionDecoders,
    ActionOutcome,
    ExchangeDecoders,
    Removed,
)
from storage_svc.operations.runs import append_run, queue_with_room
from storage_svc.partition.commit import CommitContext
from storage_svc.queue.run import Slice
from tidemark import limits
from tidemark.api.storage.v1 import action_pb2, exchange_pb2
from tidemark.dead_letters import DeadLetterReason
from tidemark.errors import DiskFull, Unavailable
from tidemark.names import partition_of, topic_of
from tidemark.telemetry import messaging, tracer
from tidemark.telemetry.messaging import Messages

_ENTRY = Struct(">IIQ")  # destination partition, messages, create time

DROPPED_MAX = 1000
"""Entries that one commit drops; dropping more is many calls, with other commits in between."""

_tracer = tracer(__name__)


class DeadReason(Enum):
    """Why messages leave a queue for another one, or for good. Stored by value."""

    ATTEMPTS_EXHAUSTED = DeadLetterReason.ATTEMPTS_EXHAUSTED.value
    TIME_TO_LIVE = DeadLetterReason.TIME_TO_LIVE.value
    REJECTED = DeadLetterReason.REJECTED.value
    MAX_WAIT_TIME = DeadLetterReason.MAX_WAIT_TIME_EVICTION.value
    REDRIVE = "redrive"

    @classmethod
    def from_proto(cls, proto: action_pb2.DeadReason.ValueType) -> "DeadReason | None":
        """None for an unspecified or unknown reason."""
        return _REASONS.get(proto)

    def to_proto(self) -> action_pb2.DeadReason.ValueType:
        return action_pb2.DeadReason.Value(f"DEAD_REASON_{self.name}")


_REASONS = {each.to_proto(): each for each in DeadReason}


class OutboxEntry(NamedTuple):
    """A slice on its way to another queue: durable at its source, no longer deliverable there."""

    sequence: int
    destination_lmq_name: str
    destination_partition: int
    messages: int
    body: bytes
    fairness_key: str
    reason: DeadReason
    traceparent: str
    create_time_ms: int
    previous: int = 0
    """Sequence of the entry that waits before it for the same destination. It is known when entries
    are read in their order, and not stored: any of them may be dropped."""
    group: str = ""
    """The group that redriven messages died in."""

    @classmethod
    def from_proto(cls, proto: action_pb2.OutboxEntry) -> "OutboxEntry":
        # Headers of dead letters come on top of what a publisher may send.
        check_body(proto.count, proto.body, 2 * limits.RUN_BYTES_MAX)
        return cls(
            proto.sequence,
            queue_name(proto.destination_lmq_name),
            proto.destination_partition,
            proto.count,
            proto.body,
            proto.fairness_key,
            DeadReason.from_proto(proto.reason) or DeadReason.REJECTED,
            proto.traceparent,
            proto.create_time_ms,
            proto.previous_sequence,
            proto.group,
        )

    def to_proto(self) -> action_pb2.OutboxEntry:
        return action_pb2.OutboxEntry(
            sequence=self.sequence,
            destination_lmq_name=self.destination_lmq_name,
            destination_partition=self.destination_partition,
            count=self.messages,
            body=self.body,
            fairness_key=self.fairness_key,
            reason=self.reason.to_proto(),
            traceparent=self.traceparent,
            create_time_ms=self.create_time_ms,
            previous_sequence=self.previous,
            group=self.group,
        )


class AppendFromOutbox(NamedTuple):
    """Append an entry at its destination, if its sequence is above the high-water mark."""

    source_partition: int
    entry: OutboxEntry

    @classmethod
    def from_proto(cls, proto: action_pb2.AppendFromOutbox) -> "AppendFromOutbox":
        return cls(proto.source_partition, OutboxEntry.from_proto(proto.entry))

    def write_to(self, proto: action_pb2.Action) -> None:
        proto.append_from_outbox.source_partition = self.source_partition
        proto.append_from_outbox.entry.CopyFrom(self.entry.to_proto())

    async def apply(self, commit: CommitContext) -> Acted:
        """The destination's half: an entry is appended once, however often it is sent."""
        entry = self.entry
        source = (self.source_partition, entry.destination_lmq_name)
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
        handle = await queue_with_room(
            commit, topic, entry.destination_lmq_name, entry.messages, entry.body, briefly=True
        )
        append_run(
            commit,
            handle,
            entry.body,
            entry.messages,
            fairness_key=entry.fairness_key,
            publish_time_ms=commit.now_ms,
            dead_deadline_ms=0,
            traceparent=entry.traceparent,
            # Others have settled it. A group that is gone has none, and nothing may be lost.
            group=entry.group if entry.group in handle.state.groups else "",
        )
        moved = Messages(entry.destination_lmq_name, entry.messages, partition=commit.partition)
        messaging.moment(_tracer, messaging.PUBLISH, moved, entry.traceparent)
        commit.journal.raise_mark(source, entry.sequence)
        commit.journal.batch.put(Table.HIGH_WATER, mark_key, u64(entry.sequence))
        return Acted(ActionOutcome.DONE, entry.messages)


class ClearOutbox(NamedTuple):
    """Remove an entry from its source, once its destination has it."""

    destination_lmq_name: str
    sequence: int

    @classmethod
    def from_proto(cls, proto: action_pb2.ClearOutbox) -> "ClearOutbox":
        return cls(proto.destination_lmq_name, proto.sequence)

    async def apply(self, commit: CommitContext) -> Acted:
        key = outbox_rows.outbox_key(self.destination_lmq_name, self.sequence)
        (value,) = await commit.engine.load(Table.OUTBOX, [key])
        if value is None or (Table.OUTBOX, key) in commit.journal.erased_rows:
            return STALE
        commit.state.outbox.arrived(self.destination_lmq_name)
        await _remove(commit, self.destination_lmq_name, [(key, value)])
        return Acted(ActionOutcome.DONE, decode(key, value, b"").messages)


class PostponeOutbox(NamedTuple):
    """Leave a destination that refused alone for a while; in memory only."""

    destination_lmq_name: str

    @classmethod
    def from_proto(cls, proto: action_pb2.PostponeOutbox) -> "PostponeOutbox":
        return cls(proto.destination_lmq_name)

    async def apply(self, commit: CommitContext) -> Acted:
        retry_ms = commit.state.outbox.postpone(self.destination_lmq_name, commit.now_ms)
        if retry_ms is None:
            return STALE
        commit.journal.add_due(Table.OUTBOX, retry_ms)
        return Acted(ActionOutcome.DONE)


class DropOutbox(NamedTuple):
    """Drop what waits for a destination, by order of an operator: all of it, or one entry (L9)."""

    destination_lmq_name: str
    sequence: int = 0

    @classmethod
    def from_proto(cls, proto: exchange_pb2.DropOutbox) -> "DropOutbox":
        return cls(queue_name(proto.destination_lmq_name), proto.sequence)

    async def apply(self, commit: CommitContext) -> Removed:
        found = [
            row
            for row in await self._read(commit)
            if (Table.OUTBOX, row[0]) not in commit.journal.erased_rows
        ]
        if not found:
            return Removed(0)
        name, kind = self.destination_lmq_name, RetentionType.PURGE
        await _remove(commit, name, found)
        messages = sum(decode(key, value, b"").messages for key, value in found)
        history.write(commit, name, kind, "outbox drop", messages, 0)
        more = not self.sequence and len(found) == DROPPED_MAX
        return Removed(messages, next_token=successor(found[-1][0]) if more else b"")

    async def _read(self, commit: CommitContext) -> list[Row]:
        name = self.destination_lmq_name
        if not self.sequence:
            start = outbox_rows.outbox_key(name, commit.state.outbox.first(name))
            end = prefix_end(outbox_rows.outbox_prefix(name))
            return await commit.engine.scan(Table.OUTBOX, start, end, limit=DROPPED_MAX)
        key = outbox_rows.outbox_key(name, self.sequence)
        (value,) = await commit.engine.load(Table.OUTBOX, [key])
        return [] if value is None else [(key, value)]


def put(
    commit: CommitContext,
    destination: str,
    slice_: Slice,
    body: bytes,
    reason: DeadReason,
    group: str = "",
) -> None:
    """Write an entry; the commit that writes it also takes the messages from their queue."""
    commit.counters.outbox_sequence += 1
    entry = OutboxEntry(
        commit.counters.outbox_sequence,
        destination,
        partition_of(destination, commit.partitions),
        slice_.messages,
        body,
        slice_.run.fairness_key,
        reason,
        slice_.run.traceparent,
        commit.now_ms,
        group=group,
    )
    sequence = entry.sequence
    commit.journal.batch.put(
        Table.OUTBOX, outbox_rows.outbox_key(destination, sequence), encode(entry)
    )
    commit.journal.batch.put(Table.OUTBOX_BODIES, u64(sequence), body)
    commit.state.outbox.added(destination, entry.destination_partition, sequence)
    commit.journal.add_due(Table.OUTBOX, commit.now_ms)


async def _remove(commit: CommitContext, name: str, entries: Sequence[Row]) -> None:
    """Erase entries of one destination, which is forgotten if no other entry waits for it."""
    index = commit.state.outbox
    for key, _ in entries:
        _, sequence = outbox_rows.read_outbox_key(key)
        commit.journal.erase(Table.OUTBOX, key)
        commit.journal.batch.delete(Table.OUTBOX_BODIES, u64(sequence))
        index.removed(name, sequence)
    if not index.knows_last(name) and not await _any_waits(commit, name):
        index.forget(name)


async def _any_waits(commit: CommitContext, name: str) -> bool:
    start = outbox_rows.outbox_key(name, commit.state.outbox.first(name))
    end = prefix_end(outbox_rows.outbox_prefix(name))
    async for key, _ in scan_all(commit.engine, Table.OUTBOX, start, end):
        if (Table.OUTBOX, key) not in commit.journal.erased_rows:
            return True
    return False


def encode(entry: OutboxEntry) -> bytes:
    """The stored row of an entry; its body is a row of its own, read only when it is sent."""
    return (
        _ENTRY.pack(entry.destination_partition, entry.messages, entry.create_time_ms)
        + text(entry.fairness_key.encode())
        + text(entry.reason.value.encode())
        + text(entry.traceparent.encode())
        + entry.group.encode()
    )


def decode(key: bytes, value: bytes, body: bytes, previous: int = 0) -> OutboxEntry:
    partition, messages, create_time_ms = _ENTRY.unpack_from(value)
    destination, sequence = outbox_rows.read_outbox_key(key)
    fairness_key, at = read_text(value, _ENTRY.size)
    reason, at = read_text(value, at)
    traceparent, at = read_text(value, at)
    return OutboxEntry(
        sequence,
        destination,
        partition,
        messages,
        body,
        fairness_key.decode(),
        DeadReason(reason.decode()),
        traceparent.decode(),
        create_time_ms,
        previous,
        value[at:].decode(),
    )


OPERATIONS: ExchangeDecoders = {"drop_outbox": DropOutbox.from_proto}
ACTIONS: ActionDecoders = {
    "append_from_outbox": AppendFromOutbox.from_proto,
    "clear_outbox": ClearOutbox.from_proto,
    "postpone_outbox": PostponeOutbox.from_proto,
}
