"""Acks: many reservations end at once, each as by a settlement of its own (V6)."""

import pytest

from tests.support.exchange_client import (
    ExchangeClient,
    append,
    operation,
    reserve,
    reserved,
    settle,
)
from tidemark import errors, limits
from tidemark.api.storage.v1.exchange_pb2 import (
    SETTLE_ACTION_ACK,
    SETTLE_ACTION_NACK,
    AckReservations,
    Operation,
)
from tidemark.receipts import Receipt
from tidemark.rpc.statuses import from_status

pytestmark = pytest.mark.slow


def acks(*receipts: bytes) -> Operation:
    return operation(acks=AckReservations(receipts=receipts))


async def test_a_refused_reservation_does_not_keep_the_others_from_their_ack(
    exchange: ExchangeClient,
) -> None:
    """V6, S3: a repeated ack changes nothing; another ending before and nonsense are named."""
    got = []
    for name in ("jobs/a", "jobs/b", "jobs/c"):
        await exchange.ask(append(name, b"x", b"y"))
        got.append(await reserved(exchange, name))
    first, nacked, last = (each.receipt for each in got)
    await exchange.ask(settle(nacked, SETTLE_ACTION_NACK))
    unknown = Receipt(0, got[0].queue_id, 999_999).encode()

    acked = await exchange.ask(acks(first, nacked, b"nonsense", unknown, first, last))

    assert list(acked.messages) == [2, 0, 0, 0, 0, 2]
    reasons = {each.index: type(from_status(each.error)) for each in acked.refused}
    assert reasons == {
        1: errors.AlreadySettled,
        2: errors.InvalidArgument,
        3: errors.ReservationNotFound,
    }
    assert not (await exchange.ask(reserve("jobs/a"))).slices
    assert len((await exchange.ask(reserve("jobs/b"))).slices) == 1


async def test_acks_settle_what_is_left_of_a_reservation(exchange: ExchangeClient) -> None:
    """V6."""
    await exchange.ask(append("jobs", b"1", b"2", b"3"))
    got = await reserved(exchange, "jobs")
    await exchange.ask(settle(got.receipt, SETTLE_ACTION_ACK, (0, 1)))

    acked = await exchange.ask(acks(got.receipt))

    assert (list(acked.messages), list(acked.refused)) == ([2], [])
    with pytest.raises(errors.AlreadySettled):
        await exchange.ask(settle(got.receipt, SETTLE_ACTION_NACK))


@pytest.mark.parametrize("count", [0, limits.ACKS_PER_OPERATION_MAX + 1])
async def test_an_operation_names_a_bounded_number_of_reservations(
    exchange: ExchangeClient, count: int
) -> None:
    """S3."""
    with pytest.raises(errors.InvalidArgument):
        await exchange.ask(acks(*[b"r"] * count))


async def test_many_acks_of_a_frame_are_all_answered(exchange: ExchangeClient) -> None:
    """S3: more than one commit takes."""
    await exchange.ask(append("jobs", b"1"))
    got = await reserved(exchange, "jobs")
    many = [acks(*[got.receipt] * limits.ACKS_PER_OPERATION_MAX) for _ in range(6)]

    results = await exchange.ask_all(*many)

    assert [sum(each.messages) for each in results] == [1, 0, 0, 0, 0, 0]
