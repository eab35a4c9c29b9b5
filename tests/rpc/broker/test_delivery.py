"""Delivery over sessions: credit, tags, settlements, and what happens when a client leaves."""

import asyncio

import pytest

from tests.rpc.broker.conftest import StartBroker
from tests.rpc.broker.local_broker import (
    LocalBroker,
    in_time,
    payloads_of,
    run_of,
    take,
    until,
)
from tidemark import limits
from tidemark.api.broker.v1 import broker_pb2, subscription_pb2, topic_pb2
from tidemark.api.broker.v1.broker_pb2_grpc import BrokerServiceStub
from tidemark.api.broker.v1.message_pb2 import Ack, DeadLetter, Extend, Nack, Release
from tidemark.client.session import Consumer, Session
from tidemark.clock import ManualClock
from tidemark.errors import (
    AlreadySettled,
    InvalidArgument,
    QuotaExceeded,
    TidemarkError,
    Unavailable,
    UnknownDeliveryTag,
)
from tidemark.rpc import from_status

QUEUE = "orders/x"

# --- credit -------------------------------------------------------------------------------------


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
    call = BrokerServiceStub(await local.channel()).Session()
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


# --- subscriptions ------------------------------------------------------------------------------


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
        async with session.told:
            await in_time(session.told.wait_for(lambda: bool(session.errors)))

        error = session.errors.pop()
        assert error.consumer_id == consumer.consumer_id
        assert isinstance(from_status(error.error), InvalidArgument)


async def test_a_queue_deleted_under_its_consumer_comes_back_for_it(local: LocalBroker) -> None:
    session = await local.session()
    consumer = session.open_consumer(credit=10)
    await consumer.subscribe(QUEUE)
    await session.publish(QUEUE, [b"old"])
    await take(consumer, 1)

    await local.topics.DeleteQueue(topic_pb2.DeleteQueueRequest(lmq_name=QUEUE))
    await session.publish(QUEUE, [b"new"])

    assert payloads_of(await take(consumer, 1)) == [b"new"]


async def test_a_group_deleted_under_its_consumer_begins_anew(local: LocalBroker) -> None:
    session = await local.session()
    consumer = session.open_consumer("mail", credit=10)
    await consumer.subscribe(QUEUE)
    await session.publish(QUEUE, [b"old"])
    (old,) = await take(consumer, 1)
    await session.settle(old.delivery_tag, Ack())

    await local.topics.DeleteGroup(topic_pb2.DeleteGroupRequest(lmq_name=QUEUE, group="mail"))
    await session.publish(QUEUE, [b"new"])

    assert payloads_of(await take(consumer, 1)) == [b"new"]


# --- settling -----------------------------------------------------------------------------------


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


async def test_ranges_of_a_delivery_are_settled_in_different_ways(local: LocalBroker) -> None:
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
    with pytest.raises(TidemarkError):
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


async def test_a_settlement_with_hostile_ranges_delays_nobody(local: LocalBroker) -> None:
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
    async with session.told:
        await in_time(session.told.wait_for(lambda: bool(session.failed_settlements)))
    await session.publish("orders/barrier", [b""])

    (failed,) = session.failed_settlements
    assert failed.delivery_tag == 4711
    assert (await local.queue(QUEUE)).messages == 0


async def test_a_nack_brings_the_messages_back_with_one_attempt_more(local: LocalBroker) -> None:
    """V8."""
    session = await local.session()
    consumer = session.open_consumer(credit=10)
    await consumer.subscribe(QUEUE)
    await session.publish(QUEUE, [b"1"])
    (first,) = await take(consumer, 1)

    await session.settle(first.delivery_tag, Nack())
    (second,) = await take(consumer, 1)

    assert (first.attempt_count, first.delivery_count) == (0, 1)
    assert (second.attempt_count, second.delivery_count) == (1, 2)
    assert second.delivery_tag != first.delivery_tag


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


async def test_a_release_does_not_count_as_an_attempt(local: LocalBroker) -> None:
    """V8."""
    session = await local.session()
    consumer = session.open_consumer(credit=10)
    await consumer.subscribe(QUEUE)
    await session.publish(QUEUE, [b"1"])
    (first,) = await take(consumer, 1)

    await session.settle(first.delivery_tag, Release())
    (second,) = await take(consumer, 1)

    assert (second.attempt_count, second.delivery_count) == (0, 2)


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


# --- leaving ------------------------------------------------------------------------------------


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

    await in_time(local.server.stop(5000))
    await local.stop_broker()
    await local.start_broker()

    async def is_back() -> bool:
        return (await local.queue(QUEUE)).inflight == 0

    await until(is_back)
    (again,) = await local.pull(QUEUE)
    assert (again.attempt_count, again.delivery_count) == (0, 2)


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
