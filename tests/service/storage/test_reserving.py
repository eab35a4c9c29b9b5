"""Reserving: messages as they were published, in order and in turn, as many as may be taken."""

import pytest

from storage_svc import operations
from storage_svc.engines.engine import Row, Table
from storage_svc.engines.rocksdb import RocksEngine
from tests.support.exchange_client import (
    ExchangeClient,
    append,
    operation,
    payloads,
    reserve,
    reserved,
    settle,
)
from tests.support.storage_client import RunningStorage
from tidemark import limits
from tidemark.api.storage.v1.exchange_pb2 import (
    SETTLE_ACTION_NACK,
    SETTLE_ACTION_RELEASE,
    Materialize,
)
from tidemark.clock import ManualClock


async def test_messages_come_back_as_they_were_published(
    exchange: ExchangeClient, clock: ManualClock
) -> None:
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    run = append("jobs/a", b"one", b"two", fairness_key="k", traceparent=traceparent)
    appended = await exchange.ask(run)

    got = await reserved(exchange, "jobs/a", visibility_ms=60_000)

    assert payloads(got.body) == [b"one", b"two"]
    assert (got.first_offset, got.count, got.queue_id) == (0, 2, appended.queue_id)
    assert (got.attempt_count, got.delivery_count, got.owner_epoch) == (0, 1, 0)
    assert (got.fairness_key, got.traceparent) == ("k", traceparent)
    assert (got.visibility_ms, got.publish_time_ms) == (60_000, clock.wall_ms())


async def test_offsets_of_a_queue_have_no_gaps_and_a_reserve_may_cut_a_run(
    exchange: ExchangeClient,
) -> None:
    first, second = await exchange.ask_all(append("jobs", b"0", b"1", b"2"), append("jobs", b"3"))

    cut = await reserved(exchange, "jobs", 2)
    rest = (await exchange.ask(reserve("jobs"))).slices

    assert (first.first_offset, second.first_offset) == (0, 3)
    assert payloads(cut.body) == [b"0", b"1"]
    assert [(each.first_offset, payloads(each.body)) for each in rest] == [(2, [b"2"]), (3, [b"3"])]


async def test_a_reserve_gives_one_message_however_few_bytes_it_may(
    exchange: ExchangeClient,
) -> None:
    await exchange.ask(append("jobs", bytes(1000), bytes(1000)))

    got = await reserved(exchange, "jobs", max_bytes=1)

    assert got.count == 1


async def test_a_strict_reserve_leaves_a_message_that_is_too_large_and_says_that_there_is_one(
    exchange: ExchangeClient,
) -> None:
    await exchange.ask(append("jobs", bytes(1000), bytes(1000)))

    none = await exchange.ask(reserve("jobs", max_bytes=999, strict_bytes=True))
    got = await reserved(exchange, "jobs", max_bytes=1999, strict_bytes=True)
    (rest,) = (await exchange.ask(reserve("jobs"))).slices
    nothing = await exchange.ask(reserve("jobs", max_bytes=1, strict_bytes=True))

    assert (list(none.slices), none.more) == ([], True)
    assert (got.count, rest.count) == (1, 1)
    assert not nothing.more


async def test_a_group_of_a_queue_without_messages_reads_no_rows(
    exchange: ExchangeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most queues get their groups before their first message, and all of them what follows."""
    await exchange.ask(operation(materialize=Materialize(lmq_name="jobs/a", create=True)))
    scanned: list[Table] = []
    scan = RocksEngine.scan

    async def counted(
        self: RocksEngine, table: Table, start: bytes, end: bytes | None, *, limit: int
    ) -> list[Row]:
        scanned.append(table)
        return await scan(self, table, start, end, limit=limit)

    monkeypatch.setattr(RocksEngine, "scan", counted)
    nothing = await exchange.ask(reserve("jobs/a"))
    rows = [table for table in scanned if table is Table.RUN_HEADERS]
    await exchange.ask(append("jobs/a", b"1"))
    got = await reserved(exchange, "jobs/a")

    assert (list(nothing.slices), rows) == ([], [])
    assert payloads(got.body) == [b"1"]


async def test_each_group_gets_every_message(exchange: ExchangeClient) -> None:
    await exchange.ask(append("jobs", b"x"))

    audit, billing = await exchange.ask_all(
        reserve("jobs", group="audit"), reserve("jobs", group="billing")
    )

    assert payloads(audit.slices[0].body) == payloads(billing.slices[0].body) == [b"x"]


async def test_a_key_that_becomes_active_in_a_backlog_is_served_within_one_round(
    exchange: ExchangeClient,
) -> None:
    """V7."""
    for _ in range(4):
        await exchange.ask(append("jobs", *[bytes(1000)] * 200, fairness_key="loud"))
    loud = await reserved(exchange, "jobs", 10)
    await exchange.ask(append("jobs", b"quiet", fairness_key="quiet"))

    keys = [each.fairness_key for each in (await exchange.ask(reserve("jobs", 200))).slices]

    assert loud.fairness_key == "loud"
    assert "quiet" in keys


async def test_a_message_past_its_time_to_live_is_never_handed_out(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """L5."""
    await storage.create_topic("brief", default_ttl_ms=100)
    await exchange.ask_all(append("brief", b"topic's"), append("jobs", b"own", ttl_ms=100))
    await clock.advance_ms(99)
    in_time = await reserved(exchange, "jobs")
    await exchange.ask(settle(in_time.receipt, SETTLE_ACTION_RELEASE))

    await clock.advance_ms(1)

    assert not (await exchange.ask(reserve("brief"))).slices
    assert not (await exchange.ask(reserve("jobs"))).slices


async def test_a_message_is_handed_out_until_its_attempts_are_exhausted(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """L5."""
    await storage.create_topic("twice", max_attempts=2)
    await exchange.ask(append("twice", b"x"))
    for attempts in (0, 1):
        got = await reserved(exchange, "twice")
        assert got.attempt_count == attempts
        await exchange.ask(settle(got.receipt, SETTLE_ACTION_NACK))

    assert not (await exchange.ask(reserve("twice"))).slices


async def test_large_messages_of_many_queues_can_be_reserved_in_one_frame(
    exchange: ExchangeClient,
) -> None:
    for number in range(5):
        await exchange.ask(append(f"jobs/{number}", *[bytes(1_000_000)] * 4))

    results = await exchange.ask_all(*(reserve(f"jobs/{number}") for number in range(5)))

    assert [sum(each.count for each in result.slices) for result in results] == [4] * 5


async def test_what_one_reserve_gives_fits_a_frame_however_unequal_messages_are(
    exchange: ExchangeClient,
) -> None:
    """S3: a run counts its mean, so the large messages of many runs come in one hand-out."""
    large, small = bytes(limits.MESSAGE_BYTES_MAX), [b"x"] * 99
    keys = [f"k{number}" for number in range(24)]
    for key in keys:
        await exchange.ask(append("jobs", large, *small, fairness_key=key))

    got: dict[str, list[bytes]] = {key: [] for key in keys}
    more = True
    while more:
        handed_out = await exchange.ask(reserve("jobs"))
        for each in handed_out.slices:
            got[each.fairness_key] += payloads(each.body)
        more = handed_out.more

    assert all(each == [large, *small] for each in got.values())


async def test_what_one_commit_hands_out_has_a_bound_and_the_rest_is_asked_for_again(
    exchange: ExchangeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All answers of a commit are in memory at once, however many consumers ask."""
    monkeypatch.setattr(operations.reserve, "HANDED_OUT_BYTES_MAX", 1000)
    names = [f"jobs/{number}" for number in range(5)]
    await exchange.ask_all(*(append(name, bytes(600)) for name in names))
    asked = [reserve(name) for name in (*names, "jobs/0")]

    answers = await exchange.ask_all(*asked)
    again = await exchange.ask_all(*asked[2:4])
    last = await exchange.ask(asked[4])

    assert [len(each.slices) for each in answers] == [1, 1, 0, 0, 0, 0]
    assert [each.more for each in answers] == [False, False, True, True, True, False]
    assert [len(each.slices) for each in (*again, last)] == [1, 1, 1]
