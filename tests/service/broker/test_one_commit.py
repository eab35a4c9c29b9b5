"""What is stored or given back is handed out by the same commit to a waiting consumer."""

import asyncio

from tests.support.local_broker import (
    QUEUE,
    LocalBroker,
    commits,
    payloads_of,
    reason_of,
    run_of,
    take,
    waiting_consumer,
)
from tidemark.api.broker.v1.message_pb2 import Nack


async def test_a_waiting_consumer_gets_a_message_by_the_commit_that_stores_it(
    local: LocalBroker,
) -> None:
    session = await local.session()
    consumer = await waiting_consumer(session, QUEUE)
    before = await commits(local)

    await session.publish(QUEUE, [b"1"])

    assert payloads_of(await take(consumer, 1)) == [b"1"]
    assert await commits(local) == before + 1


async def test_every_group_gets_it_by_that_commit(local: LocalBroker) -> None:
    session = await local.session()
    consumers = [session.open_consumer(group, credit=100) for group in ("mail", "audit")]
    for each in consumers:
        await each.subscribe(QUEUE)
    await session.publish(QUEUE, [b"first"])
    for each in consumers:
        await take(each, 1)
    before = await commits(local)

    await session.publish(QUEUE, [b"1"])

    assert [payloads_of(await take(each, 1)) for each in consumers] == [[b"1"], [b"1"]]
    assert await commits(local) == before + 1


async def test_what_leaves_in_one_frame_is_asked_for_once_and_keeps_its_order(
    local: LocalBroker,
) -> None:
    """Asked for behind each of them, it would come in as many pieces."""
    session = await local.session()
    consumer = await waiting_consumer(session, QUEUE, credit=1000)
    payloads = [b"%d" % number for number in range(200)]
    before = await commits(local)

    await asyncio.gather(*(session.submit(run_of(QUEUE, each)) for each in payloads))
    deliveries = await take(consumer, len(payloads))

    assert payloads_of(deliveries) == payloads
    assert all(each.delivery_count == 1 for each in deliveries)
    assert await commits(local) - before < len(payloads) / 4


async def test_a_consumer_without_credit_is_given_nothing_until_it_has_some(
    local: LocalBroker,
) -> None:
    """A run that leaves is a reason to ask, but only for those who may be given something."""
    session = await local.session()
    consumer = await waiting_consumer(session, QUEUE, credit=1)
    other = await waiting_consumer(session, "orders/other")

    await session.publish(QUEUE, [b"1"])
    await session.publish("orders/other", [b"later"])
    await take(other, 1)
    inflight = (await local.queue(QUEUE)).inflight
    consumer.give_credit(1)

    assert inflight == 0
    assert payloads_of(await take(consumer, 1)) == [b"1"]


async def test_what_is_given_back_reaches_a_waiting_consumer_by_that_commit(
    local: LocalBroker,
) -> None:
    """V6."""
    queue, neighbour = local.names_in(0, 2)
    session = await local.session()
    failing = await waiting_consumer(session, queue)
    await session.publish(queue, [b"1"])
    (held,) = await take(failing, 1)
    await failing.unsubscribe(queue)
    waiting = session.open_consumer(credit=1)
    await waiting.subscribe(queue)
    await session.publish(neighbour, [b"once it is stored, all that was asked before is answered"])
    before = await commits(local)

    await session.settle(held.delivery_tag, Nack())

    (again,) = await take(waiting, 1)
    assert (again.delivery_count, again.attempt_count) == (2, 1)
    assert await commits(local) == before + 1


async def test_what_a_lost_client_held_reaches_a_waiting_consumer_by_that_commit(
    local: LocalBroker,
) -> None:
    """V6, V8."""
    queue, neighbour = local.names_in(0, 2)
    lost, staying = await local.session("lost"), await local.session("staying")
    failing = await waiting_consumer(lost, queue)
    await lost.publish(queue, [b"1"])
    await take(failing, 1)
    waiting = staying.open_consumer(credit=1)
    await waiting.subscribe(queue)
    await staying.publish(neighbour, [b"once it is stored, all that was asked before is answered"])
    before = await commits(local)

    await lost.abort()

    (again,) = await take(waiting, 1)
    assert (again.delivery_count, again.attempt_count) == (2, 1)
    assert await commits(local) == before + 1


async def test_a_refused_run_leaves_its_consumer_waiting_as_before(local: LocalBroker) -> None:
    session = await local.session()
    await local.create_topic("small", queue_messages_max=1)
    consumer = await waiting_consumer(session, "small/x")

    (refused,) = [await session.submit(run_of("small/x", b"1", b"2"))]
    await session.publish("small/x", [b"3"])

    assert reason_of(refused) == "QUEUE_FULL"
    assert payloads_of(await take(consumer, 1)) == [b"3"]
