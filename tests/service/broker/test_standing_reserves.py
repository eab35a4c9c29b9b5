"""Consumers that wait in storage: credit, turns, leaving, lost links (E9, S2, V1, V2, V6)."""

import pytest

from tests.service.broker.conftest import Gated, StartBroker
from tests.support.local_broker import (
    QUEUE,
    LocalBroker,
    commits,
    in_time,
    payloads_of,
    reason_of,
    run_of,
    take,
    ticking,
    waiting_consumer,
)
from tidemark.api.broker.v1.message_pb2 import Ack, Nack
from tidemark.clock import ManualClock

OTHER = "orders/other"


async def test_a_delay_that_is_over_costs_one_commit(
    start: StartBroker, clock: ManualClock
) -> None:
    """V1, V2: the commit that makes the message ready delivers it."""
    local = await start(clock, partitions=1, client_timeout_ms=3_600_000)
    session = await local.session()
    consumer = await waiting_consumer(session, QUEUE)
    await session.publish(QUEUE, [b"1"])
    (first,) = await take(consumer, 1)
    await session.settle(first.delivery_tag, Nack(delay_ms=1000))
    before = await commits(local)

    (again,) = await ticking(clock, take(consumer, 1))

    assert (again.delivery_count, again.attempt_count) == (2, 1)
    assert await commits(local) == before + 1


async def test_many_messages_to_a_waiting_consumer_come_in_order_and_once(
    local: LocalBroker,
) -> None:
    """S2: also where a standing reserve is used up and renewed in between."""
    session = await local.session()
    consumer = await waiting_consumer(session, QUEUE, credit=400)
    payloads = [b"%d" % number for number in range(300)]

    for each in payloads:
        await session.publish(QUEUE, [each])
    deliveries = await take(consumer, len(payloads))

    assert payloads_of(deliveries) == payloads
    assert {each.delivery_count for each in deliveries} == {1}


@pytest.mark.parametrize("runs", [[10], [1] * 10], ids=["one-run", "single-messages"])
async def test_credit_that_waits_on_idle_queues_serves_the_queue_that_needs_it(
    local: LocalBroker, runs: list[int]
) -> None:
    """No more than the credit, and not less because other queues are waited for."""
    session = await local.session()
    idle = [f"orders/idle-{number}" for number in range(4)]
    consumer = session.open_consumer(credit=10)
    await consumer.subscribe(QUEUE, *idle)

    for messages in runs:
        await session.publish(QUEUE, [b"x"] * messages)
    held = await take(consumer, 10)
    await session.publish(QUEUE, [b"beyond"])
    for queue in idle:
        await session.publish(queue, [b"beyond"])
    inflight = [(await local.queue(queue)).inflight for queue in (QUEUE, *idle)]
    consumer.give_credit(5)

    assert sum(each.count for each in held) == 10
    assert sum(inflight) == 10
    assert payloads_of(await take(consumer, 5)) == [b"beyond"] * 5


async def test_a_second_consumer_gets_its_turns(local: LocalBroker) -> None:
    """The first has waited in storage until then."""
    session, other = await local.session("first"), await local.session("second")
    first = await waiting_consumer(session, QUEUE)
    second = other.open_consumer(credit=100)
    await second.subscribe(QUEUE)

    for number in range(6):
        await session.publish(QUEUE, [b"%d" % number])
    shares = [len(await take(each, 3)) for each in (first, second)]

    assert shares == [3, 3]


async def test_a_consumer_that_has_left_takes_nothing(local: LocalBroker) -> None:
    """V6: its place in storage ends with it."""
    session = await local.session()
    leaving = await waiting_consumer(session, QUEUE)

    await leaving.unsubscribe(QUEUE)
    await session.publish(QUEUE, [b"1"])
    inflight = (await local.queue(QUEUE)).inflight
    staying = session.open_consumer(credit=100)
    await staying.subscribe(QUEUE)
    (delivery,) = await take(staying, 1)

    assert inflight == 0
    assert payloads_of([delivery]) == [b"1"]


async def test_a_consumer_that_is_stopped_takes_nothing_until_it_goes_on(
    local: LocalBroker,
) -> None:
    session = await local.session()
    consumer = await waiting_consumer(session, QUEUE)
    neighbour = await waiting_consumer(session, OTHER)

    session.stop_consumer(consumer.consumer_id)
    await session.publish(QUEUE, [b"1"])
    await session.publish(OTHER, [b"x"])
    await take(neighbour, 1)
    inflight = (await local.queue(QUEUE)).inflight
    consumer.give_credit(1)

    assert inflight == 0
    assert payloads_of(await take(consumer, 1)) == [b"1"]


async def test_a_link_that_breaks_gives_the_credit_back_and_waits_again(gated: Gated) -> None:
    """V8: what storage had handed out with a lost answer is released, and comes again."""
    local, gates = gated
    link = gates.links[0]
    session = await local.session()
    consumer = session.open_consumer(credit=10)
    await consumer.subscribe(QUEUE, OTHER)
    await session.publish(QUEUE, [b"first"])
    (first,) = await take(consumer, 1)
    await session.settle(first.delivery_tag, Ack())

    for _ in range(3):
        link.answers.close()
        lost = session.submit(run_of(QUEUE, b"lost"))
        await in_time(link.answers.until_held())
        await link.break_now()
        link.answers.let_go()
        assert reason_of(await lost) == "UNAVAILABLE"
        (again,) = await take(consumer, 1)
        assert (payloads_of([again]), again.attempt_count) == ([b"lost"], 0)
    await session.publish(OTHER, [b"%d" % number for number in range(6)])

    assert len(payloads_of(await take(consumer, 6))) == 6


async def test_a_queue_that_is_left_gives_its_credit_to_another(local: LocalBroker) -> None:
    """V6: the operation that leaves the group ends what stands there."""
    session = await local.session()
    consumer = session.open_consumer(credit=2)
    await consumer.subscribe(QUEUE)

    await consumer.unsubscribe(QUEUE)
    await session.publish(QUEUE, [b"stays"])
    await consumer.subscribe(OTHER)
    await session.publish(OTHER, [b"1", b"2"])

    assert payloads_of(await take(consumer, 2)) == [b"1", b"2"]
    assert (await local.queue(QUEUE)).inflight == 0
