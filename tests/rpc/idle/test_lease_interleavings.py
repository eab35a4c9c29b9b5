"""Every interleaving of "create a lease" and "cleanup", stepped by gates before storage.

There is none in which cleanup saw no lease, began to unload, and a lease was accepted in the middle
(I2). Whatever happens, a queue with a lease is loaded, and a lease that failed leaves nothing.
"""

import asyncio

import pytest

from broker_svc.cleanup import EvictionOutcome
from broker_svc.leases import Lease
from broker_svc.publishers import PublisherCache
from tests.rpc.idle.conftest import (
    IDLE_MS,
    KEY,
    PARTITIONS,
    QUEUE,
    QUEUE_PARTITION,
    TOPIC,
    IdleBroker,
    run_of,
)
from tests.rpc.idle.gated_storage import GatedLink, GatedStorage
from tidemark.api.broker.v1 import broker_pb2, message_pb2, topic_pb2
from tidemark.api.storage.v1 import storage_pb2
from tidemark.api.storage.v1.storage_pb2_grpc import StorageServiceStub
from tidemark.errors import TopicNotFound, Unavailable
from tidemark.names import partition_of
from tidemark.rpc import open_channel


@pytest.fixture
def link(gates: GatedStorage) -> GatedLink:
    return gates.links[QUEUE_PARTITION]


async def cleaning(broker: IdleBroker, link: GatedLink) -> asyncio.Task[EvictionOutcome]:
    """A cleanup of the idle queue whose answer waits at the gate."""
    await broker.idle_queue()
    link.answers.close()
    cleanup = asyncio.create_task(broker.shop.cleanup.evict(KEY))
    await link.answers.until_held()
    return cleanup


async def payloads(broker: IdleBroker) -> list[bytes]:
    """What a consumer gets of the queue."""
    return [
        message.payload for delivery in await broker.pull() for message in delivery.batch.messages
    ]


def leases_of(broker: IdleBroker) -> int:
    return broker.shop.tracking.leases


# --- the lease first --------------------------------------------------------------------------


async def test_a_lease_asked_for_before_cleanup_looks_stops_it(
    broker: IdleBroker, link: GatedLink
) -> None:
    """I2: it counts from the moment it is asked for, loaded or not."""
    await broker.idle_queue()
    link.answers.close()
    lease = asyncio.create_task(broker.lease())
    await broker.clock.advance_ms(0)

    outcome = await broker.shop.cleanup.evict(KEY)

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

    assert await broker.shop.cleanup.evict(KEY) is EvictionOutcome.ACTIVE
    assert await broker.shop.cleanup.run_once() == []

    link.answers.let_go()
    await lease
    assert await broker.is_loaded()


async def test_cleanup_of_a_queue_whose_load_is_still_unanswered_leaves_nothing(
    broker: IdleBroker, link: GatedLink
) -> None:
    """I2: whoever wanted the lease gave up; the next one loads the queue anew."""
    link.answers.close()
    lease = asyncio.create_task(broker.lease())
    await link.answers.until_held()
    lease.cancel()
    await asyncio.wait({lease})
    assert leases_of(broker) == 0
    await broker.clock.advance_ms(IDLE_MS)
    cleanup = asyncio.create_task(broker.shop.cleanup.evict(KEY))
    await broker.clock.advance_ms(0)

    link.answers.let_go()

    assert await cleanup is EvictionOutcome.EVICTED
    assert len(broker.shop.tracking) == 0
    await broker.lease()
    assert await broker.is_loaded()


# --- the lease in the middle ------------------------------------------------------------------


@pytest.mark.parametrize("way", ["requests", "answers"])
async def test_a_lease_asked_for_while_storage_is_asked_waits_and_then_loads_the_queue(
    broker: IdleBroker, link: GatedLink, way: str
) -> None:
    """I2: the question may still be on its way, or the answer."""
    gate = link.requests if way == "requests" else link.answers
    await broker.idle_queue()
    gate.close()
    cleanup = asyncio.create_task(broker.shop.cleanup.evict(KEY))
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
    assert broker.shop.tracking.find(KEY) is lease.queues[0]
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
    assert broker.shop.tracking.find(KEY) is lease.queues[0]
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
    cache = PublisherCache(broker.shop.publishers, publishers_max=10)
    results: asyncio.Queue[message_pb2.PublishResult] = asyncio.Queue()
    for payload in (b"1", b"2"):
        broker.shop.publishing.submit(run_of(payload), cache, "", results.put_nowait)
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
    work = broker.try_evict() if second == "direct" else broker.shop.cleanup.run_once()
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
    (await broker.shop.leases.create("wide", (1, 0), IDLE_MS)).release()
    await broker.clock.advance_ms(IDLE_MS)
    gates.links[0].answers.close()
    cleanup = asyncio.create_task(broker.shop.cleanup.evict((0, "wide")))
    await gates.links[0].answers.until_held()
    asked = asyncio.create_task(broker.shop.leases.create("wide", (1, 0), IDLE_MS))
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
    assert len(broker.shop.tracking) == 0


# --- a breaking link --------------------------------------------------------------------------


async def test_a_link_that_breaks_in_a_direct_cleanup_is_unavailable_and_no_outcome(
    broker: IdleBroker, link: GatedLink
) -> None:
    """I2: nobody knows whether storage has unloaded it."""
    await broker.idle_queue()
    link.answers.close()
    cleanup = asyncio.create_task(broker.try_evict())
    await link.answers.until_held()

    await link.break_now()

    with pytest.raises(Unavailable):
        await cleanup
    assert broker.shop.tracking.find(KEY) is not None
    link.answers.let_go()
    await broker.reconnect()
    assert await broker.try_evict() is EvictionOutcome.NOT_MATERIALIZED


async def test_a_link_that_breaks_in_an_automatic_cleanup_is_tried_again_after_a_window(
    broker: IdleBroker, link: GatedLink
) -> None:
    """I2, I3"""
    await broker.idle_queue()
    link.requests.close()
    cleanup = asyncio.create_task(broker.shop.cleanup.run_once())
    await link.requests.until_held()

    await link.break_now()

    assert await cleanup == []
    assert broker.shop.tracking.find(KEY) is not None
    link.requests.let_go()
    await broker.reconnect()
    await broker.clock.advance_ms(IDLE_MS)
    assert EvictionOutcome.EVICTED in await broker.shop.cleanup.run_once()


async def test_a_lease_that_waits_for_a_cleanup_whose_link_breaks_is_unavailable(
    broker: IdleBroker, link: GatedLink
) -> None:
    """I2"""
    cleanup = await cleaning(broker, link)
    lease = asyncio.create_task(broker.lease())
    await broker.clock.advance_ms(0)

    await link.break_now()

    for broken in (cleanup, lease):
        with pytest.raises(Unavailable):
            await broken
    assert leases_of(broker) == 0


async def test_a_link_that_breaks_while_a_queue_is_loaded_drops_the_lease(
    broker: IdleBroker, link: GatedLink
) -> None:
    """I2"""
    link.answers.close()
    lease = asyncio.create_task(broker.lease())
    await link.answers.until_held()

    await link.break_now()

    with pytest.raises(Unavailable):
        await lease
    assert leases_of(broker) == 0
    link.answers.let_go()
    await broker.reconnect()
    await broker.lease()
    assert await broker.is_loaded()


@pytest.mark.parametrize("broken", [0, 1])
async def test_a_link_that_breaks_while_another_partition_is_waited_for_takes_no_share(
    broker: IdleBroker, gates: GatedStorage, broken: int
) -> None:
    """I2, L4: the lease holds where the queue is loaded, and elsewhere once the link is up."""
    await broker.create_topic("wide", partitions=2)
    for each in gates.links.values():
        each.answers.close()
    lease = asyncio.create_task(broker.shop.leases.create("wide", (1, 0), IDLE_MS))
    for each in gates.links.values():
        await each.answers.until_held()

    await gates.links[broken].break_now()
    await broker.until_disconnected(broken)
    gates.links[1 - broken].answers.let_go()
    held = await lease

    queue = broker.shop.tracking.find((broken, "wide"))
    assert queue is not None
    assert (queue.leases, queue.loading) == (1, None)
    gates.links[broken].answers.let_go()
    await broker.reconnect(broken)
    assert queue.loading is not None
    await queue.loading
    held.release()
    assert leases_of(broker) == 0


async def test_a_lease_whose_links_all_break_is_unavailable_and_leaves_none(
    broker: IdleBroker, gates: GatedStorage
) -> None:
    """I2"""
    await broker.create_topic("wide", partitions=2)
    for each in gates.links.values():
        each.answers.close()
    lease = asyncio.create_task(broker.shop.leases.create("wide", (1, 0), IDLE_MS))
    for each in gates.links.values():
        await each.answers.until_held()

    for each in gates.links.values():
        await each.break_now()

    with pytest.raises(Unavailable):
        await lease
    assert leases_of(broker) == 0


async def test_a_lease_asked_for_without_a_link_is_unavailable_and_leaves_none(
    broker: IdleBroker, link: GatedLink
) -> None:
    """I2"""
    await link.break_now()
    await broker.until_disconnected(QUEUE_PARTITION)

    with pytest.raises(Unavailable):
        await broker.lease()

    assert leases_of(broker) == 0


# --- a lease that fails -----------------------------------------------------------------------


async def test_a_lease_on_a_queue_whose_topic_was_deleted_says_so_and_leaves_none(
    broker: IdleBroker,
) -> None:
    """I2: the record that is left is forgotten after its window."""
    await broker.topics.DeleteTopic(topic_pb2.DeleteTopicRequest(name=TOPIC))

    with pytest.raises(TopicNotFound):
        await broker.lease()

    assert leases_of(broker) == 0
    await broker.clock.advance_ms(IDLE_MS)
    assert set(await broker.shop.cleanup.run_once()) == {EvictionOutcome.NOT_PRESENT}
    assert len(broker.shop.tracking) == 0


async def test_a_topic_deleted_while_its_queue_is_loaded_fails_all_who_wait(
    broker: IdleBroker, link: GatedLink
) -> None:
    """I2: those that share the load share its failure."""
    link.requests.close()
    asked = [asyncio.create_task(broker.lease("gone/a")) for _ in range(3)]
    await link.requests.until_held()
    assert leases_of(broker) == 3

    link.requests.let_go()

    for lease in asked:
        with pytest.raises(TopicNotFound):
            await lease
    assert leases_of(broker) == 0


async def test_a_lease_in_a_partition_that_has_not_heard_of_the_topic_brings_it_there(
    broker: IdleBroker, gates: GatedStorage
) -> None:
    """I2: the broker that created the topic died before it could tell all partitions."""
    topic = topic_pb2.Topic(name="late")
    async with open_channel(gates.address) as channel:
        put = storage_pb2.PutTopicRequest(topic=topic, create=True)
        await StorageServiceStub(channel).PutTopic(put)

    assert partition_of("late/b", PARTITIONS) == 1
    assert await broker.pull("late/b") == []


async def test_a_publish_whose_queue_cannot_be_loaded_leaves_no_lease(
    broker: IdleBroker, gates: GatedStorage
) -> None:
    """I2: the broker still knows the topic; somebody else has deleted it."""
    async with open_channel(gates.address) as channel:
        delete = storage_pb2.DeleteTopicRequest(name=TOPIC)
        await StorageServiceStub(channel).DeleteTopic(delete)

    with pytest.raises(TopicNotFound):
        await broker.publish(b"lost")

    assert leases_of(broker) == 0
    assert len(broker.shop.publishers) == 0


async def test_a_publish_without_a_link_leaves_no_lease(
    broker: IdleBroker, link: GatedLink
) -> None:
    """I2"""
    await link.break_now()
    await broker.until_disconnected(QUEUE_PARTITION)

    with pytest.raises(Unavailable):
        await broker.publish(b"refused")

    assert leases_of(broker) == 0
    assert len(broker.shop.publishers) == 0


async def test_a_session_that_ends_while_its_publisher_is_opened_leaves_no_lease(
    broker: IdleBroker, link: GatedLink
) -> None:
    """I2, I5: publishers live as long as their connection and no longer."""
    cleanup = await cleaning(broker, link)  # so that a publisher must wait
    session = broker.calls.Session()
    await session.write(broker_pb2.SessionRequest(hello=broker_pb2.Hello(client_id="hasty")))
    await session.read()
    await session.write(broker_pb2.SessionRequest(runs=[run_of(b"x")]))
    await session.write(broker_pb2.SessionRequest(destroy_publishers=[1]))
    await session.read()  # an error: both frames were taken
    session.cancel()
    while broker.service.sessions:
        await broker.clock.sleep_ms(0)

    link.answers.let_go()
    await cleanup
    await broker.shop.leases.create(QUEUE, (QUEUE_PARTITION,), IDLE_MS)  # behind the publisher's
    for _ in range(100):  # turns in which the publisher's may be given back
        await broker.clock.sleep_ms(0)

    assert leases_of(broker) == 1
    assert len(broker.shop.publishers) == 0


# --- afterwards -------------------------------------------------------------------------------


async def test_an_evicted_queue_is_forgotten_completely(broker: IdleBroker) -> None:
    """I9"""
    await broker.publish_and_leave(b"a")
    (delivery,) = await broker.pull()
    await broker.ack(delivery)
    await broker.clock.advance_ms(IDLE_MS)

    assert EvictionOutcome.EVICTED in await broker.shop.cleanup.run_once()

    shop = broker.shop
    left = [len(shop.tracking), len(shop.feeds), len(shop.publishers), len(shop.directory)]
    assert left == [0, 0, 0, 0]
    assert shop.tracking.next_candidate_ms() is None
