"""Deliveries in columns: what waiting consumers get of many queues at once (S2, V6, V8, K1)."""

import asyncio

from broker_svc.api.frames import split_to_fit
from tests.service.broker.conftest import Gated
from tests.support.local_broker import QUEUE, LocalBroker, in_time, payloads_of, run_of, take
from tests.support.session import Consumer, Session
from tidemark.api.broker.v1.broker_pb2 import EndedDelivery, SessionResponse
from tidemark.api.broker.v1.message_pb2 import Ack, Delivery, DeliveryArray, Nack
from tidemark.client.transport.codec import deliveries_in_order, tags_of
from tidemark.limits import FRAME_BYTES_MAX


async def waiting(session: Session, *queues: str) -> Consumer:
    """A consumer whose reserves stand in storage once this returns."""
    consumer = session.open_consumer(credit=10_000, takes_arrays=True)
    await consumer.subscribe(*queues)
    for queue in queues:
        await session.publish(queue, [b"first"])
    for delivery in await take(consumer, len(queues)):
        await session.settle(delivery.delivery_tag, Ack())
    consumer.arrays = 0
    return consumer


async def publish(session: Session, *runs: tuple[str, bytes]) -> None:
    """One frame with a message for each queue."""
    submitted = [session.submit(run_of(queue, payload)) for queue, payload in runs]
    await in_time(asyncio.gather(*submitted))


async def test_deliveries_in_columns_are_those_that_come_one_by_one(local: LocalBroker) -> None:
    """S2: only a consumer that takes arrays gets them so."""
    session, other = await local.session("many"), await local.session("single")
    queues = [*local.names_in(0, 3), *local.names_in(1, 3)]
    in_columns = await waiting(session, *queues)
    alone = other.open_consumer("other", credit=10_000)
    await alone.subscribe(*queues)

    await publish(session, *((queue, queue.encode()) for queue in queues))
    many, single = await take(in_columns, len(queues)), await take(alone, len(queues))

    assert in_columns.arrays > 0
    assert alone.arrays == 0
    assert sorted(payloads_of(many)) == sorted(queue.encode() for queue in queues)
    for delivery in (*many, *single):
        delivery.ClearField("consumer_id")
        delivery.ClearField("delivery_tag")
        delivery.ClearField("receipt")
        delivery.group = ""

    def by_name(each: Delivery) -> str:
        return each.lmq_name

    assert sorted(many, key=by_name) == sorted(single, key=by_name)


async def test_deliveries_in_columns_are_settled_by_tag_and_by_receipt(local: LocalBroker) -> None:
    """V6: and what the client holds when it is gone is delivered again."""
    session = await local.session()
    queues = local.names_in(0, 3)
    consumer = await waiting(session, *queues)
    await publish(session, *((queue, b"1") for queue in queues))
    by_tag, by_receipt, held = await take(consumer, len(queues))

    await session.settle(by_tag.delivery_tag, Ack())
    await session.settle(by_receipt.receipt, Nack(delay_ms=60_000))
    await session.abort()
    (again,) = await local.pull(held.lmq_name, wait_ms=60_000)

    assert (again.attempt_count, again.delivery_count) == (1, 2)
    assert (await local.queue(by_tag.lmq_name)).messages == 0
    assert (await local.queue(by_receipt.lmq_name)).messages == 1


async def test_what_failed_before_comes_alone_and_in_the_order_of_the_tags(
    local: LocalBroker,
) -> None:
    """K1: hand-outs are reported in that order."""
    session = await local.session()
    queues = local.names_in(0, 4)
    consumer = await waiting(session, *queues)
    await publish(session, *((queue, b"1") for queue in queues))
    held = await take(consumer, len(queues))
    failed = held[0]

    failing = session.settle(failed.delivery_tag, Nack())
    await in_time(asyncio.gather(failing, publish(session, *((each, b"2") for each in queues[1:]))))
    later = await take(consumer, len(queues))

    assert {each.lmq_name: each.attempt_count for each in later}[failed.lmq_name] == 1
    tags = [each.delivery_tag for each in (*held, *later)]
    assert tags == sorted(tags)


async def test_hand_outs_for_a_consumer_that_has_left_go_back_untried(gated: Gated) -> None:
    """V8: they were on the way when it left."""
    local, gates = gated
    link = gates.links[0]
    session, other = await local.session("ada"), await local.session("bob")
    consumer = await waiting(session, QUEUE, "orders/y")
    link.answers.close()
    publishing = asyncio.create_task(publish(other, (QUEUE, b"1"), ("orders/y", b"1")))
    await in_time(link.answers.until_held())

    await in_time(consumer.unsubscribe(QUEUE))
    link.answers.let_go()
    await in_time(publishing)
    staying = other.open_consumer(credit=10)
    await staying.subscribe(QUEUE)
    (delivery,) = await take(staying, 1)

    assert (payloads_of([delivery]), delivery.attempt_count) == ([b"1"], 0)


def test_a_frame_that_is_split_sends_deliveries_by_their_tags_and_before_their_end() -> None:
    """K1: the client hands out nothing that has ended."""
    frame = SessionResponse()
    large = bytes(FRAME_BYTES_MAX // 3)
    for tag in (1, 4):
        delivery = frame.deliveries.add(delivery_tag=tag)
        delivery.batch.messages.add(payload=large)
    for first in (2, 5):
        array = DeliveryArray(delivery_tags=[first, first + 1], bodies=[large])
        frame.delivery_arrays.append(array)
    frame.ended.append(EndedDelivery(delivery_tag=6))

    pieces = list(split_to_fit(frame, frame.ByteSize()))

    tags = [tags_of(each)[0] for piece in pieces for each in deliveries_in_order(piece)]
    assert tags == [1, 2, 4, 5]
    assert [bool(piece.ended) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
