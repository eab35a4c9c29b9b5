"""Queues: deleting, emptying and pausing them.

A deleted queue leaves no trace but its identity, which is never given again. A purge spares what a
live reservation holds. Both take effect in one commit; the rows of a large queue leave in later
ones (`erase.py`).
"""

from typing import NamedTuple

from storage_svc.engines import erasure_rows, queue_rows, run_rows
from storage_svc.engines.engine import Table
from storage_svc.engines.erasure_rows import ErasureKind
from storage_svc.loading.handles import Handle
from storage_svc.operations import history
from storage_svc.operations.fields import queue_name
from storage_svc.operations.groups import delete_rows
from storage_svc.operations.history import RetentionType
from storage_svc.operations.operation import ExchangeDecoders, Removed
from storage_svc.operations.schedule import remove_all_scheduled
from storage_svc.partition import erasures
from storage_svc.partition.commit import CommitContext
from storage_svc.partition.erasures import Erasure
from storage_svc.queue.purge import PurgeMark, Spared, purge
from storage_svc.queue.queue import QueueState
from storage_svc.queue.run import Run
from storage_svc.turns import in_turns, release
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.errors import QueueNotFound, TopicNotEmpty

QUEUE_TABLES = (
    Table.RUN_HEADERS,
    Table.RUN_BODIES,
    Table.GROUPS,
    Table.LANES,
    Table.RETURNED,
    Table.BURIED,
    Table.RESERVATIONS,
    Table.SETTLED,
)
"""Tables whose keys begin with the queue."""


TURN_RUNS_MAX = 2_000
"""Spared runs that one turn of the event loop counts."""


class RemoveQueue(NamedTuple):
    """Delete a queue with everything in it."""

    lmq_name: str
    expected_queue_id: int = 0
    only_empty: bool = False

    @classmethod
    def from_proto(cls, proto: exchange_pb2.RemoveQueue) -> "RemoveQueue":
        return cls(queue_name(proto.lmq_name), proto.expected_queue_id, proto.only_empty)

    async def apply(self, commit: CommitContext) -> Removed:
        handle = await commit.queue(self.lmq_name)
        record = handle.state.record
        if self.expected_queue_id not in (0, record.queue_id):
            raise QueueNotFound(
                f"queue {record.lmq_name} is another one now", queue=record.lmq_name
            )
        if self.only_empty and (record.messages or record.scheduled):
            raise TopicNotEmpty(f"queue {record.lmq_name} holds messages", queue=record.lmq_name)
        removed = Removed(record.messages + record.scheduled, record.body_bytes)
        if removed.messages:
            history.write(
                commit,
                record.lmq_name,
                RetentionType.PURGE,
                "delete",
                removed.messages,
                removed.body_bytes,
            )
        await delete_queue(commit, handle)
        return removed


class Paused(NamedTuple):
    """The queue is paused or resumed."""

    changed: bool

    def write_to(self, proto: exchange_pb2.OperationResult) -> None:
        proto.pause_queue.changed = self.changed


class PauseQueue(NamedTuple):
    """Pause a queue for consumers, or resume it (L10).

    One that is paused is created where it does not exist: a queue over several partitions is paused
    in all of them, also before its first message there.
    """

    lmq_name: str
    paused: bool = True

    @classmethod
    def from_proto(cls, proto: exchange_pb2.PauseQueue) -> "PauseQueue":
        return cls(queue_name(proto.lmq_name), proto.paused)

    async def apply(self, commit: CommitContext) -> Paused:
        if self.paused:
            handle = await commit.queue_or_new(self.lmq_name)
        else:
            handle = await commit.queue(self.lmq_name)
        changed = handle.state.pause(self.paused, commit.journal)
        if changed:
            commit.counters.paused_queues += 1 if self.paused else -1
        return Paused(changed)


class Purge(NamedTuple):
    """Delete the messages of a queue that no live reservation holds, scheduled ones included."""

    lmq_name: str

    @classmethod
    def from_proto(cls, proto: exchange_pb2.Purge) -> "Purge":
        return cls(queue_name(proto.lmq_name))

    async def apply(self, commit: CommitContext) -> Removed:
        handle = await commit.queue(self.lmq_name)
        if await _is_large(commit, handle.state):
            removed = await _purge_by_mark(commit, handle.state)
        else:
            removed = await _purge_at_once(commit, handle.state)
        if removed.messages:
            kind, sizes = RetentionType.PURGE, (removed.messages, removed.body_bytes)
            history.write(commit, self.lmq_name, kind, "purge", *sizes)
        return removed


async def delete_queue(commit: CommitContext, handle: Handle) -> None:
    """Delete a queue: nothing is left of it but its identity, and rows to be erased if it is large.

    Its rows are never read again: its name leads to another identity from now on.
    """
    state = handle.state
    record = state.record
    commit.journal.add_expired(each for group in state.groups.values() for each in group.live)
    for group in state.groups.values():
        commit.end_standing(group)
    if await _is_large(commit, state):
        for reservation in record.held.values():  # they have no rows of their own
            commit.journal.delete_deadline(record, reservation)
        commit.begin_erasure(record.queue_id, ErasureKind.QUEUE)
    else:
        await _erase_queue(commit, state)
    commit.journal.queue_removed(record)
    commit.counters.queues -= 1
    commit.counters.paused_queues -= record.paused
    commit.handles.drop(record.lmq_name)
    release(state.containers)


async def _is_large(commit: CommitContext, state: QueueState) -> bool:
    """Whether its rows are too many for one commit, or some are being erased already."""
    limit = erasures.ERASED_AT_ONCE_MAX
    if commit.state.erasures.concerns(state.record.queue_id) or state.record.scheduled > limit:
        return True
    groups = state.groups.values()
    if len(state.reservations) > limit or any(group.records > limit for group in groups):
        return True
    return await commit.has_many_runs(state)


async def _purge_at_once(commit: CommitContext, state: QueueState) -> Removed:
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
    for runs in lanes.values():  # lane by lane: each call walks over all that was returned
        state.delete_runs(runs, commit.journal)
    if record.scheduled:
        messages += record.scheduled
        await remove_all_scheduled(commit, record)
        record.scheduled = 0
        commit.journal.queue_changed(record)
    return Removed(messages, body_bytes, skipped)


async def _purge_by_mark(commit: CommitContext, state: QueueState) -> Removed:
    """Everything is gone with this commit, and its rows are erased by later ones."""
    record = state.record
    scheduled = record.scheduled
    spared = await _spared(state)
    mark = PurgeMark(record.next_offset, commit.counters.schedule_id, spared.spans)
    erasure = Erasure(record.queue_id, ErasureKind.PURGE, mark)
    erasure.began_commit = commit.counters.commit
    start, end = erasure_rows.erasure_range(record.queue_id, ErasureKind.PURGE)
    for key, _ in commit.journal.puts_in(Table.ERASURES, start, end):
        commit.journal.batch.delete(Table.ERASURES, key)
    await commit.state.erasures.begin_purge(erasure, commit.engine, commit.journal.batch)
    unsettled = dict.fromkeys(state.groups, 0)
    for group in state.groups.values():
        async for runs in in_turns(list(spared.runs.values()), TURN_RUNS_MAX):
            unsettled[group.name] += group.unsettled_of(runs)
    purged, dropped = purge(state, mark, spared, unsettled, commit.journal)
    commit.journal.purged(*purged)
    release(dropped)
    return Removed(purged.messages + scheduled, purged.body_bytes, spared.messages)


async def _spared(state: QueueState) -> Spared:
    """The ranges under live reservations, found in turns: there may be many."""
    spared = Spared()
    for group in state.groups.values():
        async for some in in_turns(list(group.live.values()), TURN_RUNS_MAX):
            spared.add(some)
    async for first_offsets in in_turns(sorted(spared.runs), TURN_RUNS_MAX):
        spared.measure(first_offsets)
    return spared


async def _erase_queue(commit: CommitContext, state: QueueState) -> None:
    record = state.record
    for reservation in state.reservations.values():
        if reservation.live:
            commit.journal.delete_deadline(record, reservation)
    for group in state.groups.values():
        for offset, delayed in group.delayed.items():
            commit.journal.delete_returned(record, group, offset, delayed.not_before_ms)
    await remove_all_scheduled(commit, record)
    for run in await commit.runs(state):
        if run.dead_deadline_ms:
            commit.journal.batch.delete(Table.TTL, run_rows.ttl_key(record.queue_id, run))
    start, end = queue_rows.queue_range(record.queue_id)
    for table in QUEUE_TABLES:
        await delete_rows(commit, table, start, end)


OPERATIONS: ExchangeDecoders = {
    "remove_queue": RemoveQueue.from_proto,
    "purge": Purge.from_proto,
    "pause_queue": PauseQueue.from_proto,
}
