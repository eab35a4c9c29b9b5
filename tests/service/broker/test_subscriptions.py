"""Subscriptions of a consumer: begun, changed, ended, and refused one by one."""

import asyncio

import pytest

from tests.service.broker.conftest import Gated
from tests.support.local_broker import QUEUE, LocalBroker, in_time, payloads_of, run_of, take
from tests.support.session import Consumer, Session
from tidemark import limits
from tidemark.api.broker.v1 import broker_pb2, subscription_pb2, topic_pb2
from tidemark.api.broker.v1.message_pb2 import Ack, Release
from tidemark.clock import ManualClock
from tidemark.errors import InvalidArgument, QuotaExceeded, Unavailable
from tidemark.rpc import from_status


async def test_an_unsubscribed_queue_delivers_no_more_and_what_is_held_can_be_settled(
    local: LocalBroker,
) -> None:
    session = await local.session()
    consumer = session.open_consumer(credit=10)
    await consumer.subscribe(QUEUE, "orders/other")
    await session.publish(QUEUE, [b"held"])
    (held,) = await take(consumer, 1)

    await consumer.unsubscribe(QUEUE)
    await session.publish(QUEUE, [b"not for us"])
    await session.publish("orders/other", [b"for us"])

    assert payloads_of(await take(consumer, 1)) == [b"for us"]
    assert (await session.settle(held.delivery_tag, Ack())).messages == 1
    assert (await local.queue(QUEUE)).inflight == 0


async def test_syncs_take_effect_in_the_order_in_which_they_were_sent(local: LocalBroker) -> None:
    session = await local.session()
    consumer = session.open_consumer(credit=10)

    await asyncio.gather(consumer.subscribe(QUEUE, "orders/other"), consumer.unsubscribe(QUEUE))
    await session.publish(QUEUE, [b"not for us"])
    await session.publish("orders/other", [b"for us"])

    assert payloads_of(await take(consumer, 1)) == [b"for us"]
    assert (await local.queue(QUEUE)).inflight == 0


@pytest.mark.parametrize(
    ("start_at", "expected"),
    [
        (subscription_pb2.StartPosition(earliest=True), [b"1", b"2", b"3", b"new"]),
        (subscription_pb2.StartPosition(latest=True), [b"new"]),
        (subscription_pb2.StartPosition(last=2), [b"2", b"3", b"new"]),
        (subscription_pb2.StartPosition(offset=1), [b"2", b"3", b"new"]),
    ],
    ids=["earliest", "latest", "last", "offset"],
)
async def test_a_subscription_says_where_its_group_starts(
    local: LocalBroker, start_at: subscription_pb2.StartPosition, expected: list[bytes]
) -> None:
    session = await local.session()
    await session.publish(QUEUE, [b"1", b"2", b"3"])
    consumer = session.open_consumer(credit=10)

    await consumer.subscribe(QUEUE, start=start_at)
    await session.publish(QUEUE, [b"new"])

    assert payloads_of(await take(consumer, len(expected))) == expected


async def test_a_closed_consumer_gets_nothing_and_gives_its_subscriptions_back(
    local: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3."""
    monkeypatch.setattr(limits, "SUBSCRIPTIONS_PER_SESSION_MAX", 2)
    session = await local.session()
    first = session.open_consumer(credit=10)
    await first.subscribe("orders/1", "orders/2")
    with pytest.raises(QuotaExceeded):
        await first.subscribe("orders/3")

    first.close()
    second = session.open_consumer(credit=10)
    await second.subscribe("orders/3", "orders/4")

    await session.publish("orders/3", [b"3"])
    assert payloads_of(await take(second, 1)) == [b"3"]


async def release_all(session: Session, consumer: Consumer) -> None:
    async for deliveries in consumer:
        for each in deliveries:
            session.settle_nowait(each.delivery_tag, Release())


async def test_what_is_on_its_way_to_a_consumer_that_closes_goes_back(
    local: LocalBroker, clock: ManualClock
) -> None:
    """V8: whether it had arrived by then or not, nothing waits for its visibility timeout."""
    publisher, session = await local.session("publisher"), await local.session()
    for turns in range(0, 60, 3):
        closing = session.open_consumer(credit=10)
        await closing.subscribe(QUEUE)
        publishing = publisher.submit(run_of(QUEUE, b"%d" % turns))
        for _ in range(turns):
            await clock.sleep_ms(0)
        closing.close()
        await publishing
        with pytest.raises(Unavailable):
            await in_time(release_all(session, closing))

    last = session.open_consumer(credit=1000)
    await last.subscribe(QUEUE)

    taken = await take(last, 20)
    assert {each.attempt_count for each in taken} == {0}
    assert sorted(map(int, payloads_of(taken))) == list(range(0, 60, 3))


async def test_a_consumer_that_closes_while_it_subscribes_leaves_nothing_behind(
    gated: Gated,
) -> None:
    """I2: no lease, and no subscription in the way of the session's next consumer."""
    local, gates = gated
    session = await local.session()
    closing, next_one = session.open_consumer(credit=1), session.open_consumer(credit=1)
    gates.links[0].requests.close()
    subscribing = asyncio.create_task(closing.subscribe(QUEUE))
    await in_time(gates.links[0].requests.until_held())

    closing.close()
    for _ in range(20):  # round trips, in which the broker learns that it is closed
        await local.api.Heartbeat(broker_pb2.HeartbeatRequest(client_id="ada"))
    gates.links[0].requests.let_go()
    await asyncio.gather(subscribing, return_exceptions=True)
    await in_time(next_one.subscribe(QUEUE))
    await session.publish(QUEUE, [b"1"])

    assert payloads_of(await take(next_one, 1)) == [b"1"]


async def test_bad_subscriptions_are_refused_one_by_one(local: LocalBroker) -> None:
    """S3."""
    session = await local.session()
    consumer = session.open_consumer(credit=10)
    sync = subscription_pb2.SubscriptionSync(
        mode=subscription_pb2.SYNC_MODE_PARTIAL_ADD, consumer_id=consumer.consumer_id
    )
    for lmq_name in (QUEUE, "orders/\x00", "nowhere/x"):
        sync.entries.add(lmq_name=lmq_name)

    results = (await session.sync(sync)).results

    reasons = [from_status(each.error).reason if each.HasField("error") else "" for each in results]
    assert reasons == ["", "INVALID_NAME", "TOPIC_NOT_FOUND"]


async def test_many_queues_are_subscribed_by_one_sync(local: LocalBroker) -> None:
    session = await local.session()
    consumer = session.open_consumer(credit=100)

    await in_time(consumer.subscribe(*(f"orders/{number}" for number in range(3000))))

    await session.publish("orders/2999", [b"last"])
    assert payloads_of(await take(consumer, 1)) == [b"last"]


async def test_a_consumer_with_a_wrong_visibility_is_refused(local: LocalBroker) -> None:
    """S3."""
    session = await local.session()
    for visibility_ms in (
        limits.VISIBILITY_TIMEOUT_MS_MIN - 1,
        limits.VISIBILITY_TIMEOUT_MS_MAX + 1,
    ):
        consumer = session.open_consumer(credit=1, visibility_ms=visibility_ms)
        await in_time(session.notified.wait_for(lambda: bool(session.errors)))

        error = session.errors.pop()
        assert error.consumer_id == consumer.consumer_id
        assert isinstance(from_status(error.error), InvalidArgument)


async def test_a_group_that_is_one_too_many_is_told_so(
    local: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3: no consumer waits for messages that never come."""
    monkeypatch.setattr("storage_svc.operations.groups.GROUPS_PER_QUEUE_MAX", 1)
    session = await local.session()
    await session.publish(QUEUE, [b"x"])
    first = session.open_consumer(credit=1, group="first")
    await first.subscribe(QUEUE)
    await take(first, 1)

    second = session.open_consumer(credit=1, group="second")
    await second.subscribe(QUEUE)

    await in_time(session.notified.wait_for(lambda: bool(session.errors)))
    (error,) = session.errors
    assert error.consumer_id == second.consumer_id
    assert isinstance(from_status(error.error), QuotaExceeded)
    with pytest.raises(QuotaExceeded):
        await in_time(local.pull(QUEUE, group="second", wait_ms=limits.PULL_WAIT_MS_MAX))


async def test_a_queue_deleted_under_its_consumer_comes_back_for_it(local: LocalBroker) -> None:
    session = await local.session()
    consumer = session.open_consumer(credit=10)
    await consumer.subscribe(QUEUE)
    await session.publish(QUEUE, [b"old"])
    await take(consumer, 1)

    await local.topics.DeleteQueue(topic_pb2.DeleteQueueRequest(lmq_name=QUEUE))
    await session.publish(QUEUE, [b"new"])

    assert payloads_of(await take(consumer, 1)) == [b"new"]


async def test_a_group_deleted_under_its_consumer_starts_over(local: LocalBroker) -> None:
    session = await local.session()
    consumer = session.open_consumer("mail", credit=10)
    await consumer.subscribe(QUEUE)
    await session.publish(QUEUE, [b"old"])
    (old,) = await take(consumer, 1)
    await session.settle(old.delivery_tag, Ack())

    await local.topics.DeleteGroup(topic_pb2.DeleteGroupRequest(lmq_name=QUEUE, group="mail"))
    await session.publish(QUEUE, [b"new"])

    assert payloads_of(await take(consumer, 1)) == [b"new"]
