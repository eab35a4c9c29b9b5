"""Administering: groups and queues as operators change them.

Owns moving and deleting groups, deleting and emptying queues. What a live reservation holds is
revoked by a move and spared by a purge.
"""

from storage_svc.engines import rows
from storage_svc.engines.engine import Table
from storage_svc.engines.keys import prefix_end
from storage_svc.loading.handles import Handle
from storage_svc.operations import (
    GroupPlaced,
    PlaceGroup,
    Purge,
    Removed,
    RemoveGroup,
    RemoveQueue,
    RetentionType,
    Start,
    StartAt,
    history,
)
from storage_svc.operations import publish as appending
from storage_svc.operations.deliver import new_group
from storage_svc.partition.commit import CommitContext
from storage_svc.queue.group import Group
from storage_svc.queue.lane import Run
from tidemark.errors import QueueNotFound, TopicNotEmpty

_QUEUE_TABLES = (
    Table.RUN_HEADERS,
    Table.RUN_BODIES,
    Table.GROUPS,
    Table.LANES,
    Table.EXCEPTIONS,
    Table.BURIED,
    Table.RESERVATIONS,
)
"""Tables whose keys begin with the queue."""


async def get_or_create_group(commit: CommitContext, handle: Handle, name: str) -> Group:
    return handle.state.groups.get(name) or await new_group(commit, handle, name, 0)


async def place_group(commit: CommitContext, operation: PlaceGroup) -> GroupPlaced:
    """Create a group, or move the progress of one that exists."""
    handle = await commit.queue_or_new(operation.lmq_name)
    state = handle.state
    group = state.groups.get(operation.group)
    created = group is None
    if group is None:
        group = await new_group(commit, handle, operation.group, 0)
    if operation.owner_epoch:
        state.check_owner(group, operation.owner_epoch)
    revoked: list[int] = []
    if operation.start is not None:
        revoked = state.revoke(group, commit.journal)
        commit.journal.expired += revoked
        group = await move(commit, handle, group, operation.start)
        await erase_settled(commit, handle)
    return GroupPlaced(group.cursor(state.record.next_offset), created, tuple(revoked))


async def move(commit: CommitContext, handle: Handle, group: Group, start: Start) -> Group:
    """Let a group, of which nothing is reserved, begin anew somewhere else."""
    state = handle.state
    next_offset = state.record.next_offset
    base = {
        StartAt.EARLIEST: 0,
        StartAt.LATEST: next_offset,
        StartAt.LAST: max(0, next_offset - start.number),
        StartAt.OFFSET: min(start.number, next_offset),
    }[start.at]
    await _forget_group(commit, handle, group)
    moved = await new_group(commit, handle, group.name, base)
    moved.owner_client_id, moved.owner_epoch = group.owner_client_id, group.owner_epoch
    moved.short = group.short
    if moved.short and moved.ring:
        moved.short = False
        commit.journal.ready(state.record, moved)
    return moved


async def remove_group(commit: CommitContext, operation: RemoveGroup) -> Removed:
    """Delete a group; what only it had kept is dropped with it."""
    handle = await commit.queue(operation.lmq_name)
    group = handle.state.group(operation.group)
    commit.journal.expired += handle.state.revoke(group, commit.journal)
    await _forget_group(commit, handle, group)
    await erase_settled(commit, handle)
    return Removed(0)


async def remove_queue(commit: CommitContext, operation: RemoveQueue) -> Removed:
    """Delete a queue and everything in it."""
    handle = await commit.queue(operation.lmq_name)
    record = handle.state.record
    if operation.expected_queue_id not in (0, record.queue_id):
        raise QueueNotFound(f"queue {record.lmq_name} is another one now", queue=record.lmq_name)
    if operation.only_empty and (record.messages or record.scheduled):
        raise TopicNotEmpty(f"queue {record.lmq_name} holds messages", queue=record.lmq_name)
    await delete_queue(commit, handle)
    return Removed(record.messages + record.scheduled, record.body_bytes)


async def delete_queue(commit: CommitContext, handle: Handle) -> None:
    """Erase every trace of a queue but its identity, which is not given again."""
    record = handle.state.record
    for reservation in handle.state.reservations.values():
        if reservation.live:
            commit.journal.delete_deadline(record, reservation)
            commit.journal.expired.append(reservation.reservation_id)
    for group in handle.state.groups.values():
        for offset, (_, not_before_ms) in group.delayed.items():
            commit.journal.delete_exception(record, group, offset, not_before_ms)
    await appending.forget_schedules(commit, record)
    await _forget_ttl(commit, handle)
    start, end = rows.queue_range(record.queue_id)
    for table in _QUEUE_TABLES:
        await _delete_rows(commit, table, start, end)
    commit.journal.queue_removed(record)
    commit.counters.queues -= 1
    commit.handles.drop(record.lmq_name)


async def purge(commit: CommitContext, operation: Purge) -> Removed:
    """Delete what no live reservation holds, scheduled or not; one history row for all of it."""
    handle = await commit.queue(operation.lmq_name)
    state = handle.state
    record = state.record
    messages = body_bytes = skipped = 0
    held = state.held_runs()
    lanes: dict[str, list[Run]] = {}
    for run in await commit.runs(state):
        if run.first_offset in held:
            skipped += run.messages
            continue
        lanes.setdefault(run.fairness_key, []).append(run)
        messages += run.messages
        body_bytes += run.body_bytes
    for runs in lanes.values():  # not run by run: each time looks at all that came back
        state.delete_runs(runs, commit.journal)
    if record.scheduled:
        messages += record.scheduled
        await appending.forget_schedules(commit, record)
        record.scheduled = 0
        commit.journal.queue_changed(record)
    if messages:
        history.write(commit, record.lmq_name, RetentionType.PURGE, "purge", messages, body_bytes)
    return Removed(messages, body_bytes, skipped)


async def _forget_group(commit: CommitContext, handle: Handle, group: Group) -> None:
    """Remove a group's records; its reservations are revoked already."""
    state = handle.state
    record = state.record
    prefix = rows.group_key(record.queue_id, group.name)
    for offset, (_, not_before_ms) in group.delayed.items():
        commit.journal.delete_exception(record, group, offset, not_before_ms)
    for table in (Table.LANES, Table.EXCEPTIONS, Table.BURIED):
        await _delete_rows(commit, table, prefix, prefix_end(prefix))
    state.remove_group(group.name, commit.journal)


async def _delete_rows(commit: CommitContext, table: Table, start: bytes, end: bytes) -> None:
    """Few rows one by one; many as a range, which costs readers until it is compacted.

    Rows of the commit under way cannot be read, so they are found among its puts.
    """
    for key, _ in commit.journal.puts_in(table, start, end):
        commit.journal.batch.delete(table, key)
    found = await commit.engine.scan(table, start, end, limit=1000)
    if len(found) == 1000:
        commit.journal.batch.delete_range(table, start, end)
    else:
        for key, _ in found:
            commit.journal.batch.delete(table, key)


async def _forget_ttl(commit: CommitContext, handle: Handle) -> None:
    for run in await commit.runs(handle.state):
        if run.dead_deadline_ms:
            commit.journal.batch.delete(Table.TTL, rows.ttl_key(handle.queue_id, run))


async def erase_settled(commit: CommitContext, handle: Handle) -> None:
    """Drop what nobody waits for any more, now that a group went or moved on (R2)."""
    runs = await commit.runs(handle.state)
    handle.state.erase_settled(runs, commit.journal)
