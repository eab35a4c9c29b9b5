"""The index of ages: queues share its rows, and each entry comes and goes with its bound (P3)."""

import pytest

from storage_svc.engines.age_rows import QUEUES_PER_ROW_MAX, AgeKind, read_age
from storage_svc.engines.engine import Table
from storage_svc.operations.history import RetentionType
from storage_svc.operations.queues import RemoveQueue
from storage_svc.operations.retention import ApplyRetention
from storage_svc.operations.retention_rules import RetentionRow
from storage_svc.partition import age_journal
from storage_svc.reads.next_due import DueRules, next_due
from tests.support.partition_life import Life

EXPIRED = RetentionType.EXPIRED


async def test_first_messages_of_one_commit_share_rows(life: Life) -> None:
    """P3: publishing pays for a few rows, however many queues it creates, and none later."""
    names = [f"t/{number}" for number in range(QUEUES_PER_ROW_MAX + 2)]
    before = life.engines.row_operations.copy()

    await life.do(*(life.run(name, 1) for name in names))
    created = life.engines.row_operations - before
    await life.do(*(life.run(name, 1) for name in names))
    published = life.engines.row_operations - before - created

    assert (created[Table.AGES], published[Table.AGES]) == (2, 0)
    assert len(await _entries(life, AgeKind.WAITING)) == len(names)


async def test_a_queue_that_is_made_and_removed_in_one_commit_is_not_in_the_index(
    life: Life,
) -> None:
    """P3: neither is one that was emptied by the removal of another commit."""
    await life.do(life.run("t/a", 1), RemoveQueue("t/a"), life.run("t/b", 1))
    await life.do(RemoveQueue("t/b"))

    assert await life.rows(Table.AGES) == 0


@pytest.mark.parametrize("per_row", [2, QUEUES_PER_ROW_MAX])
async def test_queues_leave_rows_that_they_share_with_others(
    life: Life, monkeypatch: pytest.MonkeyPatch, per_row: int
) -> None:
    """P3, R1: also if there are more rows than one scan reads; the others are due as before."""
    monkeypatch.setattr(age_journal, "QUEUES_PER_ROW_MAX", per_row)
    monkeypatch.setattr(age_journal, "_ROWS_PER_TIME_MAX", 1)
    await life.topic("old", retention_enabled=True, retention_seconds=1)
    made = []
    for time in range(3):
        runs = [life.run(f"old/{time}-{number}", 1) for number in range(10)]
        made += [
            (each.queue_id, run.lmq_name)
            for each, run in zip(await life.do(*runs), runs, strict=True)
        ]
        await life.clock.advance_ms(10)
    await life.clock.advance_ms(1_000)
    rows = [RetentionRow(queue_id, name, "", 0, 1) for queue_id, name in made]
    leaving = [row for at, row in enumerate(rows) if at % 3]
    rules = DueRules(frozenset({EXPIRED}))

    await life.do(ApplyRetention("pass", EXPIRED, tuple(leaving)))
    left = await _entries(life, AgeKind.WAITING)
    due = await next_due(life.partition, rules, life.clock)
    await life.do(ApplyRetention("pass", EXPIRED, tuple(rows)))
    none_due = await next_due(life.partition, rules, life.clock)

    assert left == sorted(row.queue_id for row in rows if row not in leaving)
    assert (due.due_in_ms, none_due.due_in_ms) == (0, None)
    assert await _entries(life, AgeKind.WAITING) == []
    assert await _entries(life, AgeKind.IDLE) == sorted(row.queue_id for row in rows)


async def _entries(life: Life, kind: AgeKind) -> list[int]:
    rows = await life.partition.state.engine.scan(Table.AGES, b"", None, limit=1000)
    return sorted(
        each
        for key, value in rows
        if key.startswith(kind.encode())
        for each in read_age(key, value).queue_ids
    )
