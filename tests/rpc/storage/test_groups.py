"""Groups: moved to another place in their queue, and removed with what they held."""

import pytest

from tests.rpc.storage_client import (
    ExchangeClient,
    RunningStorage,
    append,
    operation,
    reserve,
    reserved,
    settle,
)
from tidemark import errors
from tidemark.api.broker.v1.subscription_pb2 import StartPosition
from tidemark.api.storage.v1.exchange_pb2 import PlaceGroup, RemoveGroup


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
