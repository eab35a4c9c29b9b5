"""What a client holds: given back when it leaves or its broker stops, and loaded until then."""

import asyncio

import pytest

from tests.service.broker.conftest import StartBroker
from tests.support.local_broker import (
    QUEUE,
    LocalBroker,
    in_time,
    payloads_of,
    run_of,
    take,
    until,
)
from tidemark.api.broker.v1 import broker_pb2, topic_pb2
from tidemark.api.broker.v1.message_pb2 import Ack
from tidemark.clock import ManualClock
from tidemark.errors import TidemarkError
from tidemark.rpc import from_status


async def test_a_disconnect_gives_everything_back_at_once_as_a_failed_attempt(
    local: LocalBroker,
) -> None:
    """V6, V8."""
    leaving, staying = await local.session("leaving"), await local.session("staying")
    first = leaving.open_consumer(credit=10)
    queues = [*local.names_in(0, 2), *local.names_in(1, 2)]
    await first.subscribe(*queues)
    for queue in queues:
        await staying.publish(queue, [b"1"])
    await take(first, 4)
    second = staying.open_consumer(credit=10)
    await second.subscribe(*queues)

    await leaving.abort()

    returned = await take(second, 4)
    assert {(each.attempt_count, each.delivery_count) for each in returned} == {(1, 2)}
    assert sorted(each.lmq_name for each in returned) == sorted(queues)


async def test_what_a_client_has_acknowledged_does_not_come_back_when_it_leaves(
    local: LocalBroker,
) -> None:
    """V6."""
    leaving, staying = await local.session("leaving"), await local.session("staying")
    first = leaving.open_consumer(credit=10)
    await first.subscribe(QUEUE)
    await staying.publish(QUEUE, [b"1", b"2", b"3"])
    (delivery,) = await take(first, 3)
    await leaving.settle(delivery.delivery_tag, Ack(), [(0, 2)])
    second = staying.open_consumer(credit=10)
    await second.subscribe(QUEUE)

    await leaving.abort()

    assert payloads_of(await take(second, 1)) == [b"3"]


async def test_a_stop_of_the_broker_is_no_failed_attempt(local: LocalBroker) -> None:
    """V8."""
    session = await local.session()
    consumer = session.open_consumer(credit=10)
    await consumer.subscribe(QUEUE)
    await session.publish(QUEUE, [b"1"], fairness_key="gold")
    await take(consumer, 1)

    await in_time(local.server.stop(60_000))
    await local.stop_broker()
    await local.start_broker()

    async def is_back() -> bool:
        return (await local.queue(QUEUE)).inflight == 0

    await until(is_back)
    (again,) = await local.pull(QUEUE)
    assert (again.attempt_count, again.delivery_count) == (0, 2)


async def test_a_broker_that_stops_hands_nothing_out_to_consumers_opened_meanwhile(
    start: StartBroker, clock: ManualClock
) -> None:
    """S5: it would be handled here and handed out again elsewhere."""
    local = await start(clock)
    session = await local.session()
    consumer = session.open_consumer(credit=1)
    await consumer.subscribe(QUEUE)
    await session.publish(QUEUE, [b"1", b"2"])
    (held,) = await take(consumer, 1)
    stopping = asyncio.create_task(local.server.stop(5000))
    await in_time(session.notified.wait_for(lambda: bool(session.go_aways)))

    late = session.open_consumer(credit=1)
    with pytest.raises(TidemarkError):
        await in_time(late.subscribe(QUEUE))

    assert from_status(session.errors[0].error).reason == "SHUTTING_DOWN"
    assert (await in_time(session.settle(held.delivery_tag, Ack()))).messages == 1
    await in_time(session.until_ended())
    await in_time(stopping)


async def test_a_queue_that_is_held_is_not_unloaded(start: StartBroker, clock: ManualClock) -> None:
    """I4."""
    local = await start(clock, topic={"idle_after_ms": 1000, "visibility_timeout_ms": 3_600_000})
    session = await local.session()
    consumer = session.open_consumer(credit=1)
    await consumer.subscribe(QUEUE)
    await local.publish(run_of(QUEUE, b"1"))
    await take(consumer, 1)
    await consumer.unsubscribe(QUEUE)
    result = (await local.publish(run_of(QUEUE, b"2")))[0]
    await local.api.DestroyPublisher(destroy_request(result.receipt.publisher_id))
    await clock.advance_ms(1500)

    request = topic_pb2.TryEvictInactiveQueueRequest(lmq_name=QUEUE)
    outcome = (await local.topics.TryEvictInactiveQueue(request)).outcome

    assert outcome == topic_pb2.EVICTION_OUTCOME_HAS_DELIVERIES


def destroy_request(publisher_id: int) -> broker_pb2.DestroyPublisherRequest:
    return broker_pb2.DestroyPublisherRequest(publisher_id=publisher_id)
