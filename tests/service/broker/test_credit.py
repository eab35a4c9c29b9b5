"""Credit: how much is delivered, to whom, and how much a slow reader may hold."""

import asyncio

import pytest

from tests.service.broker.conftest import StartGated
from tests.support.local_broker import (
    QUEUE,
    LocalBroker,
    in_time,
    payloads_of,
    run_of,
    take,
    until,
)
from tidemark import limits
from tidemark.api.broker.v1 import broker_pb2, subscription_pb2
from tidemark.api.broker.v1.broker_pb2_grpc import BrokerServiceStub
from tidemark.api.broker.v1.message_pb2 import Ack

pytestmark = pytest.mark.slow


async def test_no_more_is_delivered_than_there_is_credit_for(local: LocalBroker) -> None:
    session = await local.session()
    await session.publish(QUEUE, [b"%d" % number for number in range(10)])
    consumer = session.open_consumer(credit=3)

    await consumer.subscribe(QUEUE)
    first = await take(consumer, 3)
    inflight = (await local.queue(QUEUE)).inflight
    consumer.give_credit(2)
    second = await take(consumer, 2)

    assert payloads_of(first) == [b"0", b"1", b"2"]
    assert inflight == 3
    assert payloads_of(second) == [b"3", b"4"]
    assert (await local.queue(QUEUE)).inflight == 5


async def test_one_credit_serves_many_queues_and_is_never_exceeded(local: LocalBroker) -> None:
    session = await local.session()
    queues = [f"orders/{number}" for number in range(20)]
    for queue in queues:
        await session.publish(queue, [b"1", b"2", b"3"])
    consumer = session.open_consumer(credit=7)

    await consumer.subscribe(*queues)
    held = sum(each.count for each in await take(consumer, 7))
    while held < 60:
        inflight = [(await local.queue(queue)).inflight for queue in queues]
        assert sum(inflight) == held
        consumer.give_credit(7)
        held += sum(each.count for each in await take(consumer, min(7, 60 - held)))

    assert held == 60


async def test_without_credit_nothing_is_reserved(local: LocalBroker) -> None:
    session = await local.session()
    consumer = session.open_consumer()
    await consumer.subscribe(QUEUE)

    await session.publish(QUEUE, [b"1"])

    assert (await local.queue(QUEUE)).inflight == 0
    consumer.give_credit(1)
    assert payloads_of(await take(consumer, 1)) == [b"1"]


async def test_a_consumer_keeps_up_with_a_publisher_that_never_pauses(local: LocalBroker) -> None:
    """No wake-up is lost between "nothing there" and the message that came with it."""
    publisher = await local.session("publisher")
    session = await local.session("consumer")
    consumer = session.open_consumer(credit=10)
    await consumer.subscribe(QUEUE)

    async def publish() -> None:
        for number in range(500):
            await publisher.publish(QUEUE, [b"%d" % number])

    publishing = asyncio.create_task(publish())
    seen: list[bytes] = []
    while len(seen) < 500:
        for delivery in await in_time(consumer.deliveries()):
            seen += payloads_of([delivery])
            session.settle_nowait(delivery.delivery_tag, Ack())
            consumer.give_credit(delivery.count)
    await publishing

    assert seen == [b"%d" % number for number in range(500)]


async def test_a_large_message_behind_a_small_one_is_delivered_too(local: LocalBroker) -> None:
    session = await local.session()
    large = b"x" * limits.MESSAGE_BYTES_MAX
    for payload in (b"small", large, b"small", large):
        await session.publish(QUEUE, [payload])
    consumer = session.open_consumer(credit=10)

    await consumer.subscribe(QUEUE)

    assert payloads_of(await take(consumer, 4)) == [b"small", large, b"small", large]


async def test_a_backlog_larger_than_the_connection_can_take_arrives_whole(
    local: LocalBroker,
) -> None:
    session = await local.session()
    payload = b"x" * 700_000
    for _ in range(20):
        await session.publish(QUEUE, [payload])
    consumer = session.open_consumer(credit=1000)

    await consumer.subscribe(QUEUE)

    assert payloads_of(await take(consumer, 20)) == [payload] * 20


async def test_a_client_that_never_reads_holds_no_more_than_its_connection_can_take(
    local: LocalBroker,
) -> None:
    """S3: also where many queues have a large message each."""
    publisher = await local.session("publisher")
    queues = [f"orders/{number}" for number in range(60)]
    for queue in queues:
        await publisher.publish(queue, [b"x" * 900_000])
    call = BrokerServiceStub(await local.narrow_channel()).Session()
    frame = broker_pb2.SessionRequest(hello=broker_pb2.Hello(client_id="deaf"))
    frame.open_consumers.add(consumer_id=1, credit=1000)
    sync = frame.syncs.add(consumer_id=1, mode=subscription_pb2.SYNC_MODE_PARTIAL_ADD)
    for queue in queues:
        sync.entries.add(lmq_name=queue)

    async def held() -> int:
        return sum([(await local.queue(queue)).inflight for queue in queues])

    async def some_are_held() -> bool:
        return await held() > 0

    await call.write(frame)
    await until(some_are_held)
    for _ in range(200):
        await publisher.publish(QUEUE, [b"as fast as ever"])

    assert await held() < 20


async def test_a_client_that_never_reads_holds_no_great_number_of_tiny_deliveries(
    local: LocalBroker,
) -> None:
    """S3: each costs the broker far more than its body."""
    publisher = await local.session("publisher")
    queue = "orders/" + "x" * 250  # long names fill what gRPC keeps of a stream that is not read
    submitted = [publisher.submit(run_of(queue, b"x")) for _ in range(40_000)]
    await in_time(asyncio.gather(*submitted))
    call = BrokerServiceStub(await local.narrow_channel()).Session()
    frame = broker_pb2.SessionRequest(hello=broker_pb2.Hello(client_id="deaf"))
    frame.open_consumers.add(consumer_id=1, credit=40_000, group="g" * 128)
    sync = frame.syncs.add(consumer_id=1, mode=subscription_pb2.SYNC_MODE_PARTIAL_ADD)
    sync.entries.add(lmq_name=queue)

    async def some_are_held() -> bool:
        return (await local.queue(queue)).inflight > 0

    await call.write(frame)
    await until(some_are_held)
    later = await local.session("later")  # the first may have been silent for too long
    for _ in range(200):
        await later.publish("orders/other", [b"as fast as ever"])

    assert (await local.queue(queue)).inflight <= 30_000


async def test_a_pull_of_very_few_bytes_gets_one_message(local: LocalBroker) -> None:
    await local.publish(run_of(QUEUE, bytes(100_000), bytes(100_000)))

    (delivery,) = await in_time(local.pull(QUEUE, max_bytes=1))

    assert delivery.count == 1


async def test_two_sessions_share_a_queue_and_no_message_goes_to_both(local: LocalBroker) -> None:
    first, second = await local.session("one"), await local.session("two")
    one, two = first.open_consumer(credit=3), second.open_consumer(credit=3)
    await one.subscribe(QUEUE)
    await two.subscribe(QUEUE)

    for number in range(6):
        await first.publish(QUEUE, [b"%d" % number])

    shared = payloads_of(await take(one, 3)) + payloads_of(await take(two, 3))
    assert sorted(shared) == [b"%d" % number for number in range(6)]


async def test_each_group_gets_every_message(local: LocalBroker) -> None:
    session = await local.session()
    mail = session.open_consumer("mail", credit=10)
    audit = session.open_consumer("audit", credit=10)
    await mail.subscribe(QUEUE)
    await audit.subscribe(QUEUE)

    await session.publish(QUEUE, [b"1", b"2"])

    assert payloads_of(await take(mail, 2)) == [b"1", b"2"]
    assert payloads_of(await take(audit, 2)) == [b"1", b"2"]


async def test_credit_that_comes_back_from_a_broken_link_serves_the_other_queues(
    start_gated: StartGated,
) -> None:
    """L1: a partition that is away does not keep the credit that others could use."""
    local, gates = await start_gated(2)
    (away,), (there,) = local.names_in(0, 1), local.names_in(1, 1)
    session = await local.session()
    consumer = session.open_consumer()
    await consumer.subscribe(away)
    await consumer.subscribe(there)
    await session.publish(there, [b"1"])
    gates.links[0].requests.close()
    consumer.give_credit(1)
    await in_time(gates.links[0].requests.until_held())

    await gates.links[0].break_now()

    assert payloads_of(await take(consumer, 1)) == [b"1"]
    gates.links[0].requests.let_go()


async def test_room_that_empty_queues_give_back_serves_the_other_consumers(
    local: LocalBroker,
) -> None:
    """Consumers of a session share its room: one that found none gets what is left of it."""
    session = await local.session()
    wide, narrow = session.open_consumer(), session.open_consumer()
    await wide.subscribe(*(f"orders/{number}" for number in range(300)))
    await narrow.subscribe(QUEUE)
    await session.publish(QUEUE, [b"1"])

    wide.give_credit(1000)
    narrow.give_credit(1)

    assert payloads_of(await take(narrow, 1)) == [b"1"]
