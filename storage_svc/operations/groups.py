"""Groups: creating them, moving their progress, deleting them.

A move revokes what consumers of the group hold. Messages that only this group had
kept are dropped once it has moved on or is gone (R2).
"""

from enum import Enum
from typing import NamedTuple

from storage_svc.engines import group_rows
from storage_svc.engines.engine import Table
from storage_svc.engines.erasure_rows import ErasureKind
from storage_svc.engines.keys import prefix_end
from storage_svc.loading.handles import Handle
from storage_svc.operations.fields import group_name, queue_name
from storage_svc.operations.operation import ExchangeDecoders, Removed
from storage_svc.partition.commit import CommitContext
from storage_svc.queue.group import Group
from storage_svc.queue.queue import QueueState
from storage_svc.turns import in_turns
from tidemark.api.broker.v1 import subscription_pb2
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.errors import InvalidArgument, QuotaExceeded
from tidemark.field_checks import check_range
from tidemark.limits import GROUPS_PER_QUEUE_MAX, TIME_MS_MAX

LAST_MESSAGES_MAX = 1_000_000
"""How far back `last` may reach."""


class StartAt(Enum):
    """Where a group is to start."""

    EARLIEST = "earliest"
    LATEST = "latest"
    LAST = "last"
    OFFSET = "offset"
    TIME = "time"


class Start(NamedTuple):
    """A start position; `number` belongs to LAST and OFFSET, and to TIME in milliseconds."""

    at: StartAt
    number: int = 0

    @classmethod
    def from_proto(cls, proto: subscription_pb2.StartPosition) -> "Start":
        position = proto.WhichOneof("position")
        if position is None:
            raise InvalidArgument("a start without a position", field="start")
        if position == "time":
            # Rounded up: a message of the millisecond before is published before the time.
            number = proto.time.seconds * 1000 - (-proto.time.nanos // 1_000_000)
            check_range("time", number, 0, TIME_MS_MAX)
            return cls(StartAt.TIME, number)
        number = getattr(proto, position)
        if position == "last":
            check_range("last", number, 1, LAST_MESSAGES_MAX)
        return cls(StartAt(position), int(number) if position in ("last", "offset") else 0)


class GroupPlaced(NamedTuple):
    """The group exists."""

    cursor: int
    created: bool
    revoked: tuple[int, ...] = ()

    def write_to(self, proto: exchange_pb2.OperationResult) -> None:
        proto.place_group.cursor = self.cursor
        proto.place_group.created = self.created
        proto.place_group.revoked_reservation_ids.extend(self.revoked)


class PlaceGroup(NamedTuple):
    """Create a group, or move its progress; without a start it keeps what it has."""

    lmq_name: str
    group: str
    start: Start | None = None
    owner_epoch: int = 0

    @classmethod
    def from_proto(cls, proto: exchange_pb2.PlaceGroup) -> "PlaceGroup":
        start = Start.from_proto(proto.start) if proto.HasField("start") else None
        return cls(queue_name(proto.lmq_name), group_name(proto.group), start, proto.owner_epoch)

    async def apply(self, commit: CommitContext) -> GroupPlaced:
        handle = await commit.queue_or_new(self.lmq_name)
        state = handle.state
        group = state.groups.get(self.group)
        created = group is None
        if group is None:
            group = await new_group(commit, handle, self.group, 0)
        if self.owner_epoch:
            group.check_owner(self.owner_epoch)
        state.note_use(group, commit.now_ms, commit.journal)
        revoked: list[int] = []
        if self.start is not None:
            revoked = await _revoke(commit, state, group)
            commit.journal.add_expired(revoked)
            group = await move_group(commit, handle, group, self.start)
            await erase_settled(commit, handle)
        return GroupPlaced(group.cursor(state.record.next_offset), created, tuple(revoked))


class RemoveGroup(NamedTuple):
    """Delete a group of a queue."""

    lmq_name: str
    group: str

    @classmethod
    def from_proto(cls, proto: exchange_pb2.RemoveGroup) -> "RemoveGroup":
        return cls(queue_name(proto.lmq_name), group_name(proto.group))

    async def apply(self, commit: CommitContext) -> Removed:
        handle = await commit.queue(self.lmq_name)
        group = handle.state.group(self.group)
        commit.journal.add_expired(await _revoke(commit, handle.state, group))
        await delete_group(commit, handle, group)
        await erase_settled(commit, handle)
        return Removed(0)


async def group_or_new(commit: CommitContext, handle: Handle, name: str) -> Group:
    return handle.state.groups.get(name) or await new_group(commit, handle, name, 0)


async def new_group(commit: CommitContext, handle: Handle, name: str, base: int) -> Group:
    """A group that starts at `base`, with lanes for everything that is stored from there on."""
    state = handle.state
    if len(state.groups) >= GROUPS_PER_QUEUE_MAX:
        raise QuotaExceeded(
            f"queue {state.record.lmq_name} has at most {GROUPS_PER_QUEUE_MAX} groups",
            quota="groups",
        )
    # Messages that were deleted before the group was created are not part of its progress.
    stored = state.record.messages
    if base or state.record.addressed:
        runs = [run for run in await commit.runs(state) if run.is_for(name)]
        stored = sum(max(0, run.end - max(base, run.first_offset)) for run in runs)
    group = state.add_group(name, base, stored, commit.now_ms, commit.journal)
    await commit.load_lanes(state, group)
    return group


async def move_group(commit: CommitContext, handle: Handle, group: Group, start: Start) -> Group:
    """Let a group, of which nothing is reserved, start over at another position."""
    state = handle.state
    base = await _find_base(commit, handle, start)
    standing, group.standing = group.standing, None
    await delete_group(commit, handle, group)
    moved = await new_group(commit, handle, group.name, base)
    moved.owner_client_id, moved.owner_epoch = group.owner_client_id, group.owner_epoch
    moved.has_waiters, moved.standing = group.has_waiters, standing
    if moved.has_waiters and moved.ring:
        moved.has_waiters = False
        commit.journal.ready(state.record, moved)
    return moved


async def _find_base(commit: CommitContext, handle: Handle, start: Start) -> int:
    next_offset = handle.state.record.next_offset
    match start.at:
        case StartAt.EARLIEST:
            return 0
        case StartAt.LATEST:
            return next_offset
        case StartAt.LAST:
            return max(0, next_offset - start.number)
        case StartAt.OFFSET:
            return min(start.number, next_offset)
        case StartAt.TIME:
            # Not the first in order: scheduled messages are stored later than they are published.
            runs = await commit.runs(handle.state)
            since = (run.first_offset for run in runs if run.publish_time_ms >= start.number)
            return min(since, default=next_offset)


async def erase_settled(commit: CommitContext, handle: Handle) -> None:
    """Drop runs that no group waits for, after a group was removed or moved on (R2).

    In this commit, or in later ones if the queue is large.
    """
    if await commit.has_many_runs(handle.state):
        commit.begin_erasure(handle.queue_id, ErasureKind.SETTLED)
    else:
        handle.state.erase_settled(await commit.runs(handle.state), commit.journal)


async def _revoke(commit: CommitContext, state: QueueState, group: Group) -> list[int]:
    revoked: list[int] = []
    async for part in in_turns(list(group.live.values())):
        revoked += state.revoke(group, commit.journal, part)
    return revoked


async def delete_rows(commit: CommitContext, table: Table, start: bytes, end: bytes) -> None:
    """Few rows one by one; many as a range, which costs readers until it is compacted.

    Rows of the current commit cannot be read, so they are found among its puts.
    """
    for key, _ in commit.journal.puts_in(table, start, end):
        commit.journal.batch.delete(table, key)
    found = await commit.engine.scan(table, start, end, limit=1000)
    if len(found) == 1000:
        commit.journal.batch.delete_range(table, start, end)
    else:
        for key, _ in found:
            commit.journal.batch.delete(table, key)


async def delete_group(commit: CommitContext, handle: Handle, group: Group) -> None:
    """Remove a group's records; its reservations are revoked already."""
    state = handle.state
    record = state.record
    prefix = group_rows.group_key(record.queue_id, group.name)
    for offset, delayed in group.delayed.items():
        commit.journal.delete_returned(record, group, offset, delayed.not_before_ms)
    tables = [Table.LANES]
    if commit.state.erasures.purge_of(record.queue_id) is None:
        tables += Table.RETURNED, Table.BURIED
    else:
        # Rows that a purge has left are erased later: the delays to erase are found by them.
        for start in group.returned_undelayed:
            commit.journal.delete_returned(record, group, start)
    for table in tables:
        await delete_rows(commit, table, prefix, prefix_end(prefix))
    commit.end_standing(group)
    state.remove_group(group.name, commit.journal)


OPERATIONS: ExchangeDecoders = {
    "place_group": PlaceGroup.from_proto,
    "remove_group": RemoveGroup.from_proto,
}
