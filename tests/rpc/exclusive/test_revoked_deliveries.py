"""What an evicted client still holds: it counts for nothing, and is not remembered for ever (I4)."""

import asyncio

import pytest

from tests.rpc.broker.local_broker import in_time, run_of
from tests.rpc.exclusive.clients import subscribe
from tests.rpc.exclusive.conftest import QUEUE, ExclusiveBroker, Start
from tidemark.api.broker.v1.message_pb2 import Ack
from tidemark.clock import ManualClock


async def test_a_broker_that_stops_waits_for_nothing_that_was_revoked(
    start: Start, clock: ManualClock
) -> None:
    """E9: who was evicted has nothing to settle, so it needs no grace. Time stands still."""
    broker = await start(clock)
    ada, bob = await broker.session_client("ada"), broker.unary_client("bob")
    await subscribe(ada, QUEUE)
    await broker.publish(run_of(QUEUE, b"1"))
    await ada.receive()
    await subscribe(bob, QUEUE)

    stopping = asyncio.create_task(broker.server.stop(60_000))

    await in_time(ada.session.until_ended())
    await stopping


async def test_revoked_tags_are_remembered_up_to_a_bound(
    broker: ExclusiveBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E8: whoever is evicted again and again and settles nothing costs no more and no more."""
    monkeypatch.setattr("broker_svc.deliveries.REVOKED_MAX", 2)
    ada, bob = await broker.session_client("ada"), broker.unary_client("bob")
    await broker.publish(run_of(QUEUE, b"1"))
    held = []
    for _ in range(3):
        await subscribe(ada, QUEUE)
        held += await ada.receive()
        await subscribe(bob, QUEUE)

    refusals = [await ada.settle(each, Ack()) for each in held]

    assert refusals == ["UNKNOWN_DELIVERY_TAG", "FENCED", "FENCED"]
