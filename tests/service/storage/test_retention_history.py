"""The history of what was deleted for good, newest first (R6)."""

from typing import Any

import pytest

from tests.support.counted_reads import count_reads
from tests.support.exchange_client import (
    ExchangeClient,
    append,
    apply_topic,
    operation,
    reserve,
    settle,
)
from tests.support.retention_calls import Planned, apply, history, run
from tests.support.storage_client import RunningStorage
from tests.support.storage_fixtures import StartStorage
from tidemark import errors, limits
from tidemark.api.storage.v1.exchange_pb2 import SETTLE_ACTION_DEAD_LETTER, Purge
from tidemark.api.storage.v1.retention_pb2 import (
    RETENTION_TYPE_ATTEMPTS_EXHAUSTED,
    RETENTION_TYPE_EXPIRED,
    RETENTION_TYPE_OLD_RECORDS,
    RETENTION_TYPE_PURGE,
    RETENTION_TYPE_TIME_TO_LIVE,
    SCAN_TABLE_NAME_HISTORY,
    ListRetentionHistoryRequest,
)
from tidemark.api.storage.v1.storage_pb2 import SCAN_KIND_DEAD_DEADLINES
from tidemark.clock import ManualClock


async def test_everything_that_is_deleted_for_good_leaves_a_row(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R6, L6: purge, time to live, rejected without a dead-letter topic."""
    await exchange.ask(append("jobs/purged", b"x"))
    await exchange.ask(operation(purge=Purge(lmq_name="jobs/purged")))
    await clock.advance_ms(1)
    await exchange.ask(append("jobs/rejected", b"x"))
    (got,) = (await exchange.ask(reserve("jobs/rejected"))).slices
    await exchange.ask(settle(got.receipt, SETTLE_ACTION_DEAD_LETTER))
    await exchange.ask(append("jobs/late", b"x", ttl_ms=10))
    await clock.advance_ms(10)
    (bury,) = await storage.due(SCAN_KIND_DEAD_DEADLINES)
    await exchange.ask(operation(action=bury))

    rows = await history(storage)

    assert [row[:3] for row in rows] == [
        ("jobs/late", 1, RETENTION_TYPE_TIME_TO_LIVE),
        ("jobs/rejected", 1, RETENTION_TYPE_ATTEMPTS_EXHAUSTED),
        ("jobs/purged", 1, RETENTION_TYPE_PURGE),
    ]
    assert await history(storage, type=RETENTION_TYPE_PURGE) == rows[2:]


@pytest.mark.parametrize("dead_letter_topic", ["", "dead"])
async def test_messages_that_are_kept_for_replay_are_counted_when_their_time_to_live_ends(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock, dead_letter_topic: str
) -> None:
    """R6, L6: the run leaves as a whole; messages that wait may become dead letters instead."""
    await storage.create_topic("dead")
    await storage.create_topic("kept", retention_enabled=True, dead_letter_topic=dead_letter_topic)
    await exchange.ask(append("kept/a", b"1", b"2", b"3", ttl_ms=10))
    (got,) = (await exchange.ask(reserve("kept/a", 2))).slices
    await exchange.ask(settle(got.receipt))
    await clock.advance_ms(10)
    (bury,) = await storage.due(SCAN_KIND_DEAD_DEADLINES)

    await exchange.ask(operation(action=bury))

    expected = 2 if dead_letter_topic else 3
    assert [row[:3] for row in await history(storage)] == [
        ("kept/a", expected, RETENTION_TYPE_TIME_TO_LIVE)
    ]
    assert (await storage.queue("kept/a")).queue.messages == 0


async def test_history_is_paged_newest_first_over_all_partitions(
    start_storage: StartStorage, clock: ManualClock
) -> None:
    """R6: the newest 100 first."""
    storage = await start_storage(partitions=2)
    await storage.create_topic("jobs")
    async with storage.exchange() as exchange:
        for number in range(101):
            await exchange.ask(append(f"jobs/{number}", b"x"))
            await exchange.ask(operation(purge=Purge(lmq_name=f"jobs/{number}")))
            await clock.advance_ms(1)

    first = await storage.retention.ListRetentionHistory(ListRetentionHistoryRequest())
    request = ListRetentionHistoryRequest(page_token=first.next_page_token)
    second = await storage.retention.ListRetentionHistory(request)

    names = [row.lmq_name for row in (*first.rows, *second.rows)]
    assert names == [f"jobs/{number}" for number in reversed(range(101))]
    assert (len(first.rows), second.next_page_token) == (100, "")
    assert await history(storage, partition=1) == []


async def test_history_is_listed_by_queue_topic_and_pass(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R6: each filter alone and together with others."""
    for topic in ("old", "older"):
        await storage.create_topic(topic, retention_enabled=True, retention_seconds=1)
    made = [await exchange.ask(append(f"{t}/{q}", b"x")) for t in ("old", "older") for q in "ab"]
    await clock.advance_ms(1000)
    names = ["old/a", "old/b", "older/a", "older/b"]
    rows = [run(each.queue_id, 0, 1, name) for each, name in zip(made, names, strict=True)]
    await apply(storage, RETENTION_TYPE_EXPIRED, *rows[:3], pass_id="first")
    await apply(storage, RETENTION_TYPE_EXPIRED, rows[3], pass_id="second")
    await exchange.ask(append("old/a", b"x"))
    await exchange.ask(operation(purge=Purge(lmq_name="old/a")))

    async def listed(**fields: Any) -> list[str]:
        return [f"{name} {by}" for name, _, _, by in await history(storage, **fields)]

    assert await listed(lmq_name="old/a") == ["old/a purge", "old/a first"]
    assert await listed(topic="older") == ["older/b second", "older/a first"]
    assert sorted(await listed(pass_id="first")) == ["old/a first", "old/b first", "older/a first"]
    assert await listed(pass_id="first", lmq_name="older/a") == ["older/a first"]
    assert await listed(topic="old", type=RETENTION_TYPE_PURGE) == ["old/a purge"]
    assert await listed(topic="ol") == await listed(pass_id="third") == []


async def test_a_commit_writes_one_row_per_topic_type_and_pass(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R6: it holds the queues by name; pages may end within it."""
    await storage.create_topic("old", retention_enabled=True, retention_seconds=1)
    names = [f"old/{number:02}" for number in range(20)]
    made = await exchange.ask_all(*(append(name, b"x") for name in names))
    await clock.advance_ms(1000)
    rows = [run(each.queue_id, 0, 1, name) for each, name in zip(made, names, strict=True)]

    await apply(storage, RETENTION_TYPE_EXPIRED, *rows)

    listed, token = [], ""
    while True:
        request = ListRetentionHistoryRequest(page_size=7, page_token=token)
        page = await storage.retention.ListRetentionHistory(request)
        listed.append([row.lmq_name for row in page.rows])
        token = page.next_page_token
        if not token:
            break
    assert listed == [names[:7], names[7:14], names[14:]]
    row = Planned(table=SCAN_TABLE_NAME_HISTORY, age_ms=1)
    await clock.advance_ms(1000)
    assert await apply(storage, RETENTION_TYPE_OLD_RECORDS, row) == (20, 0, 0)
    assert [each[:2] for each in await history(storage)] == [("history", 20)]


async def test_a_page_continues_where_the_last_ended_while_history_grows(
    start_storage: StartStorage, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R6: over partitions, with rows of one moment; a filter ends a page after bounded reads."""
    monkeypatch.setattr("storage_svc.reads.history.EXAMINED_MAX", 3)
    storage = await start_storage(partitions=2)
    topic = await storage.create_topic("jobs")

    async def purge(exchange: ExchangeClient, lmq_name: str) -> None:
        await exchange.ask(append(lmq_name, b"x"))
        await exchange.ask(operation(purge=Purge(lmq_name=lmq_name)))

    async with storage.exchange(0) as first, storage.exchange(1) as second:
        await apply_topic(second, topic)
        for number in range(5):
            await purge(first, f"jobs/{number}")
            await purge(second, f"jobs/{number}")
            await clock.advance_ms(number % 2)
        token, listed, pages = "", [], 0
        while token or not pages:
            request = ListRetentionHistoryRequest(lmq_name="jobs/0", page_token=token, page_size=1)
            page = await storage.retention.ListRetentionHistory(request)
            listed += [(row.partition, row.lmq_name) for row in page.rows]
            token, pages = page.next_page_token, pages + 1
            await purge(first, "jobs/new")

    assert listed == [(0, "jobs/0"), (1, "jobs/0")]
    assert pages > 2


@pytest.mark.parametrize("asked", [{}, {"topic": "jobs"}, {"pass_id": "purge"}])
async def test_a_page_costs_what_it_shows_however_long_the_history_is(
    storage: RunningStorage,
    exchange: ExchangeClient,
    monkeypatch: pytest.MonkeyPatch,
    asked: dict[str, Any],
) -> None:
    """R6, P3: the first page, and one that continues it."""
    names = [f"jobs/{number}" for number in range(50)]
    for name in names:
        await exchange.ask(append(name, b"x"))
        await exchange.ask(operation(purge=Purge(lmq_name=name)))
    reads = count_reads(monkeypatch)
    listed, token = [], ""

    for _ in range(2):
        request = ListRetentionHistoryRequest(page_size=1, page_token=token, **asked)
        page = await storage.retention.ListRetentionHistory(request)
        listed += [row.lmq_name for row in page.rows]
        token = page.next_page_token

    assert listed == [names[-1], names[-2]]
    assert reads.total() <= 2 * 3  # the row, the next one, and one that shows that there are more


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"page_size": limits.PAGE_SIZE_MAX + 1}, "INVALID_ARGUMENT"),
        ({"partition": 1}, "PARTITION_NOT_FOUND"),
        pytest.param(
            {"page_token": "x"},
            "INVALID_ARGUMENT",
        ),
        pytest.param({"page_token": "\u00b2"}, "INVALID_ARGUMENT"),
        ({"page_token": "1-2-3"}, "INVALID_ARGUMENT"),
        ({"page_token": f"1-2-3-{2**64}"}, "INVALID_ARGUMENT"),
        ({"lmq_name": "a/b/c/"}, "INVALID_NAME"),
    ],
)
async def test_a_page_of_history_that_cannot_be_is_refused(
    storage: RunningStorage, fields: dict[str, Any], reason: str
) -> None:
    assert await history(storage, page_size=limits.PAGE_SIZE_MAX) == []

    with pytest.raises(errors.TidemarkError) as refused:
        await history(storage, **fields)

    assert refused.value.reason == reason
