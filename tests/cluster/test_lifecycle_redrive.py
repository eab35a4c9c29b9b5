"""Dead letters that go back to where they came from, over real processes (L6)."""

from collections import Counter
from collections.abc import AsyncIterator

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from tests.support.lifecycle_client import Client, client_of_shared, payloads
from tidemark.api.broker.v1.message_pb2 import DeadLetter, Message
from tidemark.errors import TopicNotFound
from tidemark.local.cluster import LocalCluster

QUEUES = ("jobs/ada", "jobs/bob")


@pytest.fixture
async def client(shared_cluster: LocalCluster) -> AsyncIterator[Client]:
    """A client, with three exhausted and two rejected dead letters of either queue."""
    async with client_of_shared(shared_cluster) as client:
        await client.create_topic("dead")
        await client.create_topic("jobs", max_attempts=1, dead_letter_topic="dead")
        for lmq_name in QUEUES:
            exhausted = Message(payload=b"exhausted", headers={"colour": "green"})
            await client.publish(lmq_name, *[exhausted] * 3)
            await client.nack(await client.take(lmq_name))
            await client.publish(lmq_name, b"rejected", b"rejected")
            rejected = await client.take(lmq_name)
            await client.settle(rejected.receipt, DeadLetter(reason="no"))
        await client.until_stored("dead", 10)
        yield client


async def test_a_dry_run_counts_and_changes_nothing(client: Client) -> None:
    """L6."""
    before = await client.stored("dead")

    counted = await client.redrive("dead", dry_run=True)
    limited = await client.redrive("dead", dry_run=True, limit=4)

    assert (counted.messages, counted.orphans) == (10, 0)
    assert limited.messages == 4
    assert await client.stored("dead") == before
    assert await client.pull("jobs/ada", wait_ms=0) == []


async def test_redriven_messages_are_delivered_as_they_were_published(client: Client) -> None:
    """L6: without the headers of their death, with a new count of attempts."""
    moved = await client.redrive("dead")

    assert (moved.messages, moved.orphans) == (10, 0)
    for lmq_name in QUEUES:
        back = await client.until_stored(lmq_name, 5)
        assert sorted(payloads(back)) == [b"exhausted"] * 3 + [b"rejected"] * 2
        headers = [dict(each.headers) for each in back if each.payload == b"exhausted"]
        assert headers == [{"colour": "green"}] * 3
        assert not any(each.headers for each in back if each.payload == b"rejected")
        delivery = (await client.pull(lmq_name))[0]
        assert (delivery.attempt_count, delivery.delivery_count) == (0, 1)
    assert await client.stored("dead") == []


async def test_a_redrive_moves_only_what_its_filter_names(client: Client) -> None:
    """L6: by reason, by source, by time, and all at once."""
    dead = await client.stored("dead")
    last_ms = max(int(each.headers["tidemark-dead-time-ms"]) for each in dead)
    after_all = Timestamp()
    after_all.FromMilliseconds(last_ms + 1)

    too_late = await client.redrive("dead", after_time=after_all)
    rejected = await client.redrive(
        "dead", reason="rejected", source_lmq_name="jobs/bob", before_time=after_all
    )
    back = await client.until_stored("jobs/bob", 2)

    assert (too_late.messages, rejected.messages) == (0, 2)
    assert payloads(back) == [b"rejected"] * 2
    assert len(await client.stored("dead")) == 8
    assert await client.stored("jobs/ada") == []


async def test_a_limit_splits_what_died_together(client: Client) -> None:
    """L6: four of ten come back, six stay, none is lost and none is doubled."""
    moved = await client.redrive("dead", limit=4)

    assert moved.messages == 4
    assert len(await client.stored("dead")) == 6
    rest = await client.redrive("dead")
    assert rest.messages == 6
    for lmq_name in QUEUES:
        back = await client.until_stored(lmq_name, 5)
        assert sorted(payloads(back)) == [b"exhausted"] * 3 + [b"rejected"] * 2


async def test_what_a_consumer_of_dead_letters_holds_is_not_redriven(client: Client) -> None:
    """L6: nothing under a live reservation moves."""
    held = await client.pull("dead", max_messages=1)
    held_messages = sum(delivery.count for delivery in held)

    moved = await client.redrive("dead")

    assert held_messages > 0
    left = await client.stored("dead")
    assert moved.messages == 10 - len(left)
    assert len(left) >= held_messages
    assert sum([await client.ack(delivery) for delivery in held]) == held_messages
    left_of = Counter(each.headers["tidemark-dead-queue"] for each in left)
    for lmq_name in QUEUES:  # what arrives later would arrive in the next test
        if moved_messages := 5 - left_of[lmq_name]:
            await client.until_stored(lmq_name, moved_messages)


async def test_a_redrive_of_what_does_not_exist_says_so(client: Client) -> None:
    """L6."""
    with pytest.raises(TopicNotFound):
        await client.redrive("nothing")


async def test_redriven_messages_die_again_and_can_be_redriven_again(client: Client) -> None:
    """L6: the high-water marks of both directions go on."""
    for _ in range(2):
        assert (await client.redrive("dead", source_lmq_name="jobs/ada")).messages == 5
        await client.until_stored("jobs/ada", 5)
        taken = 0
        while taken < 5:
            for delivery in await client.pull("jobs/ada"):
                taken += await client.nack(delivery)
        dead = await client.until_stored("dead", 10)

        assert len(dead) == 10
        assert await client.stored("jobs/ada") == []
