"""Dead letters of queues with several groups: one for each that had not settled (L5, L6)."""

import pytest

from tests.service.lifecycle.conftest import StartSwept
from tests.support.local_broker import TOPIC, payloads_of, run_of
from tests.support.swept_broker import SweptBroker
from tidemark.api.broker.v1.message_pb2 import Ack, DeadLetter, Delivery, Nack
from tidemark.api.broker.v1.topic_pb2 import (
    DeleteGroupRequest,
    GetQueueRequest,
    Group,
    PeekQueueRequest,
    RedriveDeadLettersRequest,
)
from tidemark.clock import ManualClock
from tidemark.errors import QueueNotFound

pytestmark = pytest.mark.slow

DEAD = "orders-dead"
QUEUE = f"{TOPIC}/ada"
TTL_MS = 10_000


@pytest.fixture
async def swept(start: StartSwept) -> SweptBroker:
    started = await start()
    await started.create_topic(DEAD)
    await started.create_topic(TOPIC, dead_letter_topic=DEAD)
    return started


async def stories(swept: SweptBroker, count: int) -> list[tuple[str, str, bytes]]:
    """Group, attempts and payload of so many dead letters, once they are there and no others."""
    found: list[tuple[str, str, bytes]] = []

    async def arrived() -> bool:
        request = PeekQueueRequest(lmq_name=DEAD, max_messages=100)
        try:
            peeked = (await swept.topics.PeekQueue(request)).messages
        except QueueNotFound:
            return False
        found[:] = sorted(
            (
                each.message.headers["tidemark-dead-group"],
                each.message.headers["tidemark-dead-attempts"],
                each.message.payload,
            )
            for each in peeked
        )
        return len(found) >= count

    await swept.passing(arrived)
    return found


async def take(swept: SweptBroker, group: str, **fields: int) -> Delivery:
    return await swept.pulled(QUEUE, group=group, **fields)


async def with_groups(swept: SweptBroker, *groups: str) -> None:
    """Groups that are there before anything is published."""
    for group in groups:
        assert await swept.pull(QUEUE, group=group) == []


async def group_of(swept: SweptBroker, name: str) -> Group:
    answer = await swept.topics.GetQueue(GetQueueRequest(lmq_name=QUEUE))
    (found,) = (each for each in answer.groups if each.name == name)
    return found


async def test_a_message_past_its_time_is_dead_once_for_each_group_that_had_not_settled(
    swept: SweptBroker, clock: ManualClock
) -> None:
    """L5: with the attempts of that group; one that acknowledged has no dead letter."""
    await with_groups(swept, "acks", "delays", "fails")
    await swept.publish(run_of(QUEUE, b"1", b"2", ttl_ms=TTL_MS))
    await swept.settle((await take(swept, "acks")).receipt, Ack())
    await swept.settle((await take(swept, "fails", max_messages=1)).receipt, Nack())
    await swept.settle((await take(swept, "delays")).receipt, Nack(delay_ms=2 * TTL_MS))

    await clock.advance_ms(TTL_MS)

    assert await stories(swept, 4) == [
        ("delays", "1", b"1"),
        ("delays", "1", b"2"),
        ("fails", "0", b"2"),
        ("fails", "1", b"1"),
    ]


async def test_a_consumer_that_finds_a_message_past_its_time_makes_no_difference(
    swept: SweptBroker, clock: ManualClock
) -> None:
    """L5: the dead letters of a message do not depend on who notices first."""
    await with_groups(swept, "early", "late")
    await swept.publish(run_of(QUEUE, b"1", ttl_ms=TTL_MS))
    await swept.lifecycle.stop()
    await clock.advance_ms(TTL_MS)
    assert await swept.pull(QUEUE, group="early") == []

    await swept.lifecycle.start()

    assert await stories(swept, 2) == [("early", "0", b"1"), ("late", "0", b"1")]


async def test_a_message_without_any_group_is_dead_once(
    swept: SweptBroker, clock: ManualClock
) -> None:
    """L5."""
    await swept.publish(run_of(QUEUE, b"1", ttl_ms=TTL_MS))

    await clock.advance_ms(TTL_MS)

    assert await stories(swept, 1) == [("", "0", b"1")]


async def redriven(swept: SweptBroker) -> None:
    """Move all dead letters back, and wait until they have arrived."""
    before = (await swept.queue(QUEUE)).next_offset
    moved = await swept.topics.RedriveDeadLetters(RedriveDeadLettersRequest(lmq_name=DEAD))

    async def arrived() -> bool:
        return (await swept.queue(QUEUE)).next_offset == before + moved.messages

    await swept.passing(arrived)


async def test_a_redriven_message_returns_to_the_group_that_it_died_in(swept: SweptBroker) -> None:
    """L6: for the others it is settled, and for groups that begin later."""
    await with_groups(swept, "acks", "rejects")
    await swept.publish(run_of(QUEUE, b"1"))
    await swept.settle((await take(swept, "acks")).receipt, Ack())
    await swept.settle((await take(swept, "rejects")).receipt, DeadLetter(reason="no"))
    await stories(swept, 1)

    await redriven(swept)
    others = await swept.pull(QUEUE, group="acks")
    later = await swept.pull(QUEUE, group="later")
    unsettled = [(await group_of(swept, name)).unsettled for name in ("acks", "later", "rejects")]
    await swept.publish(run_of(QUEUE, b"2"))
    for_others = await take(swept, "acks")
    first = await take(swept, "rejects", max_messages=1)
    await swept.settle(first.receipt, Ack())

    assert (others, later, unsettled) == ([], [], [0, 0, 1])
    assert payloads_of([first, for_others]) == [b"1", b"2"]
    await swept.settle((await take(swept, "rejects")).receipt, Ack())
    await swept.settle((await take(swept, "later")).receipt, Ack())
    await swept.settle(for_others.receipt, Ack())
    assert (await swept.queue(QUEUE)).messages == 0
    assert [(await group_of(swept, name)).unsettled for name in ("acks", "later", "rejects")] == [
        0,
        0,
        0,
    ]


async def test_a_message_whose_group_is_gone_returns_to_all(swept: SweptBroker) -> None:
    """L6: nothing is lost."""
    await swept.publish(run_of(QUEUE, b"1"))
    await swept.settle((await take(swept, "rejects")).receipt, DeadLetter(reason="no"))
    await stories(swept, 1)
    await swept.topics.DeleteGroup(DeleteGroupRequest(lmq_name=QUEUE, group="rejects"))

    await redriven(swept)

    assert payloads_of([await take(swept, "another")]) == [b"1"]
