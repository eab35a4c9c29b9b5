"""Expiry: what runs out comes back at once, whatever else goes on (V1, V2, V6)."""

import asyncio
from typing import Any, TypeVar

import pytest

from broker_svc.links.expiry_timer import FINEST_MS
from tests.service.broker.conftest import StartBroker
from tests.support.local_broker import (
    QUEUE,
    LocalBroker,
    in_time,
    payloads_of,
    reason_of,
    run_of,
    take,
    ticking,
)
from tidemark import limits
from tidemark.api.broker.v1.message_pb2 import Ack, Extend
from tidemark.clock import ManualClock
from tidemark.errors import ReservationExpired, TidemarkError

pytestmark = pytest.mark.slow

T = TypeVar("T")

VISIBILITY_MS = 60_000
"""As long as thousands of ticks: nothing runs out twice while a busy disk is waited for."""

PATIENT: dict[str, Any] = {
    "client_timeout_ms": 3_600_000,
    "topic": {"visibility_timeout_ms": VISIBILITY_MS},
}


async def test_messages_of_an_expired_reservation_go_to_a_waiting_consumer(
    start: StartBroker, clock: ManualClock
) -> None:
    """V1, V2: not a moment before its deadline, and without anybody asking for it."""
    local = await start(clock, **PATIENT)
    first, second = await local.session("first"), await local.session("second")
    holder = first.open_consumer(credit=1)
    await holder.subscribe(QUEUE)
    await first.publish(QUEUE, [b"1"])
    (held,) = await take(holder, 1)
    began_ms = clock.monotonic_ms()
    waiter = second.open_consumer(credit=1)
    await waiter.subscribe(QUEUE)

    await clock.advance_ms(VISIBILITY_MS - FINEST_MS)
    inflight = (await local.queue(QUEUE)).inflight
    (again,) = await ticking(clock, take(waiter, 1))
    late_ms = clock.monotonic_ms() - began_ms - VISIBILITY_MS

    assert inflight == 1
    assert payloads_of([again]) == [b"1"]
    assert (held.attempt_count, again.attempt_count) == (0, 1)
    assert again.delivery_count == 2
    assert 0 <= late_ms < VISIBILITY_MS


async def test_the_shortest_visibility_works(local: LocalBroker) -> None:
    """V2: 50 ms."""
    session = await local.session()
    consumer = session.open_consumer(credit=5, visibility_ms=limits.VISIBILITY_TIMEOUT_MS_MIN)
    await consumer.subscribe(QUEUE)
    await session.publish(QUEUE, [b"1"])

    attempts = [delivery.attempt_count for delivery in await take(consumer, 5)]

    assert attempts == [0, 1, 2, 3, 4]


async def test_traffic_without_a_pause_does_not_delay_expiry(
    start: StartBroker, clock: ManualClock
) -> None:
    """V1: publishes, deliveries and settles run in the same partition all the while.

    Time moves with the traffic, however fast that is: a tick for each publish that is answered.
    """
    local = await start(clock)
    held_in, busy = local.names_in(0, 2)
    traffic, session = await local.session("traffic"), await local.session("patient")
    draining = traffic.open_consumer(credit=limits.CREDIT_MAX)
    await draining.subscribe(busy)

    async def publish() -> None:
        while True:
            await asyncio.gather(*(traffic.publish(busy, [b"x"]) for _ in range(20)))

    async def settle() -> None:
        async for deliveries in draining:
            for each in deliveries:
                traffic.settle_nowait(each.delivery_tag, Ack())

    running = [asyncio.create_task(publish()), asyncio.create_task(settle())]
    consumer = session.open_consumer(credit=100, visibility_ms=100)
    await consumer.subscribe(held_in)
    await session.publish(held_in, [b"1"])
    lateness_ms: list[int] = []
    await take(consumer, 1)
    for _ in range(10):
        delivered_ms = clock.monotonic_ms()
        again = asyncio.create_task(take(consumer, 1))
        while not again.done():
            await clock.advance_ms(FINEST_MS)
            await traffic.publish(busy, [b"x"])
        await again
        lateness_ms.append(clock.monotonic_ms() - delivered_ms - 100)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)

    assert sorted(lateness_ms)[len(lateness_ms) // 2] < 500
    assert max(lateness_ms) < 2000


async def test_the_tag_of_an_expired_delivery_is_dropped(
    start: StartBroker, clock: ManualClock
) -> None:
    """V6: settling it fails with a reason, by its tag and by its receipt."""
    local = await start(clock, **PATIENT)
    session = await local.session()
    consumer = session.open_consumer(credit=2)
    await consumer.subscribe(QUEUE)
    await session.publish(QUEUE, [b"1"])
    (expired,) = await take(consumer, 1)

    await clock.advance_ms(VISIBILITY_MS)
    (again,) = await ticking(clock, take(consumer, 1))

    for _ in range(2):
        with pytest.raises(ReservationExpired) as refused:
            await session.settle(expired.delivery_tag, Ack())
        assert refused.value.metadata == {"queue": QUEUE, "offset": "0"}
    with pytest.raises(ReservationExpired):
        await session.settle(expired.receipt, Ack())
    assert (await session.settle(again.delivery_tag, Ack())).messages == 1


async def test_an_acknowledged_delivery_does_not_expire(
    start: StartBroker, clock: ManualClock
) -> None:
    """V6."""
    local = await start(clock, **PATIENT)
    session = await local.session()
    consumer = session.open_consumer(credit=10)
    await consumer.subscribe(QUEUE)
    await session.publish(QUEUE, [b"1"])
    (delivery,) = await take(consumer, 1)
    await session.settle(delivery.delivery_tag, Ack())

    await clock.advance_ms(2 * VISIBILITY_MS)
    await session.publish(QUEUE, [b"2"])

    assert payloads_of(await take(consumer, 1)) == [b"2"]


async def test_an_extension_moves_the_deadline(start: StartBroker, clock: ManualClock) -> None:
    """V6."""
    local = await start(clock, **PATIENT)
    session = await local.session()
    consumer = session.open_consumer(credit=10)
    await consumer.subscribe(QUEUE)
    await session.publish(QUEUE, [b"1"])
    (delivery,) = await take(consumer, 1)
    await session.settle(delivery.delivery_tag, Extend(visibility_ms=4 * VISIBILITY_MS))

    await clock.advance_ms(4 * VISIBILITY_MS - 1000)
    assert (await local.queue(QUEUE)).inflight == 1
    await clock.advance_ms(1000)

    (again,) = await ticking(clock, take(consumer, 1))
    assert again.attempt_count == 1


async def test_what_a_unary_client_lets_run_out_wakes_a_pull(
    start: StartBroker, clock: ManualClock
) -> None:
    """V2."""
    local = await start(clock)
    await local.publish(run_of(QUEUE, b"1"))
    (held,) = await local.pull(QUEUE, visibility_ms=50)

    (again,) = await ticking(clock, local.pull(QUEUE, client_id="bob", wait_ms=60_000))

    assert again.attempt_count == 1
    assert clock.monotonic_ms() < 60_000
    assert reason_of(await local.settle(held.receipt, Ack())) == "RESERVATION_EXPIRED"


async def test_an_expiry_that_fails_is_tried_again(start: StartBroker, clock: ManualClock) -> None:
    """V2: storage is away when the deadline passes."""
    local = await start(clock, **PATIENT)
    session = await local.session()
    consumer = session.open_consumer(credit=10)
    await consumer.subscribe(QUEUE)
    await session.publish(QUEUE, [b"1"])
    await take(consumer, 1)

    await local.stop_storage()
    await clock.advance_ms(VISIBILITY_MS + 1000)
    await local.start_storage()

    (again,) = await ticking(clock, take(consumer, 1))

    assert (payloads_of([again]), again.attempt_count) == ([b"1"], 1)


async def test_many_reservations_that_run_out_together_all_come_back(
    start: StartBroker, clock: ManualClock
) -> None:
    """V1: more than one expiry can take at a time."""
    local = await start(clock, **PATIENT)
    session = await local.session()
    queues = [f"orders/{number}" for number in range(1500)]
    await in_time(asyncio.gather(*(session.publish(queue, [b"1"]) for queue in queues)))
    consumer = session.open_consumer(credit=1500)
    await consumer.subscribe(*queues)
    held = await take(consumer, 1500)
    consumer.give_credit(1500)

    await clock.advance_ms(VISIBILITY_MS)
    again = await ticking(clock, take(consumer, 1500))

    assert {each.attempt_count for each in again} == {1}
    assert {each.lmq_name for each in again} == set(queues)
    with pytest.raises(TidemarkError):
        await session.settle(held[0].delivery_tag, Ack())
