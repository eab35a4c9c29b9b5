"""Settling over sessions: tags, receipts, ranges and answers (V6, V8).

What an ending does to messages is in the tests of storage.
"""

import asyncio

import pytest

from tests.service.broker.conftest import StartBroker
from tests.support.local_broker import QUEUE, LocalBroker, in_time, payloads_of, take
from tidemark.api.broker.v1.message_pb2 import Ack, DeadLetter, Extend, Nack, Release
from tidemark.clock import ManualClock
from tidemark.errors import AlreadySettled, InvalidArgument, UnknownDeliveryTag


async def test_an_ack_ends_the_delivery(local: LocalBroker) -> None:
    """V6."""
    session = await local.session()
    consumer = session.open_consumer(credit=10)
    await consumer.subscribe(QUEUE)
    await session.publish(QUEUE, [b"1", b"2"])
    (delivery,) = await take(consumer, 2)

    settled = await session.settle(delivery.delivery_tag, Ack())

    assert settled.messages == 2
    queue = await local.queue(QUEUE)
    assert (queue.messages, queue.inflight) == (0, 0)


async def test_deliveries_of_different_partitions_are_settled_each_by_its_own_tag(
    local: LocalBroker,
) -> None:
    session = await local.session()
    queues = [*local.names_in(0, 3), *local.names_in(1, 3)]
    consumer = session.open_consumer(credit=100)
    await consumer.subscribe(*queues)
    for queue in queues:
        await session.publish(queue, [b"1"])
    deliveries = await take(consumer, len(queues))

    settled = [await session.settle(each.delivery_tag, Ack()) for each in deliveries]

    assert [each.messages for each in settled] == [1] * len(queues)
    for queue in queues:
        assert (await local.queue(queue)).inflight == 0


@pytest.mark.also_on_redis
async def test_ranges_of_a_delivery_are_settled_in_different_ways(local: LocalBroker) -> None:
    """V6: a different settlement of the whole is refused afterwards."""
    session = await local.session()
    consumer = session.open_consumer(credit=10)
    await consumer.subscribe(QUEUE)
    await session.publish(QUEUE, [b"%d" % number for number in range(5)])
    (delivery,) = await take(consumer, 5)
    tag = delivery.delivery_tag

    acked = await session.settle(tag, Ack(), [(0, 1), (3, 4)])
    nacked = await session.settle(tag, Nack(), [(1, 2)])
    (second,) = await take(consumer, 1)
    rest = await session.settle(tag, Ack())

    assert [each.messages for each in (acked, nacked, rest)] == [2, 1, 2]
    assert payloads_of([second]) == [b"1"]
    assert (second.attempt_count, second.delivery_count) == (1, 2)
    with pytest.raises(UnknownDeliveryTag):
        await session.settle(tag, Nack())


async def test_ranges_outside_of_the_delivery_change_nothing(local: LocalBroker) -> None:
    """S3."""
    session = await local.session()
    consumer = session.open_consumer(credit=10)
    await consumer.subscribe(QUEUE)
    await session.publish(QUEUE, [b"1", b"2"])
    (delivery,) = await take(consumer, 2)

    for ranges in ([(0, 3)], [(1, 1)], [(2, 1)], [(0, 2), (1, 2)]):
        with pytest.raises(InvalidArgument):
            await session.settle(delivery.delivery_tag, Ack(), ranges)

    assert (await session.settle(delivery.delivery_tag, Ack())).messages == 2


async def test_a_settlement_with_hostile_ranges_delays_no_other(local: LocalBroker) -> None:
    """S3: a delivery has at most as many ranges as a run has messages."""
    session, other = await local.session("hostile"), await local.session("other")
    consumer = session.open_consumer(credit=10)
    await consumer.subscribe(QUEUE)
    await session.publish(QUEUE, [b"1"])
    (delivery,) = await take(consumer, 1)

    refused = session.settle(delivery.delivery_tag, Ack(), [(0, 1)] * 1_000_000)
    hostile = asyncio.create_task(refused)
    await in_time(other.publish("orders/other", [b"1"]))

    with pytest.raises(InvalidArgument):
        await in_time(hostile)


async def test_a_receipt_settles_from_any_connection(local: LocalBroker) -> None:
    """V6: and the tag of the delivery is good no longer."""
    first, second = await local.session("one"), await local.session("two")
    consumer = first.open_consumer(credit=10)
    await consumer.subscribe(QUEUE)
    await first.publish(QUEUE, [b"1"])
    (delivery,) = await take(consumer, 1)

    settled = await second.settle(delivery.receipt, Ack())

    assert settled.messages == 1
    with pytest.raises(UnknownDeliveryTag):
        await first.settle(delivery.delivery_tag, Ack())


async def test_the_same_settle_of_a_receipt_again_is_a_success_and_another_is_refused(
    local: LocalBroker,
) -> None:
    """V6."""
    session = await local.session()
    consumer = session.open_consumer(credit=10)
    await consumer.subscribe(QUEUE)
    await session.publish(QUEUE, [b"1"])
    (delivery,) = await take(consumer, 1)
    await session.settle(delivery.receipt, Ack())

    await session.settle(delivery.receipt, Ack())
    with pytest.raises(AlreadySettled):
        await session.settle(delivery.receipt, Nack())


async def test_a_settle_that_is_pipelined_twice_ends_once(local: LocalBroker) -> None:
    """V6."""
    session = await local.session()
    consumer = session.open_consumer(credit=10)
    await consumer.subscribe(QUEUE)
    await session.publish(QUEUE, [b"1"])
    (delivery,) = await take(consumer, 1)
    tag = delivery.delivery_tag

    await asyncio.gather(session.settle(tag, Ack()), session.settle(tag, Ack()))

    with pytest.raises(UnknownDeliveryTag):
        await session.settle(tag, Ack())


async def test_unknown_and_foreign_tags_are_refused(local: LocalBroker) -> None:
    """S3."""
    owner, thief = await local.session("owner"), await local.session("thief")
    consumer = owner.open_consumer(credit=10)
    await consumer.subscribe(QUEUE)
    await owner.publish(QUEUE, [b"1"])
    (delivery,) = await take(consumer, 1)

    with pytest.raises(UnknownDeliveryTag) as refused:
        await thief.settle(delivery.delivery_tag, Ack())
    with pytest.raises(UnknownDeliveryTag):
        await owner.settle(delivery.delivery_tag + 1, Ack())
    with pytest.raises(InvalidArgument):
        await owner.settle(b"not a receipt", Ack())

    assert refused.value.metadata == {"delivery_tag": str(delivery.delivery_tag)}
    assert (await owner.settle(delivery.delivery_tag, Ack())).messages == 1


async def test_only_a_failure_of_a_settlement_without_a_number_is_told(local: LocalBroker) -> None:
    session = await local.session()
    consumer = session.open_consumer(credit=10)
    await consumer.subscribe(QUEUE)
    await session.publish(QUEUE, [b"1"])
    (delivery,) = await take(consumer, 1)

    session.settle_nowait(delivery.delivery_tag, Ack())
    session.settle_nowait(4711, Ack())
    await in_time(session.notified.wait_for(lambda: bool(session.failed_settlements)))
    await session.publish("orders/barrier", [b""])

    (failed,) = session.failed_settlements
    assert failed.delivery_tag == 4711
    assert (await local.queue(QUEUE)).messages == 0


@pytest.mark.parametrize(("ending", "attempts"), [(Nack(), 1), (Release(), 0)])
async def test_what_is_given_back_is_delivered_again_under_a_new_tag(
    local: LocalBroker, ending: Nack | Release, attempts: int
) -> None:
    """V8."""
    session = await local.session()
    consumer = session.open_consumer(credit=10)
    await consumer.subscribe(QUEUE)
    await session.publish(QUEUE, [b"1"])
    (first,) = await take(consumer, 1)

    await session.settle(first.delivery_tag, ending)
    (second,) = await take(consumer, 1)

    assert (first.attempt_count, first.delivery_count) == (0, 1)
    assert (second.attempt_count, second.delivery_count) == (attempts, 2)
    assert second.delivery_tag != first.delivery_tag


@pytest.mark.also_on_redis
async def test_a_nack_with_a_delay_comes_back_after_it_and_not_before(
    start: StartBroker, clock: ManualClock
) -> None:
    """V8."""
    local = await start(clock)
    session = await local.session()
    consumer = session.open_consumer(credit=10)
    await consumer.subscribe(QUEUE)
    await session.publish(QUEUE, [b"delayed"])
    (first,) = await take(consumer, 1)

    await session.settle(first.delivery_tag, Nack(delay_ms=5000))
    await clock.advance_ms(4900)
    await session.publish(QUEUE, [b"meanwhile"])
    (between,) = await take(consumer, 1)
    await clock.advance_ms(200)
    (second,) = await take(consumer, 1)

    assert payloads_of([between, second]) == [b"meanwhile", b"delayed"]
    assert second.attempt_count == 1


async def test_a_dead_letter_leaves_the_queue(local: LocalBroker) -> None:
    session = await local.session()
    consumer = session.open_consumer(credit=10)
    await consumer.subscribe(QUEUE)
    await session.publish(QUEUE, [b"1"])
    (delivery,) = await take(consumer, 1)

    with pytest.raises(InvalidArgument):
        await session.settle(delivery.delivery_tag, DeadLetter(reason="x" * 1025))
    settled = await session.settle(delivery.delivery_tag, DeadLetter(reason="no such customer"))

    assert settled.messages == 1
    assert (await local.queue(QUEUE)).messages == 0


async def test_an_extension_answers_with_the_time_that_is_left(local: LocalBroker) -> None:
    """V6."""
    session = await local.session()
    consumer = session.open_consumer(credit=10)
    await consumer.subscribe(QUEUE)
    await session.publish(QUEUE, [b"1"])
    (delivery,) = await take(consumer, 1)

    extended = await session.settle(delivery.delivery_tag, Extend(visibility_ms=60_000))
    with pytest.raises(InvalidArgument):
        await session.settle(delivery.delivery_tag, Extend(visibility_ms=2**63))

    assert extended.visibility_ms == 60_000
    assert (await session.settle(delivery.delivery_tag, Ack())).messages == 1
