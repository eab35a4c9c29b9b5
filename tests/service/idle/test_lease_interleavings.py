"""Every interleaving of "create a lease" and "cleanup", stepped by gates before storage.

There is none in which cleanup saw no lease, began to unload, and a lease was accepted in the middle
(I2). Whatever happens, a queue with a lease is loaded.
"""

import asyncio

import pytest

from broker_svc.idle.activity_leases import Lease
from broker_svc.idle.cleanup import EvictionOutcome
from broker_svc.publish.publishers import PublisherCache
from tests.support.gated_storage import GatedLink, GatedStorage
from tests.support.idle_broker import IDLE_MS, KEY, QUEUE, IdleBroker, cleaning, leases_of
from tests.support.local_broker import run_of
from tidemark.api.broker.v1 import message_pb2


async def payloads(broker: IdleBroker) -> list[bytes]:
    """What a consumer gets of the queue."""
    return [
        message.payload for delivery in await broker.pull() for message in delivery.batch.messages
    ]


# --- the lease first ------------------------------------------------------------------------------


async def test_a_lease_asked_for_before_cleanup_looks_stops_it(
    broker: IdleBroker, link: GatedLink
) -> None:
    """I2: it counts from the moment it is asked for, loaded or not."""
    await broker.idle_queue()
    link.answers.close()
    lease = asyncio.create_task(broker.lease())
    await broker.clock.advance_ms(0)

    outcome = await broker.components.cleanup.evict(KEY)

    assert outcome is EvictionOutcome.ACTIVE
    link.answers.let_go()
    (await lease).release()
    assert leases_of(broker) == 0


async def test_cleanup_while_the_first_load_of_a_queue_is_under_way_is_skipped(
    broker: IdleBroker, link: GatedLink
) -> None:
    """I2, I4"""
    link.answers.close()
    lease = asyncio.create_task(broker.lease())
    await link.answers.until_held()

    assert await broker.components.cleanup.evict(KEY) is EvictionOutcome.ACTIVE
    assert await broker.components.cleanup.run_once() == []

    link.answers.let_go()
    await lease
    assert await broker.is_loaded()


async def test_cleanup_of_a_queue_whose_load_is_still_unanswered_leaves_nothing(
    broker: IdleBroker, link: GatedLink
) -> None:
    """I2: the caller that wanted the lease gave up; the next one loads the queue again."""
    link.answers.close()
    lease = asyncio.create_task(broker.lease())
    await link.answers.until_held()
    lease.cancel()
    await asyncio.wait({lease})
    assert leases_of(broker) == 0
    await broker.clock.advance_ms(IDLE_MS)
    cleanup = asyncio.create_task(broker.components.cleanup.evict(KEY))
    await broker.clock.advance_ms(0)

    link.answers.let_go()

    assert await cleanup is EvictionOutcome.EVICTED
    assert len(broker.components.tracking) == 0
    await broker.lease()
    assert await broker.is_loaded()


# --- the lease in the middle ----------------------------------------------------------------------


@pytest.mark.parametrize("way", ["requests", "answers"])
async def test_a_lease_asked_for_while_storage_is_asked_waits_and_then_loads_the_queue(
    broker: IdleBroker, link: GatedLink, way: str
) -> None:
    """I2: the question may still be on its way, or the answer."""
    gate = link.requests if way == "requests" else link.answers
    await broker.idle_queue()
    gate.close()
    cleanup = asyncio.create_task(broker.components.cleanup.evict(KEY))
    await gate.until_held()
    lease = asyncio.create_task(broker.lease())
    await broker.clock.advance_ms(0)
    assert leases_of(broker) == 0
    assert not lease.done()

    gate.let_go()

    assert await cleanup is EvictionOutcome.EVICTED
    await lease
    assert leases_of(broker) == 1
    assert await broker.is_loaded()
    assert await payloads(broker) == [b"kept"]


async def test_a_lease_asked_for_after_the_answer_came_and_before_cleanup_saw_it_loads_the_queue(
    broker: IdleBroker, link: GatedLink
) -> None:
    """I2: answer and lease in one turn, the lease ahead."""
    cleanup = await cleaning(broker, link)
    link.answers.let_go()
    await broker.until_answered()
    assert not cleanup.done()

    lease = await broker.lease()

    assert await cleanup is EvictionOutcome.EVICTED
    assert broker.components.tracking.find(KEY) is lease.queues[0]
    assert await broker.is_loaded()


async def test_a_lease_asked_for_in_the_turn_in_which_cleanup_saw_the_answer_loads_the_queue(
    broker: IdleBroker, link: GatedLink
) -> None:
    """I2: answer and lease in one turn, the lease behind."""
    cleanup = await cleaning(broker, link)
    made: list[asyncio.Task[Lease]] = []
    cleanup.add_done_callback(lambda _: made.append(asyncio.create_task(broker.lease())))

    link.answers.let_go()
    await cleanup
    await broker.clock.advance_ms(0)

    lease = await made[0]
    assert broker.components.tracking.find(KEY) is lease.queues[0]
    assert await broker.is_loaded()


async def test_a_lease_asked_for_after_the_caller_of_the_cleanup_gave_up_waits_for_it(
    broker: IdleBroker, link: GatedLink
) -> None:
    """I2: a direct call that is cancelled has asked storage all the same."""
    await broker.idle_queue()
    link.requests.close()
    cleanup = asyncio.create_task(broker.components.cleanup.evict(KEY))
    await link.requests.until_held()
    cleanup.cancel()
    await asyncio.wait({cleanup})

    lease = asyncio.create_task(broker.lease())
    await broker.clock.advance_ms(0)
    assert not lease.done()
    link.requests.let_go()

    await lease
    await broker.until_answered()
    assert await broker.is_loaded()


async def test_two_leases_that_wait_for_one_cleanup_share_one_record(
    broker: IdleBroker, link: GatedLink
) -> None:
    """I2"""
    cleanup = await cleaning(broker, link)
    asked = asyncio.gather(broker.lease(), broker.lease())
    await broker.clock.advance_ms(0)

    link.answers.let_go()

    assert await cleanup is EvictionOutcome.EVICTED
    first, second = await asked
    assert first.queues == second.queues
    assert leases_of(broker) == 2
    assert await broker.is_loaded()


async def test_a_publish_in_the_middle_of_a_cleanup_waits_and_keeps_the_order(
    broker: IdleBroker, link: GatedLink
) -> None:
    """I2: publishers are made by first use."""
    cleanup = await cleaning(broker, link)
    cache = PublisherCache(broker.components.publishers, publishers_max=10)
    results: asyncio.Queue[message_pb2.PublishResult] = asyncio.Queue()
    for payload in (b"1", b"2"):
        broker.components.publish_path.submit(run_of(QUEUE, payload), cache, "", results.put_nowait)
    assert results.empty()

    link.answers.let_go()

    assert await cleanup is EvictionOutcome.EVICTED
    for _ in range(2):
        assert not (await results.get()).HasField("error")
    assert await payloads(broker) == [b"kept", b"1", b"2"]


@pytest.mark.parametrize("second", ["direct", "automatic"])
async def test_a_second_cleanup_does_not_unload_the_queue_under_a_lease_that_came_between(
    broker: IdleBroker, link: GatedLink, second: str
) -> None:
    """I2: both cleanups saw no lease; the lease came between the first answer and the second."""
    cleanup = await cleaning(broker, link)
    lease = asyncio.create_task(broker.lease())
    await broker.clock.advance_ms(0)
    work = broker.try_evict() if second == "direct" else broker.components.cleanup.run_once()
    again = asyncio.ensure_future(work)
    await broker.clock.advance_ms(0)

    link.answers.let_go()

    assert await cleanup is EvictionOutcome.EVICTED
    await lease
    # Before the lease the queue was not loaded, after it it is in use; never is it unloaded then.
    assert await again in (
        EvictionOutcome.ACTIVE,
        EvictionOutcome.NOT_MATERIALIZED,
        [EvictionOutcome.NOT_TRACKED],
    )
    assert await broker.is_loaded()


async def test_a_lease_over_several_partitions_waits_for_the_cleanup_of_one(
    broker: IdleBroker, gates: GatedStorage
) -> None:
    """I2, I9"""
    await broker.create_topic("wide", partitions=2)
    (await broker.components.leases.create("wide", (1, 0), IDLE_MS)).release()
    await broker.clock.advance_ms(IDLE_MS)
    gates.links[0].answers.close()
    cleanup = asyncio.create_task(broker.components.cleanup.evict((0, "wide")))
    await gates.links[0].answers.until_held()
    asked = asyncio.create_task(broker.components.leases.create("wide", (1, 0), IDLE_MS))
    await broker.clock.advance_ms(0)
    assert leases_of(broker) == 0  # none of them, or all

    gates.links[0].answers.let_go()

    assert await cleanup is EvictionOutcome.EVICTED
    lease = await asked
    assert leases_of(broker) == 2
    lease.release()
    assert leases_of(broker) == 0


async def test_a_lease_that_gives_up_while_it_waits_for_a_cleanup_leaves_nothing(
    broker: IdleBroker, link: GatedLink
) -> None:
    """I2"""
    cleanup = await cleaning(broker, link)
    lease = asyncio.create_task(broker.lease())
    await broker.clock.advance_ms(0)

    lease.cancel()
    await asyncio.wait({lease})
    link.answers.let_go()

    assert await cleanup is EvictionOutcome.EVICTED
    assert len(broker.components.tracking) == 0
