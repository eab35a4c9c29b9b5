"""Purges and removals take effect in one commit, and their rows leave in later ones (L1, S2).

The limit above which a queue counts as large is lowered, so that a few runs are enough.
"""

from typing import Any

import pytest

from storage_svc.engines.engine import Table
from storage_svc.operations import erase
from storage_svc.operations.erase import EraseRows
from storage_svc.operations.groups import PlaceGroup, RemoveGroup, Start, StartAt
from storage_svc.operations.loading import Materialize, Unmaterialize
from storage_svc.operations.operation import Operation
from storage_svc.operations.queues import Purge, RemoveQueue
from storage_svc.operations.reserve import Reserve
from storage_svc.operations.schedule import Unschedule
from storage_svc.operations.settle import Settle
from storage_svc.operations.topics import PutTopic
from storage_svc.partition import erasures
from storage_svc.partition.partition import Partition
from storage_svc.reads import due_work, queues
from tests.support.faulty_engine import Fault
from tests.support.partition_life import ACK, DAY_MS, NACK, Life, spans
from tidemark.errors import CommitOutcomeUnknown, QueueNotFound, RunNotScheduled
from tidemark.topics import Topic, TopicSettings

QUEUE_TABLES = (
    Table.RUN_HEADERS,
    Table.RUN_BODIES,
    Table.TTL,
    Table.RETURNED,
    Table.BURIED,
    Table.DELAYS,
    Table.RESERVATIONS,
    Table.SETTLED,
    Table.DEADLINES,
    Table.SCHEDULE,
    Table.SCHEDULED,
    Table.SCHEDULE_BODIES,
    Table.GROUPS,
    Table.LANES,
    Table.ERASURES,
)
RUNS = 12


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(erasures, "ERASED_AT_ONCE_MAX", 0)
    monkeypatch.setattr(erase, "ROWS_PER_COMMIT_MAX", 3)


class Paused:
    """Erasing stands still until it is resumed by reopening the partition. Ask for it before the
    partition is made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._continue = Partition._continue_erasing
        monkeypatch.setattr(Partition, "_continue_erasing", lambda _: None)

    async def resume(self, life: Life) -> None:
        self._monkeypatch.setattr(Partition, "_continue_erasing", self._continue)
        await life.reopen()
        await erased(life)


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> Paused:
    return Paused(monkeypatch)


async def erased(life: Life) -> None:
    """Once nothing is left to erase; every commit continues by itself."""
    for _ in range(1000):
        over = not life.partition.state.erasures
        await life.do(Materialize("t/other", create=True))  # so that the last commit is durable
        if over:
            return
    raise AssertionError("erasing does not end")


async def fill(life: Life, **fields: Any) -> None:
    await life.do(*[life.run("t", 2, **fields) for _ in range(RUNS)])


async def messages_of(life: Life, group: str = "") -> list[int]:
    peeked, _ = await queues.peek(life.partition, "t", 0, 1000, group)
    return [each.offset for each in peeked]


async def test_a_purge_is_complete_before_its_rows_are_erased(paused: Paused, life: Life) -> None:
    """S2: no reader, consumer or new group gets anything of it, also after a restart."""
    await fill(life, ttl_ms=1000, fairness_key="k")
    await life.do(Reserve("t", "g", 1))
    (held,) = life.group("t", "g").live.values()

    purged = await life.do(Purge("t"))
    await life.do(life.run("t", 1, fairness_key="k"))

    for _ in range(2):
        view, (group,) = await queues.get_queue(life.partition, "t")
        assert await life.rows(Table.RUN_HEADERS) == RUNS + 1
        assert (view.record.messages, group.unsettled) == (3, 3)
        assert await messages_of(life) == await messages_of(life, "g") == [0, 1, 24]
        await life.reopen()
    assert (purged.messages, purged.skipped) == (2 * RUNS - 2, 2)
    assert spans(await life.do(Reserve("t", "g", 100))) == [(1, 2), (24, 25)]
    assert spans(await life.do(Reserve("t", "late", 100))) == [(0, 2), (24, 25)]
    assert held.slice.run.first_offset == 0
    await paused.resume(life)
    assert await life.rows(Table.RUN_HEADERS) == 2
    assert await life.rows(Table.TTL) == 1
    assert await life.rows(Table.ERASURES) == 0


async def test_what_a_purge_spares_comes_back_and_is_settled_as_ever(
    paused: Paused, life: Life
) -> None:
    """V2: a held message is nacked, handed out again and acknowledged while others are erased."""
    await fill(life)
    slices = (await life.do(Reserve("t", "g", 6))).slices
    await life.do(*[Settle(each.receipt, NACK, delay_ms=DAY_MS) for each in slices[1:]])

    purged = await life.do(Purge("t"))
    await life.do(Settle(slices[0].receipt, NACK))
    await life.do(Unmaterialize("t"))
    (again,) = (await life.do(Reserve("t", "g", 100))).slices
    delayed = len(life.group("t", "g").delayed)
    await life.do(Settle(again.receipt, ACK))

    assert (purged.messages, purged.skipped) == (2 * RUNS - 2, 2)
    assert (again.first_offset, again.messages, again.attempt_count) == (0, 2, 1)
    assert delayed == 0
    assert life.state("t").record.messages == 0
    await paused.resume(life)
    left = (Table.RUN_HEADERS, Table.RETURNED, Table.DELAYS, Table.DEADLINES, Table.ERASURES)
    assert await life.rows(*left) == 0
    assert life.partition.reservations == 0


async def test_a_second_purge_covers_what_came_since_and_what_was_spared(
    paused: Paused, life: Life
) -> None:
    """S2: whatever the first one has left to erase."""
    await fill(life, fairness_key="b")
    (slice_,) = (await life.do(Reserve("t", "g", 1))).slices
    await life.do(Purge("t"))
    await life.do(Settle(slice_.receipt, NACK))
    await life.do(*[life.run("t", 1, fairness_key=key) for key in "abc"])

    purged = await life.do(Purge("t"))
    await life.do(life.run("t", 1, fairness_key="a"))

    assert purged.messages == 5
    assert await messages_of(life) == [27]
    await paused.resume(life)
    assert await messages_of(life) == [27]
    assert await life.rows(Table.RUN_HEADERS) == 1
    assert await life.rows(Table.RETURNED, Table.ERASURES) == 0


async def test_purged_schedules_are_neither_promoted_nor_cancelled(
    paused: Paused, life: Life
) -> None:
    """L5: what was scheduled before the purge is gone, what is scheduled after it is not."""
    before = await life.do(*[life.run("t", 1, delay_ms=1000) for _ in range(RUNS)])

    purged = await life.do(Purge("t"))
    await life.do(life.run("t", 1, delay_ms=2000))
    refused = await life.do(Unschedule("t", before[0].schedule_id))
    await life.clock.advance_ms(1000)
    await life.do(*await life.due(due_work.ScanKind.SCHEDULES_DUE))

    assert purged.messages == RUNS
    assert isinstance(refused, RunNotScheduled)
    assert life.state("t").record.messages == 0
    assert life.state("t").record.scheduled == 1
    await paused.resume(life)
    assert await life.rows(Table.SCHEDULED) == 1


async def test_a_queue_created_again_has_nothing_of_the_deleted_one(
    paused: Paused, life: Life, caplog: pytest.LogCaptureFixture
) -> None:
    """S2: deleted is deleted, however long its rows take; its identity is never given again."""
    await fill(life, ttl_ms=1000)
    slices = (await life.do(Reserve("t", "g", 12, visibility_ms=500))).slices
    await life.do(*[Settle(each.receipt, NACK, delay_ms=500) for each in slices[4:]])
    await life.do(*[life.run("t", 1, delay_ms=1000) for _ in range(3)])
    first_id = life.state("t").record.queue_id

    await life.do(RemoveQueue("t"))
    gone = await life.do(Materialize("t"))
    await life.do(life.run("t", 1))
    await life.reopen()
    await life.clock.advance_ms(2000)
    for kind in due_work.ScanKind:
        if kind is not due_work.ScanKind.OUTBOX:
            await life.do(Materialize("t"), *await life.due(kind))

    assert isinstance(gone, QueueNotFound)
    assert spans(await life.do(Reserve("t", "g", 100))) == [(0, 1)]
    assert life.state("t").record.queue_id > first_id
    await paused.resume(life)
    assert await life.rows(Table.RUN_HEADERS) == 1
    assert await life.rows(Table.DEADLINES) == life.partition.reservations == 1
    left = [each for each in QUEUE_TABLES if each not in (Table.RUN_HEADERS, Table.DEADLINES)]
    assert await life.rows(*left) == 0
    assert "orphan" not in caplog.text


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("removal", [Purge("t"), RemoveQueue("t"), RemoveGroup("t", "g")])
async def test_erasing_survives_a_failure_at_each_of_its_commits(
    paused: Paused, life: Life, removal: Any, fault: Fault
) -> None:
    """S2: a durable mark has what is left; each opening goes on with it."""
    await life.do(PlaceGroup("t", "g"), PlaceGroup("t", "h"))
    await fill(life, ttl_ms=DAY_MS)
    await life.do(PlaceGroup("t", "h", Start(StartAt.LATEST)))
    slices = (await life.do(Reserve("t", "g", 8))).slices
    await life.do(*[Settle(each.receipt, NACK, delay_ms=DAY_MS) for each in slices])
    await life.do(removal)
    failures = 0

    while life.partition.state.erasures:
        life.engines.next_commit = fault
        with pytest.raises(CommitOutcomeUnknown):
            await life.do(EraseRows())
        failures += 1
        await life.reopen()
        if life.partition.state.erasures:
            await life.do(EraseRows())

    assert failures >= 3
    assert await life.rows(Table.RUN_HEADERS, Table.TTL, Table.RETURNED, Table.DELAYS) == 0
    assert await life.rows(Table.ERASURES) == 0
    assert life.partition.reservations == 0
    assert life.partition.state.counters.messages == 0


async def test_settled_messages_of_a_large_queue_go_when_retention_is_switched_off(
    life: Life,
) -> None:
    """R2: the next use of the queue begins to erase them, in steps; what waits is not touched."""
    await life.topic("kept", retention_enabled=True)
    await life.do(*[life.run("kept", 1) for _ in range(RUNS)])
    slices = (await life.do(Reserve("kept", "g", RUNS - 1))).slices
    await life.do(*[Settle(each.receipt, ACK) for each in slices])
    before = life.state("kept").record.messages

    await life.do(PutTopic(Topic("kept", TopicSettings()), create=False))
    await life.do(life.run("kept", 1))
    await erased(life)

    assert before == RUNS
    assert life.state("kept").record.messages == await life.rows(Table.RUN_HEADERS) == 2
    assert not life.state("kept").record.kept


@pytest.mark.parametrize(
    "leave", [RemoveGroup("t", "g"), PlaceGroup("t", "g", Start(StartAt.EARLIEST))]
)
async def test_a_group_that_leaves_after_a_purge_leaves_no_delay_behind(
    paused: Paused, life: Life, leave: Operation[object]
) -> None:
    """V5: its delays are found by rows that go with the group, before they are erased."""
    await fill(life)
    slices = (await life.do(Reserve("t", "g", 6))).slices
    stored, in_commit = slices[:2]
    await life.do(Settle(stored.receipt, NACK, delay_ms=DAY_MS))

    await life.do(Settle(in_commit.receipt, NACK, delay_ms=DAY_MS), Purge("t"), leave)

    await paused.resume(life)
    assert await life.rows(Table.RETURNED, Table.DELAYS, Table.ERASURES) == 0
    assert life.partition.reservations == 0
