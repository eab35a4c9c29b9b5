"""Expiry: reservations whose deadline has passed, and nack delays that are over (V1-V5).

Walks over the deadline index from where it is known to begin to the first entry that is not due, so
that it costs what is due and not what is reserved.
"""

import logging
from typing import NamedTuple

from storage_svc.engines import group_rows, reservation_rows
from storage_svc.engines.engine import Table
from storage_svc.engines.keys import read_text, read_u64, read_u64x3, u64
from storage_svc.operations.operation import (
    STALE,
    Acted,
    ActionDecoders,
    ActionOutcome,
    ExchangeDecoders,
)
from storage_svc.partition.commit import CommitContext
from storage_svc.queue.reservation import Ending
from storage_svc.turns import in_turns
from tidemark.api.storage.v1 import action_pb2, exchange_pb2
from tidemark.telemetry import counter, messaging, tracer
from tidemark.telemetry.messaging import Messages

_log = logging.getLogger(__name__)
_tracer = tracer(__name__)
_orphans = counter(
    "tidemark.storage.orphaned_index_entries",
    "Index entries without their record",
    zeros=[{"table": table.value} for table in (Table.DEADLINES, Table.DELAYS)],
)
_expired = counter("tidemark.storage.expired_reservations", description="Reservations that ran out")


class ExpireReservation(NamedTuple):
    """Expire one reservation, if it still has the deadline that was read (L8)."""

    queue_id: int
    reservation_id: int
    expected_deadline_ms: int

    @classmethod
    def from_proto(cls, proto: action_pb2.ExpireReservation) -> "ExpireReservation":
        return cls(proto.queue_id, proto.reservation_id, proto.expected_deadline_ms)

    @classmethod
    def from_index(cls, key: bytes) -> "ExpireReservation":
        """The action for an entry of the deadline index."""
        deadline_ms, queue_id, reservation_id = read_u64x3(key)
        return cls(queue_id, reservation_id, deadline_ms)

    def write_to(self, proto: action_pb2.Action) -> None:
        proto.expire_reservation.queue_id = self.queue_id
        proto.expire_reservation.reservation_id = self.reservation_id
        proto.expire_reservation.expected_deadline_ms = self.expected_deadline_ms

    async def apply(self, commit: CommitContext) -> Acted:
        if self.expected_deadline_ms > commit.now_ms:
            return STALE
        found = await commit.reservation(self.queue_id, self.reservation_id, briefly=True)
        if found is None:
            key = reservation_rows.deadline_key(
                self.expected_deadline_ms, self.queue_id, self.reservation_id
            )
            await _remove_orphan(
                commit, Table.DEADLINES, key, self.expected_deadline_ms, self.queue_id
            )
            return STALE
        handle, reservation = found
        if not reservation.live or reservation.deadline_ms != self.expected_deadline_ms:
            return STALE
        changed = handle.state.settle(
            reservation,
            (),
            Ending.EXPIRED,
            commit.now_ms,
            commit.journal,
            chance=commit.chance(),
        )
        commit.journal.add_expired((reservation.reservation_id,))
        _expired.add(1)
        messages = sum(end - start for start, end in changed)
        expired = Messages(
            handle.state.record.lmq_name,
            messages,
            reservation.group,
            commit.partition,
            reservation.slice.attempts,
        )
        run = reservation.slice.run
        messaging.moment(_tracer, messaging.EXPIRE, expired, run.traceparent)
        return Acted(ActionOutcome.DONE, messages)


class ReadyDelayed(NamedTuple):
    """End the delay of nacked messages, if it is still the one that was read (L8)."""

    queue_id: int
    group: str
    start: int
    expected_not_before_ms: int

    @classmethod
    def from_proto(cls, proto: action_pb2.ReadyDelayed) -> "ReadyDelayed":
        return cls(proto.queue_id, proto.group, proto.first_offset, proto.expected_not_before_ms)

    @classmethod
    def from_index(cls, key: bytes) -> "ReadyDelayed":
        """The action for an entry of the delay index."""
        group, at = read_text(key, 16)
        return cls(read_u64(key, 8), group.decode(), read_u64(key, at), read_u64(key))

    def write_to(self, proto: action_pb2.Action) -> None:
        proto.ready_delayed.queue_id = self.queue_id
        proto.ready_delayed.group = self.group
        proto.ready_delayed.first_offset = self.start
        proto.ready_delayed.expected_not_before_ms = self.expected_not_before_ms

    async def apply(self, commit: CommitContext) -> Acted:
        not_before_ms = self.expected_not_before_ms
        if not_before_ms > commit.now_ms:
            return STALE
        handle = await commit.queue_by_id(self.queue_id, briefly=True)
        group = None if handle is None else handle.state.groups.get(self.group)
        delayed = None if group is None else group.delayed.get(self.start)
        if handle is None or group is None or delayed is None:
            key = group_rows.delay_key(self.queue_id, self.group, self.start, not_before_ms)
            await _remove_orphan(commit, Table.DELAYS, key, not_before_ms, self.queue_id)
            return STALE
        if delayed.not_before_ms != not_before_ms:
            return STALE
        messages = handle.state.ready_delayed(group, self.start, commit.journal)
        return Acted(ActionOutcome.DONE, messages)


class Expired(NamedTuple):
    """How much was due."""

    messages: int

    def write_to(self, proto: exchange_pb2.OperationResult) -> None:
        proto.expire_due.messages = self.messages


class ExpireDue(NamedTuple):
    """Expire reservations and end delays that are due by partition time, up to a limit (V5)."""

    limit: int = 1000

    @classmethod
    def from_proto(cls, _: exchange_pb2.ExpireDue) -> "ExpireDue":
        return cls()

    async def apply(self, commit: CommitContext) -> Expired:
        messages = 0
        for table, action in ((Table.DEADLINES, ExpireReservation), (Table.DELAYS, ReadyDelayed)):
            start = u64(commit.state.due.mark_ms(table))
            end = u64(commit.now_ms + 1)
            due = await commit.engine.scan(table, start, end, limit=self.limit)
            async for part in in_turns(due):
                for key, _ in part:
                    messages += (await action.from_index(key).apply(commit)).messages
            if len(due) < self.limit:
                # Entries are only added for the time to come: nothing will lie before it again.
                commit.state.due.scanned(table, commit.now_ms)
        return Expired(messages)


async def _remove_orphan(
    commit: CommitContext, table: Table, key: bytes, time_ms: int, queue_id: int
) -> None:
    """An index entry without its record is removed; with a warning, unless the rows of its queue
    are being erased (V5)."""
    (value,) = await commit.engine.load(table, [key])
    if value is None or (table, key) in commit.journal.erased_rows:
        return
    commit.journal.forget_deadline(table, key, time_ms)
    if not commit.state.erasures.concerns(queue_id):
        _orphans.add(1, {"table": table.value})
        _log.warning("an orphan was removed", extra={"table": table.value, "key": key.hex()})


OPERATIONS: ExchangeDecoders = {"expire_due": ExpireDue.from_proto}
ACTIONS: ActionDecoders = {
    "expire_reservation": ExpireReservation.from_proto,
    "ready_delayed": ReadyDelayed.from_proto,
}
