"""Totals that a client takes back: what it did not hand out is not charged after all (K1)."""

import pytest

from tests.service.broker.conftest import StartBroker
from tests.support.local_broker import LocalBroker, in_time
from tests.support.reporting_consumer import PATIENT, attempts_of, hold, pull_all, renew, run_out
from tidemark.api.broker.v1.message_pb2 import Extend
from tidemark.clock import ManualClock

pytestmark = pytest.mark.slow


async def test_what_was_noted_and_taken_back_is_not_charged_by_a_disconnect(
    local: LocalBroker,
) -> None:
    """K1, V8: a renewal had stored the totals before they were taken back."""
    session = await local.session()
    consumer = await hold(session, 4)

    await consumer.hand_out(messages=3)
    refused = await renew(session, delivery_tags=[1])
    await consumer.hand_out(messages=1)
    await session.abort()

    assert refused == []
    assert attempts_of(await pull_all(local, 4)) == [1, 0, 0, 0]


@pytest.mark.parametrize("how", ["renewed", "extended", "noted"])
async def test_what_was_noted_and_taken_back_is_not_charged_by_an_expiry(
    start: StartBroker, clock: ManualClock, how: str
) -> None:
    """K1, V2: whichever way the smaller totals come to storage."""
    local = await start(clock, partitions=1, **PATIENT)
    session = await local.session()
    consumer = await hold(session, 10)
    await consumer.hand_out(messages=3)
    await renew(session, delivery_tags=[1])

    await consumer.hand_out(messages=1)
    if how == "renewed":
        await renew(session, delivery_tags=[1])
    elif how == "extended":
        await in_time(session.settle(1, Extend(visibility_ms=60_000)))
    await run_out(local, clock)

    assert attempts_of(await pull_all(local)) == [1] + [0] * 9


async def test_a_renewal_by_receipt_takes_nothing_back(
    start: StartBroker, clock: ManualClock
) -> None:
    """K1: a client that reports nothing is charged for everything, also after it has renewed."""
    local = await start(clock, partitions=1, **PATIENT)
    session = await local.session()
    await session.publish("orders/x", [b"1", b"2"])
    (pulled,) = await local.pull("orders/x", max_messages=2)

    refused = await renew(session, receipts=[{"receipt": pulled.receipt}])
    await run_out(local, clock)

    assert refused == []
    assert attempts_of(await pull_all(local, 2)) == [1, 1]
