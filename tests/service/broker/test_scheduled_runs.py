"""Scheduled runs, cancelled until they are promoted."""

import pytest

from tests.service.broker.conftest import StartBroker
from tests.support.local_broker import QUEUE, TOPIC, LocalBroker, payloads_of, run_of, take
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.storage.v1 import action_pb2, storage_pb2
from tidemark.clock import ManualClock
from tidemark.errors import InvalidArgument, RunNotScheduled


async def cancel(local: LocalBroker, partition: int, schedule_id: int) -> int:
    request = topic_pb2.CancelScheduledRequest(
        lmq_name=QUEUE, partition=partition, schedule_id=schedule_id
    )
    return (await local.topics.CancelScheduled(request)).messages


async def promote(local: LocalBroker, partition: int) -> None:
    """What a sweep does with the runs that are due."""
    scan = storage_pb2.ScanPartitionRequest(
        partition=partition, kind=storage_pb2.SCAN_KIND_SCHEDULES_DUE
    )
    facts = (await local.storage.ScanPartition(scan)).facts
    request = action_pb2.DelegateActionsRequest(
        partition=partition, actions=[fact.action for fact in facts]
    )
    await local.owner.DelegateActions(request)


async def test_a_scheduled_run_can_be_cancelled_once(
    start: StartBroker, clock: ManualClock
) -> None:
    local = await start(clock)
    (published,) = await local.publish(run_of(QUEUE, b"1", b"2", delay_ms=5000))
    receipt = published.receipt

    cancelled = await cancel(local, receipt.partition, receipt.schedule_id)
    with pytest.raises(RunNotScheduled):
        await cancel(local, receipt.partition, receipt.schedule_id)
    await clock.advance_ms(10_000)

    assert cancelled == 2
    assert await local.pull(QUEUE) == []
    assert (await local.queue(QUEUE)).messages == 0


async def test_a_run_that_was_promoted_or_is_unknown_cannot_be_cancelled(
    start: StartBroker, clock: ManualClock
) -> None:
    local = await start(clock)
    (published,) = await local.publish(run_of(QUEUE, b"1", delay_ms=5000))
    receipt = published.receipt

    with pytest.raises(RunNotScheduled):
        await cancel(local, receipt.partition, receipt.schedule_id + 1)
    with pytest.raises(InvalidArgument):
        await cancel(local, 1 - receipt.partition, receipt.schedule_id)
    assert await local.pull(QUEUE) == []

    await clock.advance_ms(5000)
    await promote(local, receipt.partition)

    with pytest.raises(RunNotScheduled):
        await cancel(local, receipt.partition, receipt.schedule_id)
    assert payloads_of(await local.pull(QUEUE)) == [b"1"]


async def test_a_scheduled_run_reaches_those_who_subscribed_before_their_topic_was_created_again(
    start: StartBroker, clock: ManualClock
) -> None:
    """Only its promotion wakes them."""
    local = await start(clock)
    session = await local.session()
    consumer = session.open_consumer(credit=1)
    await consumer.subscribe(QUEUE)
    await local.topics.DeleteTopic(topic_pb2.DeleteTopicRequest(name=TOPIC, force=True))
    await local.create_topic()

    (published,) = await local.publish(run_of(QUEUE, b"1", delay_ms=5000))
    await clock.advance_ms(5000)
    await promote(local, published.receipt.partition)

    assert payloads_of(await take(consumer, 1)) == [b"1"]
