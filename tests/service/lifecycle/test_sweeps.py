"""Sweeps end to end: what is due is found and done, by the owner, at its time and never before."""

from typing import Any

import pytest

from tests.service.lifecycle.conftest import StartSwept
from tests.support.local_broker import TOPIC, payloads_of, run_of
from tests.support.swept_broker import Replica, SweptBroker
from tidemark.api.broker.v1.message_pb2 import Ack, DeadLetter, Extend, Nack
from tidemark.api.lifecycle.v1.lifecycle_pb2 import (
    SWEEPER_STATE_STANDING_BY,
    SWEEPER_STATE_WAITING,
    AnnouncePartitionRequest,
    WakePartitionRequest,
)
from tidemark.api.storage.v1.retention_pb2 import (
    RETENTION_TYPE_ATTEMPTS_EXHAUSTED,
    RETENTION_TYPE_TIME_TO_LIVE,
    ListRetentionHistoryRequest,
)
from tidemark.api.storage.v1.retention_pb2_grpc import RetentionServiceStub
from tidemark.api.storage.v1.storage_pb2 import LeaseSweepRequest
from tidemark.clock import ManualClock
from tidemark.errors import InvalidArgument, PartitionNotFound
from tidemark.rpc import open_channel
from tidemark.settings import LifecycleSettings

QUEUE = f"{TOPIC}/ada"
DEAD = "orders-dead"


async def until_messages(swept: SweptBroker, lmq_name: str, count: int) -> None:
    async def ask() -> bool:
        return (await swept.queue(lmq_name)).messages == count

    await swept.passing(ask)


async def died(swept: SweptBroker, *payloads: bytes, lmq_name: str = QUEUE) -> None:
    """Publish messages and fail them for good."""
    await swept.publish(run_of(lmq_name, *payloads))
    delivery = await swept.pulled(lmq_name)
    assert (await swept.settle(delivery.receipt, Nack())).messages == len(payloads)


async def with_dead_letters(swept: SweptBroker, **settings: Any) -> None:
    await swept.create_topic(DEAD)
    await swept.create_topic(TOPIC, max_attempts=1, dead_letter_topic=DEAD, **settings)


# --- responsibilities (L5) ------------------------------------------------------------------------


@pytest.mark.also_on_redis
async def test_a_scheduled_message_arrives_at_its_time_and_not_before(
    swept: SweptBroker, clock: ManualClock
) -> None:
    """L5, L7: storage wakes lifecycle, which sweeps exactly then."""
    await swept.publish(run_of(QUEUE, b"later", delay_ms=30_000))
    await swept.lifecycle.expects(30_000)

    await clock.advance_ms(29_999)
    early = await swept.pull(QUEUE)
    await clock.advance_ms(1)
    delivery = await swept.pulled(QUEUE)

    assert early == []
    assert payloads_of([delivery]) == [b"later"]


async def test_something_that_is_due_earlier_moves_the_next_sweep(
    swept: SweptBroker, clock: ManualClock
) -> None:
    """L7: wake-ups when something earlier is scheduled."""
    await swept.publish(run_of(QUEUE, b"second", delay_ms=50_000))
    await swept.lifecycle.expects(50_000)

    await swept.publish(run_of(QUEUE, b"first", delay_ms=10_000))
    await swept.lifecycle.expects(10_000)
    await clock.advance_ms(10_000)

    assert payloads_of([await swept.pulled(QUEUE)]) == [b"first"]


@pytest.mark.also_on_redis
async def test_exhausted_messages_arrive_in_the_dead_letter_topic_with_their_story(
    start: StartSwept,
) -> None:
    """L5, L6: reason, source topic, queue, offset, group, attempts and headers."""
    swept = await start()
    await with_dead_letters(swept)

    await died(swept, b"0", b"poison")
    delivery = await swept.pulled(DEAD)

    assert payloads_of([delivery]) == [b"0", b"poison"]
    headers = dict(delivery.batch.messages[1].headers)
    assert headers.pop("tidemark-dead-time-ms")
    assert headers == {
        "tidemark-dead-reason": "attempts_exhausted",
        "tidemark-dead-topic": TOPIC,
        "tidemark-dead-queue": QUEUE,
        "tidemark-dead-offset": "1",
        "tidemark-dead-group": "default",
        "tidemark-dead-attempts": "1",
    }
    assert (await swept.queue(QUEUE)).messages == 0


async def test_a_rejected_message_arrives_with_the_words_of_its_consumer(start: StartSwept) -> None:
    """L6."""
    swept = await start()
    await with_dead_letters(swept)
    await swept.publish(run_of(QUEUE, b"odd"))
    first = await swept.pulled(QUEUE)

    await swept.settle(first.receipt, DeadLetter(reason="does not parse"))
    delivery = await swept.pulled(DEAD)

    (message,) = delivery.batch.messages
    assert message.headers["tidemark-dead-reason"] == "rejected"
    assert message.headers["tidemark-dead-detail"] == "does not parse"


async def test_a_message_past_its_time_to_live_is_dead_lettered(
    start: StartSwept, clock: ManualClock
) -> None:
    """L5, L6."""
    swept = await start()
    await with_dead_letters(swept)
    await swept.publish(run_of(QUEUE, b"old", ttl_ms=20_000))
    await swept.lifecycle.expects(20_000)

    await clock.advance_ms(20_000)
    delivery = await swept.pulled(DEAD)

    (message,) = delivery.batch.messages
    assert message.headers["tidemark-dead-reason"] == "time_to_live"


async def test_without_a_dead_letter_topic_it_is_deleted_and_told(
    start: StartSwept, clock: ManualClock
) -> None:
    """L6, R6: a history row counts the messages."""
    swept = await start()
    await swept.create_topic(TOPIC, max_attempts=1)

    await died(swept, b"1", b"2")
    await until_messages(swept, QUEUE, 0)  # one sweep for both would write them in any order
    await swept.publish(run_of(QUEUE, b"3", ttl_ms=10_000))
    await swept.lifecycle.expects(10_000)
    await clock.advance_ms(10_000)
    await until_messages(swept, QUEUE, 0)

    async with open_channel(swept.storage_address) as channel:
        history = RetentionServiceStub(channel)
        rows = (await history.ListRetentionHistory(ListRetentionHistoryRequest())).rows
    assert [(row.lmq_name, row.type, row.messages) for row in rows] == [
        (QUEUE, RETENTION_TYPE_TIME_TO_LIVE, 1),
        (QUEUE, RETENTION_TYPE_ATTEMPTS_EXHAUSTED, 2),
    ]


async def test_nothing_that_a_live_reservation_holds_is_buried(
    start: StartSwept, clock: ManualClock
) -> None:
    """L6: the time to live of a held message passes; it can still be settled."""
    swept = await start()
    await with_dead_letters(swept, visibility_timeout_ms=60_000)
    await swept.publish(run_of(QUEUE, b"held", ttl_ms=10_000))
    held = await swept.pulled(QUEUE)
    await swept.lifecycle.expects(10_000)

    await clock.advance_ms(10_000)

    async def looked_at() -> bool:
        return (await swept.lifecycle.status()).last_stale == 1

    await swept.passing(looked_at)
    extended = await swept.settle(held.receipt, Extend(visibility_ms=60_000))
    settled = await swept.settle(held.receipt, Ack())

    assert (extended.messages, settled.messages) == (1, 1)
    assert await swept.pull(DEAD) == []


# --- the outbox (L6) ------------------------------------------------------------------------------


async def test_messages_wait_for_a_dead_letter_topic_that_was_deleted(
    start: StartSwept, caplog: pytest.LogCaptureFixture
) -> None:
    """L6: with a warning; nothing is lost, order is kept."""
    swept = await start()
    await swept.create_topic(TOPIC, max_attempts=1, dead_letter_topic=DEAD)
    await swept.delete_topic(DEAD)
    await died(swept, b"1")
    await died(swept, b"2")

    await swept.passing(lambda: _said(caplog, "TOPIC_NOT_FOUND"))
    await swept.create_topic(DEAD)

    first = await swept.pulled(DEAD, max_messages=1)
    second = await swept.pulled(DEAD, max_messages=1)

    assert payloads_of([first, second]) == [b"1", b"2"]


async def test_a_destination_that_refuses_does_not_hold_up_another(
    start: StartSwept, caplog: pytest.LogCaptureFixture
) -> None:
    """L6."""
    swept = await start()
    await with_dead_letters(swept)
    await swept.create_topic("lost", max_attempts=1, dead_letter_topic="nowhere")
    await swept.delete_topic("nowhere")
    for number in range(40):  # more than a page of the outbox
        await died(swept, b"lost", lmq_name=f"lost/{number}")
    await swept.passing(lambda: _said(caplog, "TOPIC_NOT_FOUND"))

    await died(swept, b"found")

    assert payloads_of([await swept.pulled(DEAD)]) == [b"found"]


async def test_a_full_dead_letter_queue_makes_messages_wait(
    start: StartSwept, caplog: pytest.LogCaptureFixture
) -> None:
    """L6."""
    swept = await start()
    await swept.create_topic(DEAD, queue_messages_max=1)
    await swept.create_topic(TOPIC, max_attempts=1, dead_letter_topic=DEAD)
    await died(swept, b"1")
    first = await swept.pulled(DEAD)
    await died(swept, b"2")
    await swept.passing(lambda: _said(caplog, "QUEUE_FULL"))

    await swept.settle(first.receipt, Ack())

    assert payloads_of([await swept.pulled(DEAD)]) == [b"2"]


async def test_a_dead_letter_queue_with_room_for_some_is_tried_again_soon_for_the_rest(
    start: StartSwept, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """L6: the retry of the message that did not fit comes before the next regular sweep."""
    swept = await start()
    await swept.create_topic(DEAD, queue_messages_max=2)
    await swept.create_topic(TOPIC, max_attempts=1, dead_letter_topic=DEAD)
    for number in range(5):
        await died(swept, b"%d" % number)
    await swept.passing(lambda: _said(caplog, "QUEUE_FULL"))
    begin_ms = clock.monotonic_ms()
    taken: list[bytes] = []

    async def all_taken() -> bool:
        deliveries = await swept.pull(DEAD)
        for each in deliveries:
            await swept.settle(each.receipt, Ack())
        taken.extend(payloads_of(deliveries))
        return len(taken) == 5

    await swept.passing(all_taken)

    assert taken == [b"0", b"1", b"2", b"3", b"4"]
    assert clock.monotonic_ms() - begin_ms < LifecycleSettings().sweep_interval_ms_max // 2


async def _said(caplog: pytest.LogCaptureFixture, reason: str) -> bool:
    return any(getattr(record, "reason", "") == reason for record in caplog.records)


async def test_dead_letter_topics_that_point_at_each_other_are_refused(swept: SweptBroker) -> None:
    """L6: a clear error, before anything is stored."""
    await swept.create_topic("b", dead_letter_topic="c")
    await swept.create_topic("a", dead_letter_topic="b")
    await swept.delete_topic("c")

    with pytest.raises(InvalidArgument, match="c -> a -> b -> c") as refused:
        await swept.create_topic("c", dead_letter_topic="a")

    assert refused.value.metadata["field"] == "dead_letter_topic"


# --- life (L4, L7) --------------------------------------------------------------------------------


@pytest.mark.also_on_redis
async def test_timing_is_found_again_after_restarts_of_every_service(
    start: StartSwept, clock: ManualClock
) -> None:
    """L7: the schedule is in storage, timers are nowhere else."""
    swept = await start()
    await swept.create_topic()
    await swept.publish(run_of(QUEUE, b"later", delay_ms=30_000))

    await swept.lifecycle.stop()
    await swept.stop_broker()
    await swept.stop_storage()
    await clock.advance_ms(10_000)
    await swept.start_storage()
    await swept.lifecycle.start()
    await swept.start_broker()
    await swept.lifecycle.expects(20_000)
    await clock.advance_ms(20_000)

    assert payloads_of([await swept.pulled(QUEUE)]) == [b"later"]


async def test_a_partition_serves_once_lifecycle_has_come(
    start: StartSwept, clock: ManualClock
) -> None:
    """L4: storage announces what it opened, again and again."""
    swept = await start()
    await swept.create_topic()
    await swept.lifecycle.stop()
    await swept.stop_storage()
    await swept.start_storage()

    async def refused() -> bool:
        (result,) = await swept.publish(run_of(QUEUE, b"x"))
        return result.error.message != "" and "sweep" in result.error.message

    await swept.passing(refused)
    await swept.lifecycle.start()

    async def served() -> bool:
        (result,) = await swept.publish(run_of(QUEUE, b"x"))
        return not result.HasField("error")

    await swept.passing(served)


async def test_a_replica_stands_by_while_another_sweeps_and_takes_over(
    swept: SweptBroker, clock: ManualClock
) -> None:
    """L2: a partition is not swept twice at the same time."""
    second = swept.replica()
    await second.start()
    standing_by = await second.status()

    await swept.lifecycle.stop()
    await clock.advance_ms(15_000)

    assert standing_by.state == SWEEPER_STATE_STANDING_BY
    await swept.passing(lambda: _waits(second))
    await swept.publish(run_of(QUEUE, b"later", delay_ms=1_000))
    await second.expects(1_000)
    await clock.advance_ms(1_000)
    assert payloads_of([await swept.pulled(QUEUE)]) == [b"later"]
    await second.stop()


async def test_a_replica_that_vanished_loses_its_lease(
    swept: SweptBroker, clock: ManualClock
) -> None:
    """L4: a replica that died needs no notice."""
    lease = LeaseSweepRequest(sweeper_id="dead", address="127.0.0.1:1", lease_ms=15_000)
    await swept.lifecycle.stop()
    assert (await swept.storage.LeaseSweep(lease)).granted

    await swept.lifecycle.start()
    before = await swept.lifecycle.status()
    await clock.advance_ms(15_000)

    assert before.state == SWEEPER_STATE_STANDING_BY
    await swept.passing(lambda: _waits(swept.lifecycle))


async def _waits(replica: Replica) -> bool:
    return (await replica.status()).state == SWEEPER_STATE_WAITING


# --- bad input ------------------------------------------------------------------------------------


async def test_what_is_wrong_in_a_call_is_refused_with_its_field(swept: SweptBroker) -> None:
    """S3."""
    api = swept.lifecycle.api
    with pytest.raises(InvalidArgument) as partition:
        await api.AnnouncePartition(
            AnnouncePartitionRequest(partition=9, storage_address="127.0.0.1:1")
        )
    with pytest.raises(InvalidArgument) as address:
        await api.AnnouncePartition(AnnouncePartitionRequest(storage_address="nonsense"))
    with pytest.raises(PartitionNotFound):
        await api.WakePartition(WakePartitionRequest(partition=9))
    with pytest.raises(InvalidArgument) as unnamed:
        await swept.storage.LeaseSweep(LeaseSweepRequest(lease_ms=1))
    with pytest.raises(InvalidArgument) as too_long:
        await swept.storage.LeaseSweep(
            LeaseSweepRequest(sweeper_id="a", address="a:1", lease_ms=600_001)
        )

    refused = (partition, address, unnamed, too_long)
    assert [each.value.metadata["field"] for each in refused] == [
        "partition",
        "storage_address",
        "sweeper_id",
        "lease_ms",
    ]
