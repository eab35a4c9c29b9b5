"""Erasing: rows of what was removed leave the engine, a bounded number per commit.

A purge, the removal of a queue and the end of what only a removed group had kept take effect in one
commit of a few rows, whatever the queue holds: it leaves a mark (`partition/erasures.py`). The
partition then asks for one `EraseRows` after the other, with the operations of others in between,
until the marked rows are gone. The mark moves in the commit that erases, so that a restart goes on
where the last one ended.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from storage_svc.engines import group_rows, queue_rows, reservation_rows, run_rows
from storage_svc.engines.engine import Row, Table
from storage_svc.engines.erasure_rows import ErasureKind
from storage_svc.engines.keys import prefix_end, read_u64, successor, u64, u64x3
from storage_svc.engines.paging import PAGE_ROWS
from storage_svc.loading.stored_runs import scan_runs
from storage_svc.operations.schedule import remove_scheduled
from storage_svc.partition.commit import CommitContext
from storage_svc.partition.erasures import Erasure
from storage_svc.turns import give_way
from tidemark.errors import DataCorrupt
from tidemark.telemetry import counter

ROWS_PER_COMMIT_MAX = 320
"""Rows that one commit examines; each stands for up to three, so that a commit has below 1 000."""

ROWS_PER_SHARED_COMMIT_MAX = 64
"""The same on an engine that nodes share: a row takes twice the CPU there, and operations of others
wait for up to two such commits."""

_log = logging.getLogger(__name__)
_erased = counter(
    "tidemark.storage.erased_rows", "Rows of removed messages and queues that were erased"
)


class Erased(NamedTuple):
    """How many rows were erased."""

    rows: int


class Step(NamedTuple):
    """The result of one page of a table."""

    examined: int
    cursor: bytes | None
    """Where the table continues; None at its end."""


class EraseRows(NamedTuple):
    """Erase the next rows of the oldest mark."""

    async def apply(self, commit: CommitContext) -> Erased:
        erasures = commit.state.erasures
        erasure = erasures.first()
        # Rows of the commit under way cannot be read yet: one that it has begun waits.
        if erasure is None or erasure.began_commit == commit.counters.commit:
            return Erased(0)
        stages = _STAGES[erasure.kind]
        if erasure.stage >= len(stages):  # in a commit of its own: until then the mark hides rows
            await erasures.end(erasure, commit.engine, commit.journal.batch)
            return Erased(0)
        before = len(commit.journal.batch)
        try:
            await _erase(commit, erasure, stages)
        except DataCorrupt as error:  # one bad block must not hold up the partition (V3)
            erasure.unreadable = True
            _log.error(
                "rows cannot be erased until the partition is opened again",
                extra={"queue_id": erasure.queue_id, "why": str(error)},
            )
        rows = len(commit.journal.batch) - before
        erasure.put(commit.journal.batch)
        _erased.add(rows)
        return Erased(rows)


async def _erase(commit: CommitContext, erasure: Erasure, stages: "tuple[_Stage, ...]") -> None:
    left = ROWS_PER_COMMIT_MAX
    if commit.engine.storage_epoch:
        left = min(left, ROWS_PER_SHARED_COMMIT_MAX)
    while left > 0 and erasure.stage < len(stages):
        step = await stages[erasure.stage](commit, erasure, min(left, PAGE_ROWS))
        left -= max(1, step.examined)
        if step.cursor is None:
            erasure.stage, erasure.cursor = erasure.stage + 1, b""
        else:
            erasure.cursor = step.cursor
        await give_way()


async def _page(
    commit: CommitContext, erasure: Erasure, table: Table, limit: int
) -> tuple[list[Row], Step]:
    start, end = queue_rows.queue_range(erasure.queue_id)
    page = await commit.engine.scan(table, erasure.cursor or start, end, limit=limit)
    return page, Step(len(page), successor(page[-1][0]) if len(page) == limit else None)


def _erase_table(table: Table) -> "_Stage":
    async def erase(commit: CommitContext, erasure: Erasure, limit: int) -> Step:
        page, step = await _page(commit, erasure, table, limit)
        for key, _ in page:
            commit.journal.batch.delete(table, key)
        return step

    return erase


async def _erase_runs(commit: CommitContext, erasure: Erasure, limit: int) -> Step:
    """Headers with their bodies and times to live. A purge leaves what is spared, and new runs."""
    page, step = await _page(commit, erasure, Table.RUN_HEADERS, limit)
    whole = erasure.kind is ErasureKind.QUEUE
    batch, queue = commit.journal.batch, u64(erasure.queue_id)
    for key, value in page:
        offset = key[-8:]
        if not whole:
            first_offset = read_u64(offset)
            if first_offset >= erasure.purge.below:  # and so are all others of the lane
                return Step(step.examined, prefix_end(key[:-8]))
            if not erasure.purge.covers(first_offset):
                continue
        _, body_bytes, _, dead_deadline_ms = run_rows.read_numbers(value)
        batch.delete(Table.RUN_HEADERS, key)
        commit.journal.deleted_bodies.append(queue + offset)
        if body_bytes > run_rows.BODY_INLINE_BYTES_MAX:
            batch.delete(Table.RUN_BODIES, queue + offset)
        if dead_deadline_ms:
            key = u64x3(dead_deadline_ms, erasure.queue_id, read_u64(offset))
            batch.delete(Table.TTL, key)
    return step


async def _erase_returned(commit: CommitContext, erasure: Erasure, limit: int) -> Step:
    page, step = await _page(commit, erasure, Table.RETURNED, limit)
    whole = erasure.kind is ErasureKind.QUEUE
    delays: dict[bytes, int] = {}
    for key, value in page:
        run_offset, not_before_ms = group_rows.returned_times(value)
        if whole or erasure.purge.covers(run_offset):
            commit.journal.batch.delete(Table.RETURNED, key)
            commit.journal.batch.delete(Table.BURIED, key)
            if not_before_ms:
                delays[u64(not_before_ms) + key] = not_before_ms
    await _forget_deadlines(commit, Table.DELAYS, delays)
    return step


async def _erase_reservations(commit: CommitContext, erasure: Erasure, limit: int) -> Step:
    page, step = await _page(commit, erasure, Table.RESERVATIONS, limit)
    deadlines: dict[bytes, int] = {}
    for key, value in page:
        commit.journal.batch.delete(Table.RESERVATIONS, key)
        if reservation_rows.is_live(value):
            deadline_ms = reservation_rows.reservation_deadline_ms(value)
            deadlines[u64(deadline_ms) + key] = deadline_ms
    await _forget_deadlines(commit, Table.DEADLINES, deadlines)
    return step


async def _forget_deadlines(
    commit: CommitContext, table: Table, times_ms: dict[bytes, int]
) -> None:
    """Entries that are still there: those that came due meanwhile are gone already."""
    found = await commit.engine.load(table, list(times_ms)) if times_ms else []
    for (key, time_ms), value in zip(times_ms.items(), found, strict=True):
        if value is not None and (table, key) not in commit.journal.erased_rows:
            commit.journal.forget_deadline(table, key, time_ms)


async def _erase_scheduled(commit: CommitContext, erasure: Erasure, limit: int) -> Step:
    page, step = await _page(commit, erasure, Table.SCHEDULED, limit)
    for key, due in page:
        schedule_id = read_u64(key, 8)
        if erasure.kind is ErasureKind.PURGE and schedule_id > erasure.purge.schedules_to:
            return Step(step.examined, None)
        remove_scheduled(commit, erasure.queue_id, schedule_id, due + key[8:])
    return step


async def _erase_settled(commit: CommitContext, erasure: Erasure, limit: int) -> Step:
    """Runs that every group has settled, unless retention keeps them (R2)."""
    handle = await commit.queue_by_id(erasure.queue_id, briefly=True)
    if handle is None:
        return Step(0, None)
    state = handle.state
    start, end = queue_rows.queue_range(erasure.queue_id)
    purge = commit.state.erasures.purge_of(erasure.queue_id)
    page = await scan_runs(commit.engine, purge, erasure.cursor or start, end, limit=limit)
    gone = commit.journal.deleted
    state.erase_settled(
        [run_rows.read_run(*row) for row in page if row[0] not in gone], commit.journal
    )
    if len(page) == limit:
        return Step(len(page), successor(page[-1][0]))
    if state.record.kept and not state.rules.keeps_settled:
        state.record.kept = False
        commit.journal.queue_changed(state.record)
    return Step(len(page), None)


_Stage = Callable[[CommitContext, Erasure, int], Awaitable[Step]]

_STAGES: dict[ErasureKind, tuple[_Stage, ...]] = {
    ErasureKind.QUEUE: (
        _erase_runs,
        _erase_returned,
        _erase_scheduled,
        _erase_reservations,
        _erase_table(Table.SETTLED),
        _erase_table(Table.BURIED),
        _erase_table(Table.LANES),
        _erase_table(Table.GROUPS),
    ),
    ErasureKind.PURGE: (_erase_runs, _erase_returned, _erase_scheduled),
    ErasureKind.SETTLED: (_erase_settled,),
}
"""The tables of each kind, in the order in which they are erased. Stored by number."""
