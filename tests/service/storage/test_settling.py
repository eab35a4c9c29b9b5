"""Settling: what each ending does, early or late, and which receipts are good (V6, V8)."""

import pytest

from storage_svc.operations import expire
from storage_svc.partition.deadlines import BUCKET_MS
from tests.support.exchange_client import (
    ExchangeClient,
    append,
    operation,
    payloads,
    reserve,
    reserved,
    settle,
)
from tidemark import errors, limits
from tidemark.api.storage.v1.exchange_pb2 import (
    SETTLE_ACTION_ACK,
    SETTLE_ACTION_DISCONNECT,
    SETTLE_ACTION_EXTEND,
    SETTLE_ACTION_NACK,
    SETTLE_ACTION_RELEASE,
    ExpireDue,
    SettleAction,
)
from tidemark.clock import ManualClock
from tidemark.receipts import Receipt

pytestmark = pytest.mark.slow

EXPIRE_DUE = operation(expire_due=ExpireDue())


async def test_an_ack_before_the_deadline_prevents_redelivery(
    exchange: ExchangeClient, clock: ManualClock
) -> None:
    """V6."""
    await exchange.ask(append("jobs", b"x", b"y"))
    got = await reserved(exchange, "jobs", visibility_ms=50)

    settled = await exchange.ask(settle(got.receipt))
    await clock.advance_ms(100)
    expired = await exchange.ask(EXPIRE_DUE)

    assert settled.messages == 2
    assert (expired.messages, exchange.expired.qsize()) == (0, 0)
    assert not (await exchange.ask(reserve("jobs"))).slices


@pytest.mark.parametrize(
    ("action", "attempts"),
    [
        (SETTLE_ACTION_NACK, 1),
        (SETTLE_ACTION_DISCONNECT, 1),
        (SETTLE_ACTION_RELEASE, 0),
    ],
)
async def test_what_is_given_back_counts_an_attempt_unless_it_is_released(
    exchange: ExchangeClient, action: SettleAction.ValueType, attempts: int
) -> None:
    """V8: attempt_count grows on nack and disconnect, delivery_count with every hand-out."""
    await exchange.ask(append("jobs", b"x"))
    got = await reserved(exchange, "jobs")

    await exchange.ask(settle(got.receipt, action))
    again = await reserved(exchange, "jobs")

    assert (again.attempt_count, again.delivery_count) == (attempts, 2)


async def test_a_nack_with_a_delay_is_ready_after_it(
    exchange: ExchangeClient, clock: ManualClock
) -> None:
    """V8."""
    await exchange.ask(append("jobs", b"x"))
    got = await reserved(exchange, "jobs")
    await exchange.ask(settle(got.receipt, SETTLE_ACTION_NACK, duration_ms=500))

    await clock.advance_ms(499)
    early = await exchange.ask(EXPIRE_DUE)
    await clock.advance_ms(1)
    due = await exchange.ask(EXPIRE_DUE)

    assert (early.messages, due.messages) == (0, 1)
    assert (await reserved(exchange, "jobs")).attempt_count == 1


async def test_messages_of_one_reservation_can_end_in_different_ways(
    exchange: ExchangeClient,
) -> None:
    await exchange.ask(append("jobs", b"0", b"1", b"2", b"3"))
    got = await reserved(exchange, "jobs")

    acked = await exchange.ask(settle(got.receipt, SETTLE_ACTION_ACK, (0, 1), (2, 3)))
    nacked = await exchange.ask(settle(got.receipt, SETTLE_ACTION_NACK))
    again = (await exchange.ask(reserve("jobs"))).slices

    assert (acked.messages, nacked.messages) == (2, 2)
    assert [payloads(each.body) for each in again] == [[b"1"], [b"3"]]


async def test_repeating_a_settlement_is_a_success_and_a_different_one_is_refused(
    exchange: ExchangeClient,
) -> None:
    """V6."""
    await exchange.ask(append("jobs", b"x"))
    got = await reserved(exchange, "jobs")
    await exchange.ask(settle(got.receipt))

    repeated = await exchange.ask(settle(got.receipt))
    (different,) = await exchange.ask_all(settle(got.receipt, SETTLE_ACTION_NACK))
    (extended,) = await exchange.ask_all(settle(got.receipt, SETTLE_ACTION_EXTEND))

    assert repeated.messages == 0
    assert isinstance(different, errors.AlreadySettled)
    assert isinstance(extended, errors.AlreadySettled)
    assert not (await exchange.ask(reserve("jobs"))).slices


async def test_a_whole_frame_of_settlements_can_be_repeated(exchange: ExchangeClient) -> None:
    """V6: a link that breaks may lose the answers to all of them."""
    count = limits.SETTLEMENTS_PER_FRAME_MAX
    await exchange.ask_all(*(append("jobs", b"x") for _ in range(count)))
    slices = (await exchange.ask(reserve("jobs", count, max_bytes=count * 100))).slices
    acks = [settle(each.receipt) for each in slices]

    first, again = await exchange.ask_all(*acks), await exchange.ask_all(*acks)

    assert len(slices) == count
    assert [each.messages for each in first] == [1] * count
    assert not [each for each in again if isinstance(each, errors.TidemarkError)]


async def test_a_settlement_after_expiry_is_refused_and_changes_nothing(
    exchange: ExchangeClient, clock: ManualClock
) -> None:
    """V2, V6."""
    await exchange.ask(append("jobs", b"x"))
    got = await reserved(exchange, "jobs", visibility_ms=50)
    await clock.advance_ms(50)
    expired = await exchange.ask(EXPIRE_DUE)

    late = await exchange.ask_all(
        settle(got.receipt),
        settle(got.receipt, SETTLE_ACTION_NACK),
        settle(got.receipt, SETTLE_ACTION_EXTEND),
    )
    again = await reserved(exchange, "jobs")

    assert (await exchange.expired.get(), expired.messages) == (got.reservation_id, 1)
    assert all(isinstance(each, errors.ReservationExpired) for each in late)
    assert (again.attempt_count, again.delivery_count) == (1, 2)


async def test_an_extended_reservation_expires_later(
    exchange: ExchangeClient, clock: ManualClock
) -> None:
    """V6."""
    await exchange.ask(append("jobs", b"x"))
    got = await reserved(exchange, "jobs", visibility_ms=100)
    await clock.advance_ms(99)

    extended = await exchange.ask(settle(got.receipt, SETTLE_ACTION_EXTEND, duration_ms=100))
    await clock.advance_ms(99)
    early = await exchange.ask(EXPIRE_DUE)
    by_topic = await exchange.ask(settle(got.receipt, SETTLE_ACTION_EXTEND))
    await clock.advance_ms(29_999)
    still_early = await exchange.ask(EXPIRE_DUE)
    await clock.advance_ms(1)
    due = await exchange.ask(EXPIRE_DUE)

    assert (extended.messages, extended.visibility_ms, by_topic.visibility_ms) == (1, 100, 30_000)
    assert (early.messages, still_early.messages, due.messages) == (0, 0, 1)


async def test_every_commit_under_an_exchange_expires_what_is_due(
    exchange: ExchangeClient, clock: ManualClock
) -> None:
    """V1: any commit expires it, whichever queue that commit is for."""
    await exchange.ask(append("jobs/a", b"x"))
    got = await reserved(exchange, "jobs/a", visibility_ms=50)
    await exchange.ask(append("jobs/b", b"x"))
    assert exchange.expired.empty()
    await clock.advance_ms(50 + BUCKET_MS)

    await exchange.ask(append("jobs/b", b"y"))

    assert await exchange.expired.get() == got.reservation_id
    assert (await reserved(exchange, "jobs/a")).attempt_count == 1


async def test_a_settlement_in_the_commit_that_would_expire_it_comes_first(
    exchange: ExchangeClient, clock: ManualClock
) -> None:
    """V6: it is late, and no other consumer has the message yet."""
    await exchange.ask(append("jobs", b"x"))
    got = await reserved(exchange, "jobs", visibility_ms=50)
    await clock.advance_ms(50 + BUCKET_MS)

    settled = await exchange.ask(settle(got.receipt))

    assert settled.messages == 1
    assert exchange.expired.empty()


async def test_a_commit_expires_a_bounded_number_and_the_next_goes_on(
    exchange: ExchangeClient, clock: ManualClock
) -> None:
    """V5, S3: however many are due at once, no other operation waits for all of them."""
    limit = expire.ExpireDue().limit
    await exchange.ask(append("jobs", *[b"x"] * (limit + 1)))
    one = reserve("jobs", max_messages=1, visibility_ms=50)
    await exchange.ask_all(*[one] * (limit + 1))
    await clock.advance_ms(50 + BUCKET_MS)

    await exchange.ask(append("jobs/other", b"x"))
    first = [await exchange.expired.get() for _ in range(limit)]
    assert exchange.expired.empty()
    await exchange.ask(append("jobs/other", b"x"))

    assert len({*first, await exchange.expired.get()}) == limit + 1


async def test_receipts_that_stand_for_nothing_are_refused(exchange: ExchangeClient) -> None:
    await exchange.ask(append("jobs", b"x"))
    got = await reserved(exchange, "jobs")
    mine = Receipt.decode(got.receipt)
    malformed = [b"", b"not a receipt", got.receipt + b"x", b"\xff" + got.receipt[1:]]
    foreign = [
        Receipt(mine.partition + 1, mine.queue_id, mine.reservation_id, 0),
        Receipt(mine.partition, mine.queue_id + 1, mine.reservation_id, 0),
        Receipt(mine.partition, mine.queue_id, mine.reservation_id + 1, 0),
    ]

    refused = await exchange.ask_all(*map(settle, malformed))
    unknown = await exchange.ask_all(*(settle(each.encode()) for each in foreign))

    assert [error.reason for error in refused] == ["INVALID_ARGUMENT"] * 4
    assert all(error.metadata["field"] == "receipt" for error in refused)
    assert [error.reason for error in unknown] == ["RESERVATION_NOT_FOUND"] * 3
    assert (await exchange.ask(settle(got.receipt))).messages == 1


@pytest.mark.parametrize("ranges", [[(0, 3)], [(1, 1)], [(1, 0)], [(1, 2), (0, 1)], [(0, 2)] * 2])
async def test_ranges_outside_a_reservation_or_out_of_order_are_refused(
    exchange: ExchangeClient, ranges: list[tuple[int, int]]
) -> None:
    await exchange.ask(append("jobs", b"x", b"y"))
    got = await reserved(exchange, "jobs")

    with pytest.raises(errors.InvalidArgument):
        await exchange.ask(settle(got.receipt, SETTLE_ACTION_ACK, *ranges))

    assert (await exchange.ask(settle(got.receipt))).messages == 2
