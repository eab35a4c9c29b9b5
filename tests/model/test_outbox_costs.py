"""What the outbox costs: what is due, whatever waits or was cleared before (L7)."""

from typing import Any

import pytest

from storage_svc.engines import outbox_rows
from storage_svc.engines.engine import Row, Table
from storage_svc.engines.rocksdb import RocksReader
from storage_svc.operations import outbox
from storage_svc.operations.outbox import (
    AppendFromOutbox,
    ClearOutbox,
    DropOutbox,
    OutboxEntry,
    PostponeOutbox,
)
from storage_svc.operations.reserve import Reserve
from storage_svc.operations.settle import Settle
from storage_svc.queue.reservation import Ending
from storage_svc.reads import due_work
from tests.support.partition_life import Life

WAITING = 300


@pytest.fixture
def outbox_scans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, int]]:
    """Where scans of the outbox beside the writer began, and how many rows they found."""
    scans: list[tuple[bytes, int]] = []
    scan = RocksReader.scan

    async def counted(self: RocksReader, table: Table, start: bytes, *rest: Any, **how: Any) -> Any:
        found: list[Row] = await scan(self, table, start, *rest, **how)
        if table is Table.OUTBOX:
            scans.append((start, len(found)))
        return found

    monkeypatch.setattr(RocksReader, "scan", counted)
    return scans


async def entries_due(life: Life) -> list[OutboxEntry]:
    page = await due_work.scan(life.partition, due_work.ScanKind.OUTBOX, b"", 100)
    return [due.action.entry for due in page.due if isinstance(due.action, AppendFromOutbox)]


async def rejected(life: Life, topic: str, messages: int) -> None:
    """Messages, each a run of its own, that wait for the dead-letter topic of theirs."""
    await life.do(*(life.run(topic, 1) for _ in range(messages)))
    slices = (await life.do(Reserve(topic, "g", messages))).slices
    await life.do(*(Settle(each.receipt, Ending.DEAD_LETTER) for each in slices))


async def test_entries_for_a_destination_that_refuses_are_not_read_with_every_sweep(
    life: Life, outbox_scans: list[tuple[bytes, int]]
) -> None:
    """L7: the outbox is indexed by destination, and a sweep costs what is due."""
    await life.topic("stuck", dead_letter_topic="refuses")
    await life.topic("fine", dead_letter_topic="takes")
    await rejected(life, "stuck", WAITING)
    await rejected(life, "fine", 1)
    await life.do(PostponeOutbox("refuses"))
    outbox_scans.clear()

    (entry,) = await entries_due(life)
    for _ in range(10):
        await life.due(due_work.ScanKind.OUTBOX_DESTINATIONS)

    assert entry.destination_lmq_name == "takes"
    assert [found for _, found in outbox_scans] == [1]


async def test_cleared_entries_are_not_passed_over_again(
    life: Life, outbox_scans: list[tuple[bytes, int]]
) -> None:
    """L7: an outbox that is empty is not read, and one that is not is read from its first entry."""
    await life.topic("doomed", dead_letter_topic="dead")
    await rejected(life, "doomed", WAITING)
    while entries := await entries_due(life):
        await life.do(*(ClearOutbox("dead", entry.sequence) for entry in entries))
    outbox_scans.clear()

    empty = await entries_due(life)
    scans_of_the_empty = list(outbox_scans)
    await rejected(life, "doomed", 1)
    (entry,) = await entries_due(life)

    assert (empty, scans_of_the_empty) == ([], [])
    assert outbox_scans == [(outbox_rows.outbox_key("dead", entry.sequence), 1)]


async def test_the_outbox_is_found_again_when_the_partition_is_opened(life: Life) -> None:
    """L6: its index is in memory only."""
    await life.topic("doomed", dead_letter_topic="dead")
    await rejected(life, "doomed", 3)

    await life.reopen()

    entries = await entries_due(life)
    assert [entry.sequence for entry in entries] == [1, 2, 3]
    await life.do(*(ClearOutbox("dead", entry.sequence) for entry in entries))
    assert len(life.partition.state.outbox) == 0


@pytest.mark.parametrize("reopened", [False, True])
async def test_nothing_is_read_after_the_last_entry_was_dropped(
    life: Life, outbox_scans: list[tuple[bytes, int]], reopened: bool
) -> None:
    """L9, L7: entries are dropped in any order, and the index notices that none is left."""
    await life.topic("doomed", dead_letter_topic="dead")
    await rejected(life, "doomed", 4)
    if reopened:
        await life.reopen()

    for sequence in (2, 4):
        await life.do(DropOutbox("dead", sequence))
    left = [entry.sequence for entry in await entries_due(life)]
    await life.do(ClearOutbox("dead", 1), DropOutbox("dead", 3))
    outbox_scans.clear()

    assert left == [1, 3]
    assert (await entries_due(life), outbox_scans) == ([], [])
    assert len(life.partition.state.outbox) == 0


async def test_many_entries_are_dropped_in_bounded_parts(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L9."""
    monkeypatch.setattr(outbox, "DROPPED_MAX", 10)
    await life.topic("doomed", dead_letter_topic="dead")
    await rejected(life, "doomed", 25)

    parts = [await life.do(DropOutbox("dead")) for _ in range(4)]

    assert [part.messages for part in parts] == [10, 10, 5, 0]
    assert [bool(part.next_token) for part in parts] == [True, True, False, False]
