"""What sweeps are for, over three real processes: due, delayed, expired, dead (L5, L6)."""

from collections.abc import AsyncIterator

import pytest

from tests.support.lifecycle_client import Client, client_of_shared, payloads, until
from tidemark.api.broker.v1.message_pb2 import DeadLetter, Message
from tidemark.api.broker.v1.topic_pb2 import DeleteTopicRequest
from tidemark.api.storage.v1.retention_pb2 import (
    RETENTION_TYPE_ATTEMPTS_EXHAUSTED,
    RETENTION_TYPE_TIME_TO_LIVE,
)
from tidemark.clock import SystemClock
from tidemark.errors import InvalidArgument, ReservationExpired
from tidemark.local.cluster import LocalCluster

VISIBILITY_MS = 200
HELD_MS = 600_000
UNTIL_DUE_MS = 5_000
"""Time for what must happen before, also on a machine that stands still for a while."""


@pytest.fixture
async def client(shared_cluster: LocalCluster) -> AsyncIterator[Client]:
    async with client_of_shared(shared_cluster) as client:
        yield client


# --- what becomes ready --------------------------------------------------------------------------


async def test_scheduled_messages_become_ready_in_their_order_and_never_early(
    client: Client,
) -> None:
    """L5, L7: the later one is published first."""
    await client.create_topic("jobs")
    clock = SystemClock()

    begin_ms = clock.monotonic_ms()
    await client.publish("jobs/ada", b"later", delay_ms=UNTIL_DUE_MS)
    await client.publish("jobs/ada", b"sooner", delay_ms=300)
    sooner = await client.take("jobs/ada")
    sooner_ms = clock.monotonic_ms() - begin_ms
    later = await client.take("jobs/ada")
    later_ms = clock.monotonic_ms() - begin_ms

    assert payloads(sooner.batch.messages) == [b"sooner"]
    assert payloads(later.batch.messages) == [b"later"]
    assert sooner_ms >= 300
    assert later_ms >= UNTIL_DUE_MS
    assert await client.pull("jobs/ada", wait_ms=0) == [], "each of them once"


async def test_a_nacked_message_comes_back_once_its_delay_is_over(client: Client) -> None:
    """L5, V8."""
    await client.create_topic("jobs")
    await client.publish("jobs/ada", b"again")
    clock = SystemClock()

    begin_ms = clock.monotonic_ms()
    await client.nack(await client.take("jobs/ada"), delay_ms=400)
    again = await client.take("jobs/ada")

    assert clock.monotonic_ms() - begin_ms >= 400
    assert (again.attempt_count, again.delivery_count) == (1, 2)


# --- what must not be delivered any more ---------------------------------------------------------


async def test_exhausted_messages_go_to_the_dead_letter_topic_with_all_that_is_known_of_them(
    client: Client,
) -> None:
    """L5, L6: the second of three messages is nacked until its attempts are used up."""
    await client.create_topic("dead")
    await client.create_topic("jobs", max_attempts=2, dead_letter_topic="dead")
    await client.publish("jobs/ada", b"before", fairness_key="paid")
    await client.ack(await client.take("jobs/ada"))
    poison = Message(payload=b"poison", headers={"colour": "green"})
    before_ms = SystemClock().wall_ms()
    await client.publish("jobs/ada", poison, fairness_key="paid", traceparent="00-ab-cd-01")

    for _ in range(2):
        await client.nack(await client.take("jobs/ada"))
    (dead,) = await client.until_stored("dead", 1)

    assert dead.payload == b"poison"
    time_ms = int(dead.headers.pop("tidemark-dead-time-ms"))
    assert before_ms <= time_ms <= SystemClock().wall_ms()
    assert dict(dead.headers) == {
        "colour": "green",
        "tidemark-dead-reason": "attempts_exhausted",
        "tidemark-dead-topic": "jobs",
        "tidemark-dead-queue": "jobs/ada",
        "tidemark-dead-offset": "1",
        "tidemark-dead-group": "default",
        "tidemark-dead-attempts": "2",
    }
    delivered = await client.take("dead")
    assert (delivered.fairness_key, delivered.traceparent) == ("paid", "00-ab-cd-01")
    assert await client.pull("jobs/ada", wait_ms=0) == []
    assert await client.stored("jobs/ada") == []


async def test_reservations_that_run_out_use_up_attempts_like_any_other(client: Client) -> None:
    """L5, V2: no consumer ever settles."""
    await client.create_topic("dead")
    await client.create_topic(
        "jobs", max_attempts=2, dead_letter_topic="dead", visibility_timeout_ms=VISIBILITY_MS
    )
    await client.publish("jobs/ada", b"crashes its consumer")

    late = [await client.take("jobs/ada") for _ in range(2)]
    (dead,) = await client.until_stored("dead", 1)

    assert [each.attempt_count for each in late] == [0, 1]
    assert dead.headers["tidemark-dead-attempts"] == "2"
    with pytest.raises(ReservationExpired):
        await client.ack(late[-1])


async def test_a_rejected_message_goes_to_the_dead_letter_topic_with_its_reason(
    client: Client,
) -> None:
    """L6: attempts do not matter."""
    await client.create_topic("dead")
    await client.create_topic("jobs", dead_letter_topic="dead")
    await client.publish("jobs/ada", b"nonsense", b"sense")

    delivery = await client.take("jobs/ada")
    await client.settle(delivery.receipt, DeadLetter(reason="cannot be read"))
    dead = await client.until_stored("dead", 2)

    assert payloads(dead) == [b"nonsense", b"sense"]
    assert [each.headers["tidemark-dead-offset"] for each in dead] == ["0", "1"]
    assert {each.headers["tidemark-dead-reason"] for each in dead} == {"rejected"}
    assert {each.headers["tidemark-dead-detail"] for each in dead} == {"cannot be read"}


async def test_a_message_past_its_time_to_live_leaves_for_the_dead_letter_topic(
    client: Client,
) -> None:
    """L5, L6: whether or not anybody ever looked for it; the one without a limit stays."""
    await client.create_topic("dead")
    await client.create_topic("jobs", dead_letter_topic="dead")
    await client.publish("jobs/ada", b"without a limit")

    await client.publish("jobs/ada", b"short-lived", ttl_ms=200)
    (dead,) = await client.until_stored("dead", 1)

    assert dead.payload == b"short-lived"
    assert dead.headers["tidemark-dead-reason"] == "time_to_live"
    assert dead.headers["tidemark-dead-offset"] == "1"
    assert payloads(await client.stored("jobs/ada")) == [b"without a limit"]


async def test_without_a_dead_letter_topic_the_dead_are_deleted_and_remembered(
    client: Client,
) -> None:
    """L6, R6: one row of history for each reason, written with the deletion."""
    await client.create_topic("jobs", max_attempts=1)
    await client.publish("jobs/remembered", b"exhausted")
    await client.nack(await client.take("jobs/remembered"))
    await client.publish("jobs/remembered", b"too", b"old", ttl_ms=100)

    async def both_are_gone() -> bool:
        return len(await client.history("jobs/remembered")) == 2

    await until(both_are_gone)

    rows = {row.type: row for row in await client.history("jobs/remembered")}
    assert rows[RETENTION_TYPE_ATTEMPTS_EXHAUSTED].messages == 1
    assert rows[RETENTION_TYPE_TIME_TO_LIVE].messages == 2
    assert await client.stored("jobs/remembered") == []


async def test_nothing_under_a_live_reservation_is_dead_lettered_or_deleted(
    client: Client,
) -> None:
    """L6: what is past its time to live waits for the end of its reservation, and may be done.

    A message with the same time to live that is not held shows that a sweep has passed.
    """
    await client.create_topic("dead")
    await client.create_topic("jobs", dead_letter_topic="dead", visibility_timeout_ms=HELD_MS)
    await client.publish("jobs/ada", b"done in the end", ttl_ms=UNTIL_DUE_MS)
    await client.publish("jobs/ada", b"given back", ttl_ms=UNTIL_DUE_MS)
    done, returned = await client.pull("jobs/ada")

    # The second is due after a sweep that has seen those that are held.
    for number, ttl_ms in enumerate((UNTIL_DUE_MS, 200)):
        await client.publish("jobs/ada", b"%d" % number, ttl_ms=ttl_ms)
        await client.until_stored("dead", number + 1)

    assert payloads(await client.stored("dead")) == [b"0", b"1"]
    assert payloads(await client.stored("jobs/ada")) == [b"done in the end", b"given back"]
    assert await client.ack(done) == 1
    assert await client.nack(returned) == 1
    dead = await client.until_stored("dead", 3)
    assert payloads(dead) == [b"0", b"1", b"given back"]
    assert dead[2].headers["tidemark-dead-reason"] == "time_to_live"
    assert await client.pull("jobs/ada", wait_ms=0) == []


# --- dead-letter topics that do not work ---------------------------------------------------------


async def test_dead_letter_topics_that_point_at_each_other_are_refused(client: Client) -> None:
    """L6: when they are created and when they are changed."""
    await client.create_topic("two")
    await client.create_topic("one", dead_letter_topic="two")
    await client.create_topic("three", dead_letter_topic="one")

    with pytest.raises(InvalidArgument, match="two -> one -> two"):
        await client.update_topic("two", dead_letter_topic="one")
    with pytest.raises(InvalidArgument, match="two -> three -> one -> two"):
        await client.update_topic("two", dead_letter_topic="three")
    with pytest.raises(InvalidArgument, match="its own"):
        await client.update_topic("two", dead_letter_topic="two")


async def test_messages_wait_for_a_dead_letter_topic_that_was_deleted(
    client: Client, shared_cluster: LocalCluster
) -> None:
    """L6: with a warning; other dead letters of the same queue's partition go on meanwhile."""
    await client.create_topic("dead")
    await client.create_topic("waits", max_attempts=1, dead_letter_topic="missing")
    await client.topics.DeleteTopic(DeleteTopicRequest(name="missing"))
    await client.create_topic("flows", max_attempts=1, dead_letter_topic="dead")
    for number in range(20):  # queues in every partition
        await client.publish(f"waits/{number}", b"%d" % number)
        await client.nack(await client.take(f"waits/{number}"))

    assert shared_cluster.log_dir is not None
    log = shared_cluster.log_dir / "lifecycle.log"

    async def warned() -> bool:
        return "messages wait for their destination" in log.read_text()

    await until(warned)
    for number in range(20):
        await client.publish(f"flows/{number}", b"%d" % number)
        await client.nack(await client.take(f"flows/{number}"))
    others = await client.until_stored("dead", 20)
    await client.create_topic("missing")
    dead = await client.until_stored("missing", 20)

    expected = sorted(b"%d" % number for number in range(20))
    assert sorted(payloads(others)) == expected
    assert sorted(payloads(dead)) == expected
    assert "TOPIC_NOT_FOUND" in log.read_text()


async def test_messages_wait_in_order_for_a_full_dead_letter_queue(client: Client) -> None:
    """L6: and flow, each once, as soon as there is room."""
    await client.create_topic("dead", queue_messages_max=2)
    await client.create_topic("jobs", max_attempts=1, dead_letter_topic="dead")
    for number in range(5):
        await client.publish("jobs/ada", b"%d" % number)
        await client.nack(await client.take("jobs/ada"))
    assert payloads(await client.until_stored("dead", 2)) == [b"0", b"1"]

    taken: list[bytes] = []
    while len(taken) < 5:
        for delivery in await client.pull("dead"):
            taken += payloads(delivery.batch.messages)
            await client.ack(delivery)

    assert taken == [b"0", b"1", b"2", b"3", b"4"]
    assert await client.pull("dead", wait_ms=0) == []
