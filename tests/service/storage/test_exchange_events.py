"""What a broker hears on its exchange: health, ready queues, what expired, the next deadline."""

from typing import Any

import pytest

from storage_svc.partition.deadlines import BUCKET_MS
from tests.support.exchange_client import (
    ExchangeClient,
    append,
    bind_frame,
    frame_of,
    operation,
    reserve,
    settle,
)
from tests.support.storage_client import RunningStorage
from tidemark.api.broker.v1.topic_pb2 import PARTITION_STATE_SERVING
from tidemark.api.storage.v1.exchange_pb2 import ExpireDue
from tidemark.clock import ManualClock


async def test_the_first_frame_tells_the_health_and_the_next_deadline(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    health = await exchange.healths.get()
    deadline = await exchange.deadlines.get()

    assert (health.state, list(health.faults)) == (PARTITION_STATE_SERVING, [])
    assert deadline is None


async def test_a_queue_is_announced_once_after_a_reserve_came_back_short(
    exchange: ExchangeClient,
) -> None:
    await exchange.ask_all(append("jobs/full", b"1", b"2", b"3"), append("jobs/short", b"1"))
    await exchange.ask_all(reserve("jobs/full", 2), reserve("jobs/short", 2))

    await exchange.ask_all(append("jobs/full", b"4"), append("jobs/short", b"2"))
    await exchange.ask(append("jobs/short", b"3"))
    # One more that is short, so that anything announced in between would be seen before it.
    await exchange.ask_all(append("jobs/last", b"1"), reserve("jobs/last", 2))
    await exchange.ask(append("jobs/last", b"2"))

    assert await exchange.ready.get() == ("jobs/short", "default")
    assert await exchange.ready.get() == ("jobs/last", "default")


async def test_who_asks_in_the_commit_that_has_something_gets_it_and_is_told_of_nothing(
    exchange: ExchangeClient,
) -> None:
    await exchange.ask(append("jobs", b"1"))
    await exchange.ask(reserve("jobs"))
    assert not (await exchange.ask(reserve("jobs"))).slices

    _, got = await exchange.ask_all(append("jobs", b"2"), reserve("jobs"))
    await exchange.ask(append("jobs/other", b"answered after any event"))

    assert [each.count for each in got.slices] == [1]
    assert exchange.ready.empty()
    await exchange.ask(append("jobs", b"3"))
    assert await exchange.ready.get() == ("jobs", "default")


async def test_waiting_consumers_hear_of_an_expiry_after_it_is_committed(
    exchange: ExchangeClient, clock: ManualClock
) -> None:
    """V2."""
    await exchange.ask(append("jobs", b"x"))
    await exchange.ask(reserve("jobs", 2, visibility_ms=50))
    await clock.advance_ms(50)

    await exchange.ask(operation(expire_due=ExpireDue()))

    assert await exchange.ready.get() == ("jobs", "default")
    (got,) = (await exchange.ask(reserve("jobs"))).slices
    assert got.attempt_count == 1


async def test_an_earlier_deadline_is_told_at_once_and_a_later_one_when_the_earlier_has_come(
    exchange: ExchangeClient, clock: ManualClock
) -> None:
    """V1: to 10 ms, and never before something is due."""
    assert await exchange.deadlines.get() is None
    await exchange.ask_all(append("jobs/a", b"x"), append("jobs/b", b"x"))

    await exchange.ask(reserve("jobs/a", visibility_ms=5000))
    far = await exchange.deadlines.get()
    (near_slice,) = (await exchange.ask(reserve("jobs/b", visibility_ms=1000))).slices
    near = await exchange.deadlines.get()
    await exchange.ask(settle(near_slice.receipt))

    assert far is not None
    assert near is not None
    assert 5000 <= far <= 5010
    assert 1000 <= near <= 1010
    assert exchange.deadlines.empty()
    await clock.advance_ms(near)
    assert (await exchange.ask(operation(expire_due=ExpireDue()))).messages == 0
    assert await exchange.deadlines.get() == far - near
    await clock.advance_ms(far - near)
    assert (await exchange.ask(operation(expire_due=ExpireDue()))).messages == 1
    assert await exchange.deadlines.get() is None


async def test_reservations_keep_running_over_a_restart_and_those_that_ran_out_expire(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """V1, V4."""
    await exchange.ask_all(append("jobs/a", b"x"), append("jobs/b", b"x"))
    short, long = await exchange.ask_all(
        reserve("jobs/a", visibility_ms=1000), reserve("jobs/b", visibility_ms=60_000)
    )
    await storage.stop()
    await clock.advance_ms(30_000)

    await storage.restart()

    async with storage.exchange() as after:
        assert await after.deadlines.get() == 0
        await after.ask(operation(expire_due=ExpireDue()))
        assert await after.expired.get() == short.slices[0].reservation_id
        assert (await after.ask(settle(long.slices[0].receipt))).messages == 1


async def test_a_reservation_is_told_before_its_expiry_however_late_the_broker_reads(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """V6: told the other way round, its tag would be issued after it was dropped, and stay."""
    hand_outs = 6
    slow: Any = storage.storage.Exchange()
    epoch = (await storage.info()).broker_epoch
    await slow.write(bind_frame(epoch))
    for _ in range(hand_outs):  # more than two frames can carry
        hand_out = [append("jobs", bytes(3_000_000)), reserve("jobs", visibility_ms=50)]
        await slow.write(frame_of(epoch, *hand_out))
    while (await storage.info()).reservations < hand_outs:
        pass
    await clock.advance_ms(50 + BUCKET_MS)
    await exchange.ask(append("jobs/other", b"x"))

    handed_out: set[int] = set()
    expired: set[int] = set()
    while len(expired) < hand_outs:
        for part in (await slow.read()).parts:
            slices = [each for result in part.results for each in result.reserve.slices]
            handed_out.update(each.reservation_id for each in slices)
            expired.update(part.expired_reservation_ids)
        assert expired <= handed_out
    slow.cancel()


async def test_events_that_gathered_fit_the_frames_in_which_they_leave(
    exchange: ExchangeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3: none is left out."""
    groups = [f"{number:0>128}" for number in range(20)]
    names = [f"jobs/{number:0>250}" for number in range(10)]
    await exchange.ask_all(*(append(name, b"x") for name in names))
    for name in names:
        await exchange.ask_all(*(reserve(name, group=group) for group in groups))
    exchange.stream.frame_bytes_max = 0
    monkeypatch.setattr("storage_svc.api.exchange.RESPONSE_BYTES_MAX", 16 * 1024)

    await exchange.ask_all(*(append(name, b"y") for name in names))

    announced = {await exchange.ready.get() for _ in range(len(names) * len(groups))}
    assert announced == {(name, group) for name in names for group in groups}
    assert exchange.stream.frame_bytes_max < 16 * 1024
