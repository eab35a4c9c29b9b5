"""Retention of queues that are not loaded: from their rows, with the result of loading them."""

from collections.abc import Awaitable, Callable

import pytest

from storage_svc.engines import queue_rows, run_rows
from storage_svc.engines.age_rows import AgeKind, age_prefix, read_age
from storage_svc.engines.engine import Table
from storage_svc.engines.keys import read_u64
from storage_svc.engines.queue_rows import GROUPS_INLINE_MAX, SETTLED_INLINE_MAX
from storage_svc.loading.handles import Handles
from storage_svc.operations.ages import AgeEntry, ReviewAges, Reviewed
from storage_svc.operations.groups import PlaceGroup, RemoveGroup, Start, StartAt
from storage_svc.operations.history import RetentionType
from storage_svc.operations.loading import Materialize
from storage_svc.operations.publish import Append
from storage_svc.operations.queues import QUEUE_TABLES, PauseQueue, Purge, RemoveQueue
from storage_svc.operations.reserve import Reserve
from storage_svc.operations.retention import ApplyRetention, RetentionApplied
from storage_svc.operations.retention_rules import RetentionRow
from storage_svc.operations.settle import Settle
from storage_svc.reads.due_tables import scan_due_runs
from storage_svc.reads.table_filter import Row, TableFilter
from tests.support.partition_life import ACK, NACK, Life, spans

NAME = "old/a"
ROW = RetentionRow(1, NAME, "", 0, 1)
EXPIRED, COMPLETED = RetentionType.EXPIRED, RetentionType.COMPLETED
MAX_WAIT = RetentionType.MAX_WAIT_TIME_EVICTION
Story = Callable[[Life, str], Awaitable[None]]


async def published(life: Life, name: str) -> None:
    await life.do(life.run(name, 1))


async def settled(life: Life, name: str) -> None:
    await published(life, name)
    await _settle_all(life, name)


async def waiting_for_a_group(life: Life, name: str) -> None:
    await life.do(PlaceGroup(name, "g"))
    await published(life, name)


async def given_back(life: Life, name: str) -> None:
    await published(life, name)
    (slice_,) = (await life.do(Reserve(name, "g", 1))).slices
    await life.do(Settle(slice_.receipt, NACK))


async def reserved(life: Life, name: str) -> None:
    await published(life, name)
    await life.do(Reserve(name, "g", 1, visibility_ms=3_600_000))


async def settled_by_one_of_two_groups(life: Life, name: str) -> None:
    await settled(life, name)
    await life.do(PlaceGroup(name, "other"))


async def before_the_start_of_a_group(life: Life, name: str) -> None:
    await published(life, name)
    await life.do(PlaceGroup(name, "g", Start(StartAt.LATEST)))


async def settled_in_part(life: Life, name: str) -> None:
    await life.do(life.run(name, 3))
    (slice_,) = (await life.do(Reserve(name, "g", 2))).slices
    await life.do(Settle(slice_.receipt, ACK))


async def settled_often(life: Life, name: str) -> None:
    for _ in range(SETTLED_INLINE_MAX + 1):
        await settled(life, name)


async def of_many_groups(life: Life, name: str) -> None:
    await published(life, name)
    for number in range(GROUPS_INLINE_MAX + 1):
        await life.do(PlaceGroup(name, f"g{number}"))


async def of_two_runs(life: Life, name: str) -> None:
    await published(life, name)
    await published(life, name)


async def of_several_runs(life: Life, name: str) -> None:
    for messages in (1, 3, 2):
        await life.do(life.run(name, messages))


async def of_several_settled_runs(life: Life, name: str) -> None:
    await of_several_runs(life, name)
    await _settle_all(life, name)


async def of_several_runs_that_a_group_waits_for(life: Life, name: str) -> None:
    await life.do(PlaceGroup(name, "g"))
    await of_several_runs(life, name)


async def of_several_runs_of_which_one_is_settled(life: Life, name: str) -> None:
    await of_several_runs(life, name)
    await _settle(life, name, 1)


async def of_several_runs_that_are_settled_up_to_the_middle_of_one(life: Life, name: str) -> None:
    await of_several_runs(life, name)
    await _settle(life, name, 1)
    await _settle(life, name, 2)


async def of_several_runs_settled_by_one_of_two_groups(life: Life, name: str) -> None:
    await of_several_settled_runs(life, name)
    await life.do(PlaceGroup(name, "other"))


async def of_several_runs_behind_one_that_is_gone(life: Life, name: str) -> None:
    await of_several_runs(life, name)
    await life.do(Purge(name))
    await of_several_runs(life, name)


async def of_several_runs_around_one_that_is_gone(life: Life, name: str) -> None:
    await published(life, name)
    (held,) = (await life.do(Reserve(name, "g", 1))).slices
    await published(life, name)
    await life.do(Purge(name))
    await published(life, name)
    await life.do(Settle(held.receipt, ACK))


async def of_several_runs_with_a_group_that_starts_between_them(life: Life, name: str) -> None:
    await published(life, name)
    (held,) = (await life.do(Reserve(name, "before", 1))).slices
    await published(life, name)
    await life.do(Purge(name))
    await life.do(PlaceGroup(name, "g", Start(StartAt.LATEST)))
    await life.do(Settle(held.receipt, ACK), RemoveGroup(name, "before"))
    await published(life, name)


async def of_several_large_and_mortal_runs(life: Life, name: str) -> None:
    await large_and_mortal(life, name)
    await published(life, name)
    await large_and_mortal(life, name)


async def of_more_runs_than_a_scan_finds_first(life: Life, name: str) -> None:
    for _ in range(30):
        await published(life, name)


async def with_a_fairness_key(life: Life, name: str) -> None:
    await life.do(life.run(name, 1, fairness_key="k"))


async def large_and_mortal(life: Life, name: str) -> None:
    body = life.run(name, 1).body
    await life.do(Append(name, 1, body + bytes(1000), ttl_ms=3_600_000))


async def beside_a_scheduled_one(life: Life, name: str) -> None:
    await published(life, name)
    await life.do(life.run(name, 1, delay_ms=3_600_000))


async def of_a_paused_queue(life: Life, name: str) -> None:
    await published(life, name)
    await life.do(PauseQueue(name))


STORIES: list[Story] = [
    published,
    settled,
    waiting_for_a_group,
    given_back,
    reserved,
    settled_by_one_of_two_groups,
    before_the_start_of_a_group,
    settled_in_part,
    settled_often,
    of_many_groups,
    of_two_runs,
    of_several_runs,
    of_several_settled_runs,
    of_several_runs_that_a_group_waits_for,
    of_several_runs_of_which_one_is_settled,
    of_several_runs_that_are_settled_up_to_the_middle_of_one,
    of_several_runs_settled_by_one_of_two_groups,
    of_several_runs_behind_one_that_is_gone,
    of_several_runs_around_one_that_is_gone,
    of_several_runs_with_a_group_that_starts_between_them,
    of_several_large_and_mortal_runs,
    of_more_runs_than_a_scan_finds_first,
    with_a_fairness_key,
    large_and_mortal,
    beside_a_scheduled_one,
    of_a_paused_queue,
]


@pytest.mark.parametrize("kind", [EXPIRED, COMPLETED, MAX_WAIT])
@pytest.mark.parametrize("planned", ["by message", "folded", "folded, one too few", "and too many"])
async def test_a_cold_queue_loses_what_it_would_lose_if_it_were_loaded(
    life: Life, kind: RetentionType, planned: str
) -> None:
    """R1, R2, R5, R9: by every rule, whatever has happened to the queue; also what is counted.

    A pass plans all runs of a queue in one row, and they may have changed since.
    """
    await _limited(life)
    for story in STORIES:
        await story(life, f"old/cold-{story.__name__}")
        await story(life, f"old/warm-{story.__name__}")
    await life.clock.advance_ms(2_000)
    await life.reopen()
    await life.do(*(Materialize(f"old/warm-{story.__name__}") for story in STORIES))

    names = [story.__name__ for story in STORIES]
    cold = {name: await _apply(life, f"old/cold-{name}", kind, planned) for name in names}
    warm = {name: await _apply(life, f"old/warm-{name}", kind, planned) for name in names}
    await life.reopen()
    stored = await life.partition.state.engine.scan(Table.RUN_HEADERS, b"", None, limit=1000)
    counted = life.partition.state.counters.messages
    cold_after = {name: await _facts(life, f"old/cold-{name}") for name in names}
    warm_after = {name: await _facts(life, f"old/warm-{name}") for name in names}

    assert cold == warm
    assert cold_after == warm_after
    assert any(applied.messages for applied in cold.values())
    assert counted == sum(run_rows.read_run(*row).messages for row in stored)


async def test_a_scan_shows_of_a_cold_queue_what_it_shows_of_a_loaded_one(life: Life) -> None:
    """P3: runs that rules may apply to, with the groups that wait for them."""
    await _limited(life)
    for story in STORIES:
        await story(life, f"old/cold-{story.__name__}")
        await story(life, f"old/warm-{story.__name__}")
    await life.clock.advance_ms(2_000)
    await life.reopen()
    await life.do(*(Materialize(f"old/warm-{story.__name__}") for story in STORIES))

    found: dict[str, list[Row]] = {"cold": [], "warm": []}
    wanted = TableFilter(due_types=frozenset({EXPIRED, COMPLETED, MAX_WAIT}))
    async for rows in scan_due_runs(life.partition, wanted):
        for _, _, lmq_name, _, *facts in rows:
            state, _, name = lmq_name.removeprefix("old/").partition("-")
            found[state].append((name, *facts))

    assert sorted(found["cold"]) == sorted(found["warm"])
    assert {row[0] for row in found["cold"]} == {story.__name__ for story in STORIES}


@pytest.mark.parametrize("runs", [1, 3])
async def test_queues_with_few_messages_are_emptied_without_being_loaded(
    life: Life, monkeypatch: pytest.MonkeyPatch, runs: int
) -> None:
    """P3, I9: four rows each, whether nothing was consumed or everything was settled."""
    await _limited(life)
    names = [f"old/{number}" for number in range(100)]
    made = await life.do(*(life.run(name, 1) for _ in range(runs) for name in names))
    for name in names[:50]:
        await _settle_all(life, name)
    await life.clock.advance_ms(2_000)
    await life.reopen()
    loads: list[str] = []
    load = Handles.load

    async def count(self: Handles, lmq_name: str, *rest: object) -> object:
        loads.append(lmq_name)
        return await load(self, lmq_name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Handles, "load", count)
    before = life.engines.row_operations.copy()
    rows = [
        RetentionRow(each.queue_id, name, "", 0, runs, planned_rows=runs)
        for each, name in zip(made, names, strict=False)
    ]

    applied = await life.do(ApplyRetention("pass", EXPIRED, tuple(rows)))

    assert applied.messages == 100 * runs
    assert (loads, len(life.partition.state.handles)) == ([], 0)
    counted = life.engines.row_operations - before
    of_queues = sum(n for table, n in counted.items() if table is not Table.META)
    assert of_queues <= (4 + runs) * len(names) + 4, counted  # with those of the history


async def test_a_planned_run_that_is_too_young_stays_and_the_others_leave(life: Life) -> None:
    """R9: whatever the plan says."""
    await _limited(life)
    await published(life, NAME)
    await life.clock.advance_ms(2_000)
    await published(life, NAME)
    await life.reopen()
    row = ROW._replace(end_offset=2, planned_rows=2)

    applied = await life.do(ApplyRetention("pass", EXPIRED, (row,)))

    assert (applied.messages, applied.stale) == (1, 0)
    assert life.partition.state.counters.messages == 1


@pytest.mark.parametrize("runs", [1, 3])
async def test_a_row_that_is_planned_twice_counts_once(life: Life, runs: int) -> None:
    """R9, R6: in one call, as two passes at once would have it in two."""
    await _limited(life)
    for _ in range(runs):
        await published(life, NAME)
    await life.clock.advance_ms(2_000)
    await life.reopen()
    row = ROW._replace(end_offset=runs, planned_rows=runs)

    applied = await life.do(ApplyRetention("pass", EXPIRED, (row, row)))

    assert (applied.messages, applied.stale) == (runs, 1)
    assert life.partition.state.counters.messages == 0


async def test_a_queue_that_was_emptied_can_be_used_in_the_same_commit(life: Life) -> None:
    """R9: whatever comes behind it in the commit finds the queue as it is after the deletion."""
    await _limited(life)
    await settled(life, NAME)
    await published(life, NAME)
    await life.clock.advance_ms(2_000)
    await life.reopen()
    row = ROW._replace(first_offset=1, end_offset=2)
    again = ApplyRetention("again", EXPIRED, (row, row))

    _, first, reserved_then, _, reserved_now, second = await life.do(
        PlaceGroup("old/b", "g"),
        ApplyRetention("pass", EXPIRED, (ROW, row, row)),
        Reserve(NAME, "g", 10),
        life.run(NAME, 1),
        Reserve(NAME, "g", 10),
        again,
    )
    await life.reopen()

    assert (first.messages, first.stale, second.stale) == (2, 1, 2)
    assert (spans(reserved_then), spans(reserved_now)) == ([], [(2, 3)])
    assert life.partition.state.counters.messages == 1
    assert await life.rows(Table.RUN_HEADERS) == 1


async def test_a_queue_that_was_emptied_can_be_removed_in_the_same_commit(life: Life) -> None:
    """R9: and no row of it is left, also in the index of ages."""
    await _limited(life)
    await published(life, NAME)
    await life.clock.advance_ms(2_000)
    await life.reopen()
    apply = ApplyRetention("pass", EXPIRED, (ROW,))

    removed = await life.do(apply, RemoveQueue(NAME), apply)

    assert [each.messages for each in removed] == [1, 0, 0]
    tables = [Table.CATALOG, Table.QUEUES, Table.RUN_HEADERS, Table.AGES, Table.TTL]
    assert await life.rows(*tables) == 0
    assert life.partition.state.counters.queues == 0


async def test_a_review_leaves_alone_what_its_commit_has_emptied(life: Life) -> None:
    """P3: the index is corrected by the deletion itself."""
    await _limited(life)
    await published(life, NAME)
    published_ms = life.partition.now_ms()
    await life.clock.advance_ms(2_000)
    await life.reopen()
    review = ReviewAges(AgeKind.WAITING, "old", (AgeEntry(published_ms, 1),), published_ms)

    applied, reviewed = await life.do(ApplyRetention("pass", EXPIRED, (ROW,)), review)
    ages = await life.partition.state.engine.scan(Table.AGES, b"", None, limit=10)

    assert applied == RetentionApplied(1, applied.body_bytes)
    assert reviewed == Reviewed(False, blocked=True)
    assert [key[:-16] for key, _ in ages] == [age_prefix(AgeKind.IDLE, "")]
    assert [read_age(*row) for row in ages] == [(published_ms, (1,))]


async def test_a_row_about_an_earlier_queue_of_that_name_is_stale(life: Life) -> None:
    """R9: the name finds the row of the catalog, its identity decides."""
    await _limited(life)
    await published(life, NAME)
    await life.do(RemoveQueue(NAME), life.run(NAME, 1))
    await life.clock.advance_ms(2_000)
    await life.reopen()

    applied = await life.do(ApplyRetention("pass", EXPIRED, (ROW,)))

    assert applied == RetentionApplied(stale=1)
    assert life.partition.state.counters.messages == 1


async def _limited(life: Life) -> None:
    life.run(NAME, 100)  # from here on, bodies of as many messages have the same size
    await life.topic(
        "old",
        retention_enabled=True,
        retention_seconds=1,
        completed_retention_seconds=1,
        max_wait_time_seconds=1,
    )


async def _settle_all(life: Life, name: str) -> None:
    await _settle(life, name, 100)


async def _settle(life: Life, name: str, messages: int) -> None:
    for each in (await life.do(Reserve(name, "g", messages))).slices:
        await life.do(Settle(each.receipt, ACK))


async def _apply(life: Life, name: str, kind: RetentionType, planned: str) -> RetentionApplied:
    """A plan with a row for each message that might be there, or one for all stored runs."""
    queue_id = (await life.partition.state.handles.read_state(name)).record.queue_id
    rows = [RetentionRow(queue_id, name, "", at, at + 1) for at in range(SETTLED_INLINE_MAX + 2)]
    if planned != "by message":
        start, end = queue_rows.queue_range(queue_id)
        stored = await life.partition.state.engine.scan(Table.RUN_HEADERS, start, end, limit=1000)
        runs = [run_rows.read_run(*row) for row in stored]
        plain = [run for run in runs if not run.fairness_key]
        others = {"folded": 0, "folded, one too few": -1, "and too many": 1}[planned]
        if plain:
            counted = max(1, len(plain) + others)
            ends = plain[0].first_offset, plain[-1].end
            rows = [RetentionRow(queue_id, name, "", *ends, planned_rows=counted)]
    applied: RetentionApplied = await life.do(ApplyRetention("pass", kind, tuple(rows)))
    return applied


async def _facts(life: Life, name: str) -> object:
    """What is stored of a queue, and what its group gets now and after another message."""
    engine = life.partition.state.engine
    state = await life.partition.state.handles.read_state(name)
    record = state.record
    start, end = queue_rows.queue_range(record.queue_id)
    rows = {table: len(await engine.scan(table, start, end, limit=1000)) for table in QUEUE_TABLES}
    ages = [
        key[:-16]
        for key, value in await engine.scan(Table.AGES, b"", None, limit=1000)
        if record.queue_id in read_age(key, value).queue_ids
    ]
    mortal = [
        key
        for key, _ in await engine.scan(Table.TTL, b"", None, limit=1000)
        if read_u64(key, 8) == record.queue_id
    ]
    progress = {each.name: (each.base, each.settled) for each in state.groups.values()}
    counts = (record.messages, record.body_bytes, record.scheduled, record.paused, record.kept)
    bounds = [bool(each) for each in record.indexed]
    now = spans(await life.do(Reserve(name, "g", 100)))
    await life.do(life.run(name, 1))
    later = spans(await life.do(Reserve(name, "g", 100)))
    return rows, ages, len(mortal), progress, counts, bounds, now, later
