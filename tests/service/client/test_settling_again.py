"""A settlement that failed can be tried again, and the second try is no silent success (K4, V6)."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

import tidemark
from tests.service.client.conftest import Connect
from tests.support.local_broker import LocalBroker, in_time
from tests.support.sdk_calls import publish, take
from tidemark.clock import ManualClock, SystemClock
from tidemark.errors import (
    ClientClosed,
    DeadlineExceeded,
    ReservationExpired,
    TidemarkError,
    Unavailable,
)

QUEUE = "orders/a"


async def inflight(client: tidemark.Client) -> int:
    (group,) = await client.admin.list_groups(QUEUE)
    return group.inflight


async def test_pulled_messages_are_settled_by_the_second_call_after_a_failed_one(
    client: tidemark.Client, connect: Connect, local: LocalBroker
) -> None:
    """K4: the second call returned at once, and the messages came back after their time."""
    await publish(client, QUEUE, b"1", b"2", b"3", b"4", b"5")
    hasty = await connect("hasty", call_timeout_ms=200)
    pulled = await hasty.pull(QUEUE, visibility_ms=600_000)
    one, two, three, *_ = pulled
    calls: list[Callable[[], Awaitable[None]]] = [
        one.ack,
        two.nack,
        lambda: three.ack(wait=True),
        lambda: hasty.settle(pulled),
    ]
    await local.stop_broker()
    for call in calls:
        for _ in range(2):
            with pytest.raises((Unavailable, DeadlineExceeded)):
                await in_time(call())
    await local.start_broker()

    patient = await connect("hasty")
    assert await inflight(patient) == 5
    for call in calls:
        await until_settled(call)

    assert await inflight(patient) == 0


async def until_settled(call: Callable[[], Awaitable[None]]) -> None:
    """The broker that has started may still be connecting to storage."""

    async def settled() -> None:
        while True:
            try:
                return await call()
            except (Unavailable, DeadlineExceeded):
                continue

    await in_time(settled())


async def test_a_cancelled_settlement_is_sent_by_the_next_call(
    client: tidemark.Client, local: LocalBroker
) -> None:
    """K4: of a pulled message, whose call ended with its caller."""
    await publish(client, QUEUE, b"1")
    (delivery,) = await client.pull(QUEUE, visibility_ms=600_000)
    await local.stop_broker()
    settling = asyncio.create_task(delivery.ack())
    await SystemClock().sleep_ms(0)
    settling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await settling
    await local.start_broker()

    await in_time(delivery.ack())

    assert await inflight(client) == 0


async def test_a_failed_settlement_fails_again(client: tidemark.Client, connect: Connect) -> None:
    """K4, V6: a second nack of a message that was lost returned as if it had succeeded."""
    clock = ManualClock()  # this consumer renews nothing
    slow = await connect("slow", clock=clock)
    async with slow.subscribe([QUEUE], visibility_ms=200) as deliveries:
        await publish(client, QUEUE, b"1", b"2")
        one, two = await take(deliveries, 2)
        again: list[bytes] = []
        while len(again) < 2:
            again += (await client.pull(QUEUE, wait_ms=30_000, visibility_ms=600_000)).payloads

        calls: list[Callable[[], Awaitable[None]]] = [one.nack, one.release, two.release, two.ack]
        for call in calls:
            with pytest.raises(ReservationExpired):
                await in_time(call())
            with pytest.raises(ReservationExpired):
                await in_time(call())


async def test_settling_after_the_end_is_refused_each_time(client: tidemark.Client) -> None:
    """K4: the second ack returned as if it had succeeded."""
    await publish(client, QUEUE, b"1")
    async with client.subscribe([QUEUE]) as deliveries:
        (delivery,) = await take(deliveries, 1)
        batch = delivery._batch

    refusals: list[type[TidemarkError]] = []
    for call in (delivery.ack, delivery.ack, delivery.nack, delivery.nack, batch.ack, batch.nack):
        try:
            await in_time(call())
        except TidemarkError as error:
            refusals.append(type(error))
    assert refusals == [ClientClosed] * 6
