"""Bad input over the wire: a reason each, nothing changed, and the others go on (S3)."""

import asyncio
from typing import Any

import pytest

from tests.service.broker.conftest import StartBroker
from tests.support.local_broker import (
    QUEUE,
    LocalBroker,
    in_time,
    payloads_of,
    reason_of,
    run_of,
    take,
)
from tests.support.session import Session
from tidemark import limits
from tidemark.api.broker.v1 import broker_pb2, subscription_pb2, topic_pb2
from tidemark.api.broker.v1.broker_pb2_grpc import BrokerServiceStub
from tidemark.api.broker.v1.message_pb2 import Ack, Message, MessageBatch, Settlement
from tidemark.errors import (
    BatchTooLarge,
    InvalidArgument,
    InvalidName,
    QuotaExceeded,
    TidemarkError,
)
from tidemark.receipts import Receipt
from tidemark.rpc import from_status

pytestmark = pytest.mark.slow

EXCLUSIVE = topic_pb2.SUBSCRIPTION_KIND_EXCLUSIVE
CONTROL_CHARACTERS = ["\x00", "\n", "\x1b[2J", "\x7f", "\u202e", "\u2028"]


async def told_error(session: Session) -> TidemarkError:
    """The next failure that has no result of its own."""
    await in_time(session.notified.wait_for(lambda: bool(session.errors)))
    return from_status(session.errors.pop(0).error)


async def answers_to(local: LocalBroker, frame: broker_pb2.SessionRequest) -> TidemarkError:
    """How the broker ends a session that sends this frame."""
    call = BrokerServiceStub(await local.channel()).Session()
    await call.write(broker_pb2.SessionRequest(hello=broker_pb2.Hello(client_id="hostile")))
    await call.write(frame)

    async def read() -> None:
        async for _ in call:
            pass

    with pytest.raises(TidemarkError) as ended:
        await in_time(read())
    return ended.value


# --- sizes ----------------------------------------------------------------------------------------


async def test_a_run_is_as_large_as_it_may_be_and_no_larger(local: LocalBroker) -> None:
    session = await local.session()
    batch = MessageBatch(messages=[Message(payload=b"x" * 1_000_000) for _ in range(4)])
    batch.messages.add(payload=b"x" * (limits.RUN_BYTES_MAX - batch.ByteSize() - 8))
    batch.messages[-1].payload += b"x" * (limits.RUN_BYTES_MAX - batch.ByteSize())
    assert batch.ByteSize() == limits.RUN_BYTES_MAX

    await session.publish(QUEUE, batch)
    batch.messages[-1].payload += b"x"
    with pytest.raises(BatchTooLarge):
        await session.publish(QUEUE, batch)

    assert (await local.queue(QUEUE)).messages == 5


async def test_a_frame_has_as_many_runs_as_it_may_and_no_more(local: LocalBroker) -> None:
    session = await local.session()
    run = run_of(QUEUE, b"")

    results = [session.submit(run_of(QUEUE, b"")) for _ in range(limits.FRAME_RUNS_MAX)]
    done = await in_time(asyncio.gather(*results))
    frame = broker_pb2.SessionRequest(runs=[run] * (limits.FRAME_RUNS_MAX + 1))
    ended = await answers_to(local, frame)

    assert not any(map(reason_of, done))
    assert isinstance(ended, InvalidArgument)
    assert ended.metadata == {"field": "runs"}
    assert (await local.queue(QUEUE)).messages == limits.FRAME_RUNS_MAX


async def test_a_frame_has_as_many_settlements_as_it_may_and_no_more(local: LocalBroker) -> None:
    session = await local.session()
    settlement = Settlement(delivery_tag=1, ack=Ack())

    for tag in range(limits.SETTLEMENTS_PER_FRAME_MAX):
        session.settle_nowait(tag + 1, Ack())
    await in_time(
        session.notified.wait_for(
            lambda: len(session.failed_settlements) == limits.SETTLEMENTS_PER_FRAME_MAX
        )
    )
    frame = broker_pb2.SessionRequest(
        settlements=[settlement] * (limits.SETTLEMENTS_PER_FRAME_MAX + 1)
    )
    ended = await answers_to(local, frame)

    assert session.ended is None
    assert isinstance(ended, InvalidArgument)


@pytest.mark.parametrize(
    "part", ["open_consumers", "open_publishers", "destroy_publishers", "syncs", "credits"]
)
async def test_a_frame_has_so_many_parts_of_a_kind_and_no_more(
    local: LocalBroker, part: str
) -> None:
    """A frame of sixteen million bytes would have millions of them, and an answer for each."""
    one = broker_pb2.SessionRequest()
    items = getattr(one, part)
    items.append(4711) if part == "destroy_publishers" else items.add()
    frame = broker_pb2.SessionRequest.FromString(one.SerializeToString() * 10_001)

    ended = await answers_to(local, frame)

    assert isinstance(ended, InvalidArgument)
    assert ended.metadata == {"field": part}


async def test_the_syncs_of_a_frame_name_so_many_subscriptions_and_no_more(
    local: LocalBroker,
) -> None:
    frame = broker_pb2.SessionRequest()
    for _ in range(3):
        frame.syncs.add().entries.extend([subscription_pb2.SubscriptionEntry()] * 7_000)

    ended = await answers_to(local, frame)

    assert isinstance(ended, InvalidArgument)
    assert ended.metadata == {"field": "syncs"}


async def test_a_heartbeat_reports_no_more_than_a_client_can_have(local: LocalBroker) -> None:
    entry = subscription_pb2.SubscriptionEntry(lmq_name=QUEUE)
    entries = [entry] * limits.SUBSCRIPTIONS_PER_SESSION_MAX
    held = broker_pb2.HeldSubscriptions(group="default", entries=entries)
    await local.api.Heartbeat(broker_pb2.HeartbeatRequest(client_id="ada", held=[held]))
    held.entries.append(entry)

    ended = await answers_to(
        local, broker_pb2.SessionRequest(heartbeat=broker_pb2.HeartbeatFrame(held=[held]))
    )
    with pytest.raises(InvalidArgument):
        await local.api.Heartbeat(broker_pb2.HeartbeatRequest(client_id="ada", held=[held]))

    assert isinstance(ended, InvalidArgument)
    assert ended.metadata == {"field": "held"}


async def test_answers_that_a_client_leaves_unread_fit_the_frames_in_which_they_come(
    local: LocalBroker,
) -> None:
    """S3: however many of them gather, and however long their names."""
    call = BrokerServiceStub(await local.channel()).Session()
    await call.write(broker_pb2.SessionRequest(hello=broker_pb2.Hello(client_id="slow")))
    entry = subscription_pb2.SubscriptionEntry(lmq_name="n/" + "x" * limits.LITE_NAME_BYTES_MAX)
    entries = [entry] * limits.SUBSCRIPTIONS_PER_SESSION_MAX
    sync = subscription_pb2.SubscriptionSync(consumer_id=1, entries=entries)
    frames = 8

    for _ in range(frames):
        await call.write(broker_pb2.SessionRequest(syncs=[sync]))
    await call.write(broker_pb2.SessionRequest(open_publishers=[broker_pb2.OpenPublisher()]))
    await in_time(local.publish(run_of(QUEUE, b"behind them")))
    await call.done_writing()

    read = [frame async for frame in call]
    results = [len(each.results) for frame in read for each in frame.synced]
    assert results == [len(entries)] * frames
    assert sum(len(frame.publishers) for frame in read) == 1
    assert max(frame.ByteSize() for frame in read) <= limits.FRAME_BYTES_MAX


async def test_a_settlement_names_as_many_ranges_as_it_may_and_no_more(
    local: LocalBroker,
) -> None:
    session = await local.session()
    messages = 2 * limits.SETTLEMENT_RANGES_MAX + 2
    await session.publish(QUEUE, [b""] * messages)
    consumer = session.open_consumer(credit=messages)
    await consumer.subscribe(QUEUE)
    (delivery,) = await take(consumer, messages)
    ranges = [(2 * each, 2 * each + 1) for each in range(limits.SETTLEMENT_RANGES_MAX + 1)]

    with pytest.raises(InvalidArgument) as refused:
        await session.settle(delivery.delivery_tag, Ack(), ranges)
    settled = await session.settle(delivery.delivery_tag, Ack(), ranges[:-1])

    assert refused.value.metadata == {"field": "ranges"}
    assert settled.messages == limits.SETTLEMENT_RANGES_MAX


async def test_more_credit_than_there_may_be_is_as_much_as_there_may_be(
    local: LocalBroker,
) -> None:
    session = await local.session()
    consumer = session.open_consumer(credit=2**64 - 1)
    await consumer.subscribe(QUEUE)
    for _ in range(3):
        consumer.give_credit(2**64 - 1)

    await session.publish(QUEUE, [b"1"])

    assert payloads_of(await take(consumer, 1)) == [b"1"]
    assert session.errors == []


async def test_a_session_has_as_many_consumers_as_it_may_and_no_more(local: LocalBroker) -> None:
    session = await local.session()
    for _ in range(1000):
        session.open_consumer()
    await session.publish(QUEUE, [b""])
    assert session.errors == []

    session.open_consumer()

    assert isinstance(await told_error(session), QuotaExceeded)


async def test_a_stream_has_ten_thousand_subscriptions_and_not_one_more(
    local: LocalBroker,
) -> None:
    session = await local.session()
    consumer = session.open_consumer(credit=1000)
    names = [f"orders/{number}" for number in range(limits.SUBSCRIPTIONS_PER_SESSION_MAX)]
    for at in range(0, len(names), 2500):
        await in_time(consumer.subscribe(*names[at : at + 2500]))

    with pytest.raises(QuotaExceeded):
        await consumer.subscribe("orders/one-more")
    await consumer.unsubscribe(names[0])
    await consumer.subscribe("orders/one-more")

    await session.publish("orders/one-more", [b"1"])
    await session.publish(names[-1], [b"2"])
    assert sorted(payloads_of(await take(consumer, 2))) == [b"1", b"2"]


# --- names ----------------------------------------------------------------------------------------


def longest(bytes_max: int) -> list[tuple[str, str]]:
    """The longest name, and one byte more, in one and in two bytes a character."""
    return [
        ("x" * bytes_max, "x" * (bytes_max + 1)),
        ("\u00e9" * (bytes_max // 2), "\u00e9" * (bytes_max // 2) + "x"),
    ]


@pytest.mark.parametrize(("fits", "too_long"), longest(limits.LITE_NAME_BYTES_MAX), ids=["1", "2"])
async def test_names_of_lite_queues_have_a_limit(
    local: LocalBroker, fits: str, too_long: str
) -> None:
    session = await local.session()

    await session.publish(f"orders/{fits}", [b"1"])
    with pytest.raises(InvalidName):
        await session.publish(f"orders/{too_long}", [b"1"])


@pytest.mark.parametrize(
    ("fits", "too_long"), longest(limits.FAIRNESS_KEY_BYTES_MAX), ids=["1", "2"]
)
async def test_fairness_keys_have_a_limit(local: LocalBroker, fits: str, too_long: str) -> None:
    session = await local.session()

    await session.publish(QUEUE, [b"1"], fairness_key=fits)
    with pytest.raises(InvalidName):
        await session.publish(QUEUE, [b"1"], fairness_key=too_long)


@pytest.mark.parametrize(("fits", "too_long"), longest(limits.CLIENT_ID_BYTES_MAX), ids=["1", "2"])
async def test_client_ids_have_a_limit(local: LocalBroker, fits: str, too_long: str) -> None:
    await local.session(fits)
    with pytest.raises(InvalidName):
        await local.session(too_long)


@pytest.mark.parametrize(
    ("fits", "too_long"), longest(limits.PRODUCER_ID_BYTES_MAX), ids=["1", "2"]
)
async def test_producer_ids_have_a_limit(local: LocalBroker, fits: str, too_long: str) -> None:
    session = await local.session("ada", producer_id=fits)
    await session.publish(QUEUE, [b"1"], sequence=1)

    with pytest.raises(InvalidName):
        await local.session("ada", producer_id=too_long)


async def test_names_of_topics_and_groups_have_a_limit(local: LocalBroker) -> None:
    await local.create_topic("t" * limits.TOPIC_NAME_BYTES_MAX)
    session = await local.session()
    await session.publish("t" * limits.TOPIC_NAME_BYTES_MAX, [b"1"])
    await local.pull(QUEUE, group="g" * limits.GROUP_NAME_BYTES_MAX)

    with pytest.raises(InvalidName):
        await local.create_topic("t" * (limits.TOPIC_NAME_BYTES_MAX + 1))
    with pytest.raises(InvalidName):
        await local.pull(QUEUE, group="g" * (limits.GROUP_NAME_BYTES_MAX + 1))


@pytest.mark.parametrize("bad", CONTROL_CHARACTERS, ids=ascii)
async def test_names_with_control_characters_are_refused_everywhere(
    local: LocalBroker, bad: str
) -> None:
    session = await local.session()
    consumer = session.open_consumer(credit=1)

    for refused in (
        session.publish(f"orders/{bad}", [b"1"]),
        session.publish(f"{bad}/x", [b"1"]),
        session.publish(QUEUE, [b"1"], fairness_key=f"a{bad}b"),
        session.open_publisher(f"orders/{bad}"),
        consumer.subscribe(f"orders/{bad}"),
        local.session(f"ada{bad}bob"),
        local.session("ada", producer_id=f"a{bad}b"),
        local.create_topic(f"a{bad}b"),
        local.pull(QUEUE, group=f"a{bad}b"),
    ):
        with pytest.raises(InvalidName) as reason:
            await in_time(refused)
        assert bad not in str(reason.value)
    session.open_consumer(f"a{bad}b")

    assert isinstance(await told_error(session), InvalidName)
    listed = await local.topics.ListQueues(topic_pb2.ListQueuesRequest(topic="orders"))
    assert [queue.lmq_name for queue in listed.queues] in ([], [QUEUE])


# --- what belongs to others -----------------------------------------------------------------------


async def test_a_receipt_of_another_reservation_settles_nothing_here(local: LocalBroker) -> None:
    await local.publish(run_of(QUEUE, b"1"))
    (delivery,) = await local.pull(QUEUE)
    true = Receipt.decode(delivery.receipt)
    forged = [
        Receipt(true.partition, true.queue_id, true.reservation_id + 1),
        Receipt(true.partition, true.queue_id + 1, true.reservation_id),
        Receipt(1 - true.partition, true.queue_id, true.reservation_id),
        Receipt(999, true.queue_id, true.reservation_id),
        Receipt(true.partition, 2**64 - 1, 2**64 - 1, 2**64 - 1),
    ]

    reasons = [reason_of(await local.settle(each.encode(), Ack())) for each in forged]

    assert all(reasons), reasons
    assert (await local.queue(QUEUE)).inflight == 1
    assert (await local.settle(delivery.receipt, Ack())).messages == 1


async def test_a_wrong_epoch_confirms_nothing(start: StartBroker) -> None:
    """E7, E8."""
    local = await start(topic={"subscription": EXCLUSIVE})
    owner, thief = await local.session("owner"), await local.session("thief")
    owning = owner.open_consumer(credit=10)
    await owning.subscribe(QUEUE)
    stealing = thief.open_consumer(credit=10)

    for epoch in (0, 1, 2, 2**64 - 1):
        sync = subscription_pb2.SubscriptionSync(
            mode=subscription_pb2.SYNC_MODE_COMPLETE_ADD, consumer_id=stealing.consumer_id
        )
        sync.entries.add(lmq_name=QUEUE, epoch=epoch)
        (result,) = (await in_time(thief.sync(sync))).results
        assert result.state != subscription_pb2.SUBSCRIPTION_STATE_ACTIVE

    await owner.publish(QUEUE, [b"1"])
    assert payloads_of(await take(owning, 1)) == [b"1"]


@pytest.mark.parametrize(
    "frame",
    [
        {"syncs": [{"consumer_id": 4711}]},
        {"syncs": [{"mode": 77, "consumer_id": 1}]},
        {"credits": [{"consumer_id": 4711, "messages": 1}]},
        {"credits": [{"consumer_id": 4711, "close": True}]},
        {"open_consumers": [{"consumer_id": 0}]},
        {"open_consumers": [{"consumer_id": 1}]},
        {"destroy_publishers": [2**64 - 1]},
        {"settlements": [{}]},
        {"settlements": [{"delivery_tag": 1}]},
        {"settlements": [{"ack": {}}]},
        {"runs": [{}]},
        {"open_publishers": [{}]},
    ],
    ids=str,
)
async def test_a_frame_that_makes_no_sense_is_told_why_and_the_session_goes_on(
    local: LocalBroker, frame: dict[str, Any]
) -> None:
    call = BrokerServiceStub(await local.channel()).Session()
    frames = aiter(call)
    hello = broker_pb2.SessionRequest(
        hello=broker_pb2.Hello(client_id="hostile"),
        open_consumers=[broker_pb2.OpenConsumer(consumer_id=1)],
    )
    await call.write(hello)
    await in_time(anext(frames))

    await call.write(broker_pb2.SessionRequest(**frame))

    answer = await in_time(anext(frames))
    told: list[Any] = [*answer.errors, *answer.settled, *answer.published, *answer.publishers]
    assert len(told) == 1
    assert from_status(told[0].error).reason in {
        "INVALID_ARGUMENT",
        "INVALID_NAME",
        "PUBLISHER_NOT_FOUND",
        "UNKNOWN_DELIVERY_TAG",
    }
    await call.write(broker_pb2.SessionRequest(runs=[run_of(QUEUE, b"1")]))
    assert reason_of((await in_time(anext(frames))).published[0]) == ""
    call.cancel()


# --- the others -----------------------------------------------------------------------------------


async def test_the_others_go_on_at_their_speed(local: LocalBroker) -> None:
    """A hostile client costs the others a share of the machine and no more.

    How large a share is counted, not timed: a machine that is busy with other things slows both.
    """
    good, hostile = await local.session("good"), await local.session("hostile")
    attacks = 0

    async def attack() -> None:
        nonlocal attacks
        while True:
            refused = [hostile.submit(run_of("orders/\x00" * 9, b"1")) for _ in range(50)]
            for tag in range(50):
                hostile.settle_nowait(2**63 + tag, Ack())
            hostile.destroy_publisher(4711)
            hostile.give_credit(4711, 1)
            await asyncio.gather(*refused)
            hostile.errors.clear()
            hostile.failed_settlements.clear()
            attacks += 1

    attacking = asyncio.create_task(attack())
    during: list[int] = []
    for _ in range(100):
        before = attacks
        await good.publish(QUEUE, [b"1"])
        during.append(attacks - before)
    assert not attacking.done()
    attacking.cancel()

    assert sorted(during)[50] < 100  # it takes three where a disk is quick
