"""Delivering: reserve, settle, extend, expire.

Owns the translation between receipts and reservations and the walk over the deadline index; what a
reservation means is the subject of `queue_state`.
"""

import logging

from storage_svc.engines import rows
from storage_svc.engines.engine import Table
from storage_svc.engines.keys import read_text, read_u64, read_u64x3, u64
from storage_svc.loading.handles import Handle
from storage_svc.operations import (
    Acted,
    ActionOutcome,
    DeadReason,
    Expired,
    ExpireDue,
    ExpireReservation,
    Extend,
    ReadyDelayed,
    Reserve,
    Reserved,
    ReservedSlice,
    Settle,
    Settled,
    outbox,
)
from storage_svc.partition.commit import CommitContext
from storage_svc.queue import bodies
from storage_svc.queue.group import PASSED_MAX, Group
from storage_svc.queue.lane import Slice
from storage_svc.queue.reservation import Ending, Reservation
from tidemark.errors import Fenced, QuotaExceeded, ReservationNotFound
from tidemark.limits import EXCEPTIONS_MAX, GROUPS_PER_QUEUE_MAX, RUN_BYTES_MAX
from tidemark.receipts import Receipt
from tidemark.telemetry import counter, messaging, tracer
from tidemark.telemetry.messaging import Messages

ANSWER_BYTES_MAX = 2 * RUN_BYTES_MAX
"""What one hand-out may carry: the answer must fit one frame, and any run fits an answer."""

HANDED_OUT_BYTES_MAX = 32 * 1024 * 1024
"""Bodies that one commit hands out: beyond it whoever asks is told to ask again. All of them are in
memory until they are sent, however many consumers ask at once."""

_log = logging.getLogger(__name__)
_tracer = tracer(__name__)
_orphans = counter(
    "tidemark.storage.orphaned_index_entries",
    "Index entries without their record",
    zeros=[{"table": table.value} for table in (Table.DEADLINES, Table.DELAYS)],
)
_expired = counter("tidemark.storage.expired_reservations", description="Reservations that ran out")


async def reserve(commit: CommitContext, operation: Reserve) -> Reserved:
    """Hand out messages; what comes back short of the asked leaves an interest behind."""
    handle = await commit.queue(operation.lmq_name)
    state = handle.state
    group = state.groups.get(operation.group)
    if handle.topic.settings.exclusive and (group is None or not group.owner_client_id):
        raise Fenced("nobody owns the queue: subscribe first", epoch="0")
    if group is None:
        group = await new_group(commit, handle, operation.group, 0)
    state.check_owner(group, operation.owner_epoch)
    commit.journal.cancel_ready(state.record, group)
    taken, too_large = await _take(commit, handle, group, operation)
    visibility_ms = operation.visibility_ms or handle.topic.settings.visibility_timeout_ms
    counters = commit.counters
    reservations = state.reserve(
        group,
        taken,
        counters.reservation_id + 1,
        commit.now_ms + visibility_ms,
        commit.now_ms,
        commit.journal,
        session_id=operation.session_id,
        broker_incarnation=commit.state.claim.incarnation,
    )
    counters.reservation_id += len(reservations)
    counters.delivered += sum(each.slice.messages for each in reservations)
    # Whatever is still active was kept back by the bounds of the request alone.
    group.short = not group.ring or not (taken or too_large)
    if len(group.lanes) > group.lanes_max:
        await commit.forget_lanes(state)
    slices = [await _reserved(commit, handle, each, visibility_ms) for each in reservations]
    commit.handed_out_bytes += sum(len(each.body) for each in slices)
    return Reserved(tuple(slices), more=not group.short)


async def settle(commit: CommitContext, operation: Settle) -> Settled:
    """End messages of a reservation, or repeat the answer that was given before."""
    handle, reservation = await _find(commit, operation.receipt, operation.owner_epoch)
    not_before_ms = commit.now_ms + operation.delay_ms if operation.delay_ms else 0
    dead = operation.ending is Ending.DEAD_LETTER and reservation.live
    queue_id = handle.state.record.queue_id
    # Read before the settlement, which may be the last and erase the run.
    body = await commit.body(queue_id, reservation.slice.run) if dead else b""
    changed = handle.state.settle(
        reservation,
        reservation.spans(operation.index_ranges),
        operation.ending,
        commit.now_ms,
        commit.journal,
        not_before_ms=not_before_ms,
    )
    if dead:
        for start, end in changed:
            slice_ = reservation.slice._replace(start=start, end=end)
            reason = outbox.Death(DeadReason.REJECTED, reservation.group, operation.detail)
            await outbox.dispose(commit, handle, slice_, body, reason)
    messages = sum(end - start for start, end in changed)
    if operation.ending is Ending.ACK:
        commit.counters.acked += messages
    return Settled(messages, reservation.open_messages)


async def extend(commit: CommitContext, operation: Extend) -> Settled:
    """Another deadline, from now."""
    handle, reservation = await _find(commit, operation.receipt, operation.owner_epoch)
    visibility_ms = operation.visibility_ms or handle.topic.settings.visibility_timeout_ms
    handle.state.extend(reservation, commit.now_ms + visibility_ms, commit.journal)
    return Settled(reservation.open_messages, reservation.open_messages, visibility_ms)


async def expire_due(commit: CommitContext, operation: ExpireDue) -> Expired:
    """Expire what is due, from where the index is known to begin to the first not due (V5)."""
    messages = 0
    engine = commit.engine
    for table in (Table.DEADLINES, Table.DELAYS):
        start = u64(commit.state.marks.get(table, 0))
        due = await engine.scan(table, start, u64(commit.now_ms + 1), limit=operation.limit)
        for key, _ in due:
            if table is Table.DEADLINES:
                deadline_ms, queue_id, reservation_id = read_u64x3(key)
                action = ExpireReservation(queue_id, reservation_id, deadline_ms)
                acted = await expire_reservation(commit, action)
            else:
                acted = await ready_delayed(commit, delay_of(key))
            messages += acted.messages
        if len(due) < operation.limit:
            # Entries are only added for the time to come, so nothing will lie before it again.
            commit.state.marks[table] = commit.now_ms
    return Expired(messages)


async def expire_reservation(commit: CommitContext, operation: ExpireReservation) -> Acted:
    """Expire one reservation, if it still has the deadline that was seen (L8)."""
    if operation.expected_deadline_ms > commit.now_ms:
        return Acted(ActionOutcome.STALE)
    found = await commit.reservation(operation.queue_id, operation.reservation_id)
    if found is None:
        key = rows.deadline_key_of(operation.expected_deadline_ms, *operation[:2])
        await _clean_orphan(commit, Table.DEADLINES, key, operation.expected_deadline_ms)
        return Acted(ActionOutcome.STALE)
    handle, reservation = found
    if not reservation.live or reservation.deadline_ms != operation.expected_deadline_ms:
        return Acted(ActionOutcome.STALE)
    changed = handle.state.settle(reservation, (), Ending.EXPIRED, commit.now_ms, commit.journal)
    commit.journal.expired.append(reservation.reservation_id)
    _expired.add(1)
    messages = sum(end - start for start, end in changed)
    run = reservation.slice.run
    expired = Messages(
        handle.state.record.lmq_name,
        messages,
        reservation.group,
        commit.partition,
        reservation.slice.attempts,
    )
    messaging.moment(_tracer, messaging.EXPIRE, expired, run.traceparent)
    return Acted(ActionOutcome.DONE, messages)


async def ready_delayed(commit: CommitContext, operation: ReadyDelayed) -> Acted:
    """End one nack delay, if it is still the one that was seen."""
    if operation.expected_not_before_ms > commit.now_ms:
        return Acted(ActionOutcome.STALE)
    handle = await commit.queue_by_id(operation.queue_id)
    group = None if handle is None else handle.state.groups.get(operation.group)
    delayed = None if group is None else group.delayed.get(operation.start)
    if handle is None or group is None or delayed is None:
        key = rows.delay_key(
            operation.queue_id,
            operation.group,
            operation.start,
            operation.expected_not_before_ms,
        )
        await _clean_orphan(commit, Table.DELAYS, key, operation.expected_not_before_ms)
        return Acted(ActionOutcome.STALE)
    if delayed[1] != operation.expected_not_before_ms:
        return Acted(ActionOutcome.STALE)
    messages = handle.state.ready_delayed(group, operation.start, commit.journal)
    return Acted(ActionOutcome.DONE, messages)


def delay_of(key: bytes) -> ReadyDelayed:
    """The action that an entry of the delay index stands for."""
    group, at = read_text(key, 16)
    return ReadyDelayed(read_u64(key, 8), group.decode(), read_u64(key, at), read_u64(key))


async def new_group(commit: CommitContext, handle: Handle, name: str, base: int) -> Group:
    """A group that begins at `base`, with lanes for everything that is stored from there on."""
    state = handle.state
    if len(state.groups) >= GROUPS_PER_QUEUE_MAX:
        raise QuotaExceeded(
            f"queue {state.record.lmq_name} has at most {GROUPS_PER_QUEUE_MAX} groups",
            quota="groups",
        )
    # Messages that were gone before the group came are none of its business.
    stored = state.record.messages
    if base:
        runs = await commit.runs(state)
        stored = sum(max(0, run.end - max(base, run.first_offset)) for run in runs)
    group = state.add_group(name, base, stored, commit.journal)
    await commit.load_lanes(state, group)
    return group


async def _take(
    commit: CommitContext, handle: Handle, group: Group, operation: Reserve
) -> tuple[list[Slice], bool]:
    """Take messages from the lanes, reading on where a lane has run dry.

    Also returns whether the bytes allowed for no more, though there was more.
    """
    taken: list[Slice] = []
    messages_max, bytes_max = operation.messages_max, operation.bytes_max
    room_bytes, measured = ANSWER_BYTES_MAX, 0
    if len(group.delayed) + len(group.buried) >= EXCEPTIONS_MAX:
        return taken, False  # what came back must go first, or it would grow without end
    if commit.handed_out_bytes >= HANDED_OUT_BYTES_MAX:
        return taken, True
    while messages_max > 0:
        found = group.take(
            messages_max,
            bytes_max,
            commit.now_ms,
            max_attempts=handle.state.rules.max_attempts,
            at_least_one=not taken and not operation.strict_bytes,
            room_bytes=room_bytes,
        )
        if found.passed:
            handle.state.bury(group, found.passed, commit.journal)
        for slice_ in found.slices:
            messages_max -= slice_.messages
            bytes_max -= slice_.messages * slice_.run.message_bytes
            room_bytes -= slice_.run.body_bytes
        taken += found.slices
        if len(found.passed) == PASSED_MAX:
            commit.journal.ready(handle.state.record, group)  # there may be more: ask again
        if found.cramped and found.slices:
            for slice_ in taken[measured:]:
                room_bytes += slice_.run.body_bytes - len(await _body(commit, handle, slice_))
            measured = len(taken)
            continue
        if found.starved is None:
            return taken, found.too_large or found.cramped
        await commit.read_lane(handle.state, found.starved)
    return taken, False


async def _reserved(
    commit: CommitContext, handle: Handle, reservation: Reservation, visibility_ms: int
) -> ReservedSlice:
    slice_ = reservation.slice
    run = slice_.run
    queue_id = handle.state.record.queue_id
    receipt = Receipt(
        commit.partition, queue_id, reservation.reservation_id, reservation.owner_epoch
    )
    return ReservedSlice(
        reservation.reservation_id,
        receipt.encode(),
        queue_id,
        slice_.start,
        slice_.messages,
        await _body(commit, handle, slice_),
        slice_.attempts,
        slice_.deliveries,
        reservation.owner_epoch,
        visibility_ms,
        run.publish_time_ms,
        run.fairness_key,
        run.traceparent,
    )


async def _body(commit: CommitContext, handle: Handle, slice_: Slice) -> bytes:
    run = slice_.run
    body = await commit.body(handle.queue_id, run)
    if slice_.messages == run.messages:
        return body
    return bodies.cut(body, slice_.start - run.first_offset, slice_.end - run.first_offset)


async def _find(commit: CommitContext, data: bytes, owner_epoch: int) -> tuple[Handle, Reservation]:
    receipt = Receipt.decode(data)
    if receipt.partition != commit.partition:
        raise ReservationNotFound(f"the receipt is of partition {receipt.partition}")
    handle = await commit.queue_by_id(receipt.queue_id)
    if handle is None:
        raise ReservationNotFound("the queue of the receipt is gone")
    reservation = handle.state.find(receipt.reservation_id)
    group = handle.state.groups.get(reservation.group)
    if group is not None and group.owner_epoch:
        # The epoch of the caller, or that of the receipt where the caller named none.
        handle.state.check_owner(group, owner_epoch or receipt.owner_epoch)
    return handle, reservation


async def _clean_orphan(commit: CommitContext, table: Table, key: bytes, time_ms: int) -> None:
    """An index entry without its record is removed, with a warning (V5)."""
    (value,) = await commit.engine.load(table, [key])
    if value is not None and (table, key) not in commit.journal.erased_rows:
        commit.journal.forget_deadline(table, key, time_ms)
        _orphans.add(1, {"table": table.value})
        _log.warning("an orphan was removed", extra={"table": table.value, "key": key.hex()})
