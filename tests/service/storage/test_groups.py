"""Groups: moved to another place in their queue, and removed with what they held."""

import pytest

from tests.support.storage_client import (
    ExchangeClient,
    RunningStorage,
    append,
    operation,
    reserve,
    reserved,
    settle,
)
from tidemark import errors, limits
from tidemark.api.broker.v1.subscription_pb2 import StartPosition
from tidemark.api.broker.v1.topic_pb2 import SUBSCRIPTION_KIND_EXCLUSIVE
from tidemark.api.storage.v1.exchange_pb2 import PlaceGroup, RemoveGroup, TakeOwnership


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
