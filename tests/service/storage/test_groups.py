"""Groups: moved to another place in their queue, and removed with what they held."""

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from tests.support.exchange_client import (
    ExchangeClient,
    append,
    operation,
    reserve,
    reserved,
    settle,
)
from tests.support.storage_client import RunningStorage
from tidemark import errors, limits
from tidemark.api.broker.v1.subscription_pb2 import StartPosition
from tidemark.api.broker.v1.topic_pb2 import SUBSCRIPTION_KIND_EXCLUSIVE
from tidemark.api.storage.v1.exchange_pb2 import PlaceGroup, RemoveGroup, TakeOwnership
from tidemark.clock import ManualClock


@pytest.mark.parametrize(
    ("start", "offsets"),
    [
        (StartPosition(earliest=True), [0, 1, 2, 3]),
        (StartPosition(latest=True), []),
        (StartPosition(last=1), [3]),
        (StartPosition(offset=2), [2, 3]),
        (StartPosition(offset=99), []),
    ],
)
async def test_a_group_can_be_moved_and_what_it_held_is_revoked(
    storage: RunningStorage, exchange: ExchangeClient, start: StartPosition, offsets: list[int]
) -> None:
    await storage.create_topic("kept", retention_enabled=True)
    await exchange.ask(append("kept", b"0", b"1", b"2", b"3"))
    got = await reserved(exchange, "kept", 2)

    move = PlaceGroup(lmq_name="kept", group="default", start=start)
    placed = await exchange.ask(operation(place_group=move))
    slices = (await exchange.ask(reserve("kept"))).slices

    assert (placed.created, list(placed.revoked_reservation_ids)) == (False, [got.reservation_id])
    assert placed.cursor == min([*offsets, 4])
    given = [each.first_offset + at for each in slices for at in range(each.count)]
    assert given == offsets


def since(seconds: int, nanos: int = 0) -> StartPosition:
    return StartPosition(time=Timestamp(seconds=seconds, nanos=nanos))


async def test_a_group_starts_and_is_reset_at_a_time(
    storage: RunningStorage, exchange: ExchangeClient, clock: ManualClock
) -> None:
    """R15: at the first message that was published then or later."""
    await storage.create_topic("kept", retention_enabled=True)
    began_s = clock.wall_ms() // 1000
    for _ in range(3):
        await exchange.ask(append("kept", b"x", b"y"))
        await clock.advance_ms(1000)
    await exchange.ask(reserve("kept"))
    starts = {
        "before": since(0),
        "first": since(began_s),
        "second": since(began_s + 1),
        "after-the-first": since(began_s, 1),
        "after-the-last": since(began_s + 3),
        "year-9999": since(253_402_300_799, 999_000_000),
    }

    cursors = {
        name: (await exchange.ask(operation(place_group=place))).cursor
        for name, start in starts.items()
        for place in (PlaceGroup(lmq_name="kept", group=name, start=start),)
    }
    move = PlaceGroup(lmq_name="kept", group="default", start=since(began_s + 2))
    moved = await exchange.ask(operation(place_group=move))
    again = (await exchange.ask(reserve("kept"))).slices
    wrong = await exchange.ask_all(
        *(
            operation(place_group=PlaceGroup(lmq_name="kept", group="default", start=start))
            for start in (since(-1), since(253_402_300_800))
        )
    )

    assert cursors == {
        "before": 0,
        "first": 0,
        "second": 2,
        "after-the-first": 2,
        "after-the-last": 6,
        "year-9999": 6,
    }
    assert (moved.created, moved.cursor) == (False, 4)
    assert [(each.first_offset, each.count) for each in again] == [(4, 2)]
    assert [type(each) for each in wrong] == [errors.InvalidArgument] * 2
    assert wrong[0].metadata["field"] == "time"


async def test_a_group_that_goes_takes_its_reservations_with_it(exchange: ExchangeClient) -> None:
    await exchange.ask(append("jobs", b"x"))
    got = await reserved(exchange, "jobs", group="g")

    await exchange.ask(operation(remove_group=RemoveGroup(lmq_name="jobs", group="g")))

    (late,) = await exchange.ask_all(settle(got.receipt))
    assert isinstance(late, errors.ReservationNotFound)
    assert (await reserved(exchange, "jobs", group="g")).delivery_count == 1


async def test_a_queue_has_groups_up_to_a_limit(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """S3: every publish visits all of them."""
    await storage.create_topic("owned", subscription=SUBSCRIPTION_KIND_EXCLUSIVE)
    names = [f"g{number}" for number in range(limits.GROUPS_PER_QUEUE_MAX)]
    await exchange.ask(append("jobs", b"x"))
    at_the_limit = await exchange.ask_all(*(reserve("jobs", group=name) for name in names))
    places = (PlaceGroup(lmq_name="owned", group=name) for name in names)
    at_the_limit += await exchange.ask_all(*(operation(place_group=place) for place in places))

    one_past = await exchange.ask_all(
        reserve("jobs", group="late"),
        operation(place_group=PlaceGroup(lmq_name="jobs", group="late")),
        operation(take_ownership=TakeOwnership(lmq_name="owned", group="late", client_id="ada")),
    )
    move = PlaceGroup(lmq_name="jobs", group="g0", start=StartPosition(earliest=True))
    await exchange.ask(operation(place_group=move))
    await exchange.ask(operation(remove_group=RemoveGroup(lmq_name="jobs", group="g0")))
    await exchange.ask(append("jobs", b"y"))
    got = (await exchange.ask(reserve("jobs", group="late"))).slices

    assert not [each for each in at_the_limit if isinstance(each, errors.TidemarkError)]
    assert [type(each) for each in one_past] == [errors.QuotaExceeded] * 3
    assert one_past[0].metadata["quota"] == "groups"
    assert [each.first_offset for each in got] == [0, 1]
