"""The idle window of a topic: counted from the last dropped lease, by the settings of now (I3)."""

import asyncio

from google.protobuf.field_mask_pb2 import FieldMask

from broker_svc.idle.cleanup import EvictionOutcome
from tests.support.idle_broker import IDLE_MS, KEY, QUEUE, TOPIC, IdleBroker
from tidemark.api.broker.v1 import topic_pb2


async def change_window(broker: IdleBroker, idle_after_ms: int) -> None:
    await broker.topics.UpdateTopic(
        topic_pb2.UpdateTopicRequest(
            name=TOPIC,
            settings=topic_pb2.TopicSettings(idle_after_ms=idle_after_ms),
            update_mask=FieldMask(paths=["idle_after_ms"]),
        )
    )


async def test_the_window_begins_with_the_last_lease_that_drops(broker: IdleBroker) -> None:
    """I3"""
    first, second = await broker.lease(), await broker.lease()
    await broker.clock.advance_ms(IDLE_MS)
    first.release()
    await broker.clock.advance_ms(IDLE_MS)
    still_active = await broker.try_evict()
    second.release()
    await broker.clock.advance_ms(IDLE_MS - 1)
    too_early = await broker.try_evict()
    await broker.clock.advance_ms(1)

    assert still_active is EvictionOutcome.ACTIVE
    assert too_early is EvictionOutcome.NOT_IDLE_ENOUGH
    assert await broker.try_evict() is EvictionOutcome.EVICTED


async def test_releasing_a_lease_twice_releases_it_once(broker: IdleBroker) -> None:
    """I3"""
    first, second = await broker.lease(), await broker.lease()

    first.release()
    first.release()

    assert broker.components.leases.active == 1
    second.release()
    assert broker.components.leases.active == 0


async def test_each_topic_has_its_own_window(broker: IdleBroker) -> None:
    """I3"""
    await broker.create_topic("slow", idle_after_ms=5 * IDLE_MS)
    await broker.publish_and_leave(b"a")
    await broker.publish_and_leave(b"b", "slow/a")
    await broker.clock.advance_ms(IDLE_MS)

    assert await broker.try_evict() is EvictionOutcome.EVICTED
    assert await broker.try_evict("slow/a") is EvictionOutcome.NOT_IDLE_ENOUGH


async def test_the_default_window_is_ten_minutes(broker: IdleBroker) -> None:
    """I3, S7"""
    await broker.topics.CreateTopic(topic_pb2.CreateTopicRequest(name="plain"))

    topic = await broker.components.topics.get("plain")

    assert topic.settings.idle_after_ms == 600_000


async def test_a_shorter_window_holds_for_queues_that_are_idle_already(
    broker: IdleBroker,
) -> None:
    """I3: the time that has passed counts."""
    await broker.publish_and_leave(b"a")
    await broker.clock.advance_ms(IDLE_MS // 2)

    await change_window(broker, IDLE_MS // 2)

    assert await broker.try_evict() is EvictionOutcome.EVICTED


async def test_a_shorter_window_makes_idle_queues_candidates_earlier(broker: IdleBroker) -> None:
    """I3: on the automatic path too."""
    await broker.publish_and_leave(b"a")
    await broker.clock.advance_ms(IDLE_MS // 2)

    await change_window(broker, IDLE_MS // 2)

    assert EvictionOutcome.EVICTED in await broker.components.cleanup.run_once()


async def test_a_longer_window_holds_for_queues_that_are_idle_already(broker: IdleBroker) -> None:
    """I3"""
    await broker.publish_and_leave(b"a")

    await change_window(broker, 3 * IDLE_MS)
    await broker.clock.advance_ms(3 * IDLE_MS - 1)
    too_early = await broker.try_evict()
    await broker.clock.advance_ms(1)

    assert too_early is EvictionOutcome.NOT_IDLE_ENOUGH
    assert await broker.try_evict() is EvictionOutcome.EVICTED


async def test_the_window_that_counts_is_that_of_the_moment_and_not_of_the_lease(
    broker: IdleBroker,
) -> None:
    """I3: leases live long, settings change meanwhile."""
    await broker.publish(b"a")  # the publisher is kept
    await change_window(broker, IDLE_MS // 2)
    broker.service.expire(broker.clock.monotonic_ms() + 300_000)  # and dropped
    await broker.clock.advance_ms(IDLE_MS // 2)

    assert await broker.try_evict() is EvictionOutcome.EVICTED


async def test_cleanup_by_itself_unloads_a_queue_when_its_window_ends(broker: IdleBroker) -> None:
    """I3: the loop sleeps until the first candidate is due."""
    running = asyncio.create_task(broker.components.cleanup.run())
    await broker.publish_and_leave(b"a")
    await broker.clock.until_sleepers(1)

    await broker.clock.advance_ms(IDLE_MS - 1)
    early = broker.components.tracking.find(KEY)
    await broker.clock.advance_ms(1)
    while broker.components.tracking.find(KEY) is not None:
        await broker.clock.sleep_ms(0)

    assert early is not None
    assert not await broker.is_loaded()
    running.cancel()


async def test_a_queue_used_often_is_a_candidate_once(broker: IdleBroker) -> None:
    """I3: what cleanup remembers follows the number of queues, never the number of uses."""
    for _ in range(1_000):
        (await broker.lease()).release()

    await broker.clock.advance_ms(IDLE_MS)

    assert await broker.components.cleanup.run_once() == [EvictionOutcome.EVICTED]
    assert broker.components.tracking.next_candidate_ms() is None


async def test_a_queue_that_is_pulled_from_without_end_is_a_candidate_once(
    broker: IdleBroker,
) -> None:
    """I3: polls come and go, each with its lease; a pass finds the queue at most once."""
    for _ in range(10):
        (await broker.lease()).release()
        await broker.clock.advance_ms(IDLE_MS // 2)
        assert len(await broker.components.cleanup.run_once()) <= 1

    assert broker.components.tracking.find((0, QUEUE)) is not None
