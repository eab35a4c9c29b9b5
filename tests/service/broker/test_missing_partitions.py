"""Some partitions are away, or do not answer: the others go on."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.service.broker.conftest import Gated, StartGated
from tests.support.local_broker import (
    PLAIN,
    in_time,
    payloads_of,
    run_of,
    take,
    until,
    until_share,
)
from tidemark.api.broker.v1 import broker_pb2, topic_pb2
from tidemark.api.broker.v1.message_pb2 import Nack
from tidemark.api.storage.v1.storage_pb2 import (
    GetQueueRequest,
    ListTopicsRequest,
)
from tidemark.clock import ManualClock
from tidemark.errors import (
    Unavailable,
)


@pytest.fixture
async def half_down(start_gated: StartGated) -> AsyncIterator[Gated]:
    """The plain queue spans two partitions, and the link to partition 1 is down."""
    local, gates = await start_gated(2, topic={"partitions": 2})
    session = await local.session("watcher")
    await until_share(session, 0, 1)
    gates.links[1].requests.close()
    await gates.links[1].break_now()
    await until_share(session, 0)
    yield local, gates
    gates.links[1].requests.let_go()


async def test_a_plain_queue_lives_in_the_partitions_that_are_left(half_down: Gated) -> None:
    """L4, I2: opened, published to and consumed, without a share for what is away."""
    local, _ = half_down
    session = await local.session()
    consumer = session.open_consumer(credit=10)

    opened = await in_time(session.open_publisher(PLAIN))
    receipts = [await in_time(session.publish(PLAIN, [b"1"])) for _ in range(4)]
    await in_time(consumer.subscribe(PLAIN))

    assert list(opened.partitions) == [0]
    assert {each.partition for each in receipts} == {0}
    assert len(payloads_of(await take(consumer, 4))) == 4
    await session.publish(PLAIN, [b"pulled"])
    (held,) = await take(consumer, 1)
    consumer.close()  # or it gets what it gives back
    await session.settle(held.delivery_tag, Nack())
    assert payloads_of(await in_time(local.pull(PLAIN, wait_ms=30_000))) == [b"pulled"]
    with pytest.raises(Unavailable):
        await session.publish(PLAIN, [b"1"], partition=1)


async def test_a_pull_is_not_answered_as_empty_without_a_partition_of_its_queue(
    half_down: Gated,
) -> None:
    """C1, S3: the partition may have messages."""
    local, gates = half_down

    with pytest.raises(Unavailable, match="partition 1"):
        await in_time(local.pull(PLAIN))

    gates.links[1].requests.let_go()
    await until_share(await local.session(), 0, 1)
    assert await in_time(local.pull(PLAIN)) == []


async def test_a_partition_that_comes_back_feeds_those_who_subscribed_without_it(
    half_down: Gated,
) -> None:
    """L4, I2."""
    local, gates = half_down
    session = await local.session()
    consumer = session.open_consumer(credit=10)
    await in_time(consumer.subscribe(PLAIN))

    gates.links[1].requests.let_go()
    await until_share(session, 0, 1)
    await session.publish(PLAIN, [b"1"], partition=1)

    (delivery,) = await take(consumer, 1)
    assert delivery.partition == 1
    assert (await local.queue(PLAIN)).activity == topic_pb2.QUEUE_ACTIVITY_MATERIALIZED


async def test_a_lite_queue_of_a_partition_that_is_away_can_not_be_used(half_down: Gated) -> None:
    """L4, I2: its others are not harmed."""
    local, _ = half_down
    session = await local.session()
    ((away,), (there,)) = local.names_in(1, 1), local.names_in(0, 1)

    for call in (
        session.open_publisher(away),
        session.publish(away, [b"1"]),
        session.open_consumer(credit=1).subscribe(away),
        local.pull(away, wait_ms=30_000),
    ):
        with pytest.raises(Unavailable):
            await in_time(call)
    await session.publish(there, [b"1"])


@pytest.fixture
async def half_silent(start_gated: StartGated) -> AsyncIterator[Gated]:
    """The plain queue spans two partitions: 0 has a message of it, and 1 has none."""
    local, gates = await start_gated(2, topic={"partitions": 2})
    await until_share(await local.session("watcher"), 0, 1)
    await local.publish(run_of(PLAIN, b"1", partition=0))
    gates.links[1].requests.close()
    yield local, gates
    gates.links[1].requests.let_go()


async def test_a_partition_that_does_not_answer_holds_up_no_cleanup_of_others(
    start_gated: StartGated, clock: ManualClock
) -> None:
    """I3, I9."""
    local, gates = await start_gated(2, clock=clock, topic={"idle_after_ms": 1000})
    (first, second), (silent,) = local.names_in(0, 2), local.names_in(1, 1)

    async def use_and_leave(*lmq_names: str) -> None:
        session = await local.session()
        for each in lmq_names:
            await session.publish(each, [b"1"])
        await session.abort()

    async def until_unloaded(lmq_name: str) -> None:
        async def is_unloaded() -> bool:
            await clock.advance_ms(100)
            return (await local.queue(lmq_name)).activity == topic_pb2.QUEUE_ACTIVITY_IDLE

        await until(is_unloaded)

    await use_and_leave(first, silent)
    gates.links[1].requests.close()
    try:
        await until_unloaded(first)
        await use_and_leave(second)
        await until_unloaded(second)
    finally:
        gates.links[1].requests.let_go()
    await until_unloaded(silent)


async def test_a_pull_answers_in_time_without_a_partition_that_does_not(
    half_silent: Gated,
) -> None:
    """L4, V6: what was reserved for it must not be lost with its call."""
    local, _ = half_silent
    request = broker_pb2.PullRequest(client_id="ada", lmq_name=PLAIN)

    response = await local.api.Pull(request, timeout=5)

    assert payloads_of(response.deliveries) == [b"1"]


async def test_what_was_reserved_for_a_pull_that_was_given_up_goes_to_the_next(
    half_silent: Gated,
) -> None:
    """V6, V8: no client holds it and no attempt was made, though the client lives on."""
    local, gates = half_silent
    pull = asyncio.create_task(local.pull(PLAIN))
    await in_time(gates.links[1].requests.until_held())

    async def is_reserved() -> bool:
        request = GetQueueRequest(partition=0, lmq_name=PLAIN)
        return (await local.storage.GetQueue(request)).queue.inflight == 1

    await until(is_reserved)
    await local.publish(run_of(local.names_in(0, 1)[0], b"behind it"))
    pull.cancel()
    gates.links[1].requests.let_go()

    (delivery,) = await in_time(local.pull(PLAIN, client_id="bob", wait_ms=9_000))
    assert (delivery.attempt_count, delivery.delivery_count) == (0, 2)


async def test_a_topic_change_reaches_a_partition_that_was_away_once_it_is_back(
    half_down: Gated,
) -> None:
    """S7, C1: created, changed and deleted while a partition is away, without a failed call."""
    local, gates = half_down
    gates.links[1].requests.let_go()
    await local.create_topic("gone")

    async def versions(partition: int) -> dict[str, int]:
        listed = await local.storage.ListTopics(ListTopicsRequest(partition=partition))
        return {each.name: each.version for each in listed.topics}

    async def agree() -> bool:
        return await versions(0) == await versions(1)

    await until(agree)
    gates.links[1].requests.close()
    await gates.links[1].break_now()

    await in_time(local.create_topic("fresh"))
    change = topic_pb2.UpdateTopicRequest(
        name="orders", settings=topic_pb2.TopicSettings(max_attempts=3)
    )
    change.update_mask.paths.append("max_attempts")
    await in_time(local.topics.UpdateTopic(change))
    await in_time(local.topics.DeleteTopic(topic_pb2.DeleteTopicRequest(name="gone")))
    before = await versions(1)
    gates.links[1].requests.let_go()

    await until(agree)
    assert set(before) == {"orders", "gone"}
    assert set(await versions(1)) == {"orders", "fresh"}
