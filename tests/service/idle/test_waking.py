"""What wakes an idle queue, what stays asleep, and what storage unloads by itself (I2, I9).

A waiting consumer gets the messages of a queue, however often the queue was unloaded, deleted or
forgotten by storage meanwhile.
"""

import asyncio

import pytest

from broker_svc.idle.cleanup import EvictionOutcome
from tests.service.idle.conftest import StartBroker
from tests.support.faulty_engine import Fault
from tests.support.gated_storage import GatedStorage
from tests.support.idle_broker import (
    IDLE_MS,
    QUEUE,
    QUEUE_PARTITION,
    TOPIC,
    IdleBroker,
    RestartableStorage,
)
from tests.support.local_broker import run_of
from tidemark.api.broker.v1 import broker_pb2, topic_pb2
from tidemark.api.storage.v1 import action_pb2, exchange_pb2, retention_pb2
from tidemark.api.storage.v1.retention_pb2_grpc import RetentionServiceStub
from tidemark.clock import ManualClock
from tidemark.errors import (
    CommitOutcomeUnknown,
    PartitionFaulty,
    Unavailable,
)
from tidemark.rpc import open_channel

HOUSEKEEPING_MS = 1_000
GIVE_UP_S = 60
UNARY_PUBLISHER_IDLE_MS = 300_000
NEIGHBOUR = "orders/c"
"""Lives in the partition of `QUEUE`."""


async def housekeeping(clock: ManualClock, duration_ms: int) -> None:
    """Let storage's time pass, with its housekeeping done on the way."""
    for _ in range(0, duration_ms, HOUSEKEEPING_MS):
        await clock.until_sleepers(3)  # one housekeeper a partition, and the sampler
        await clock.advance_ms(HOUSEKEEPING_MS)


async def got(consumer: "asyncio.Task[bytes]") -> bytes | None:
    """What a consumer gets; None if it was forgotten and would wait forever."""
    done, _ = await asyncio.wait({consumer}, timeout=GIVE_UP_S)
    return consumer.result() if done else None


async def published(broker: IdleBroker, lmq_name: str) -> bool:
    """Whether the partition of a queue takes publishes."""
    try:
        await broker.publish(b"x", lmq_name)
    except (PartitionFaulty, Unavailable):
        return False
    return True


# --- waking -----------------------------------------------------------------------------------


async def test_an_evicted_queue_wakes_with_its_messages_by_being_pulled_from(
    broker: IdleBroker,
) -> None:
    """I2"""
    await broker.idle_queue()
    assert await broker.try_evict() is EvictionOutcome.EVICTED

    (delivery,) = await broker.pull()

    assert [message.payload for message in delivery.batch.messages] == [b"kept"]
    assert delivery.attempt_count == 0
    assert await broker.is_loaded()


async def test_an_evicted_queue_wakes_by_a_publish_and_keeps_order_and_offsets(
    broker: IdleBroker,
) -> None:
    """I2"""
    await broker.idle_queue()
    await broker.try_evict()

    receipt = await broker.publish(b"next")

    assert receipt.first_offset == 1
    deliveries = await broker.pull()
    payloads = [message.payload for each in deliveries for message in each.batch.messages]
    assert payloads == [b"kept", b"next"]


@pytest.mark.also_on_redis
async def test_what_was_settled_before_an_eviction_is_not_delivered_again(
    broker: IdleBroker,
) -> None:
    """I2: progress of groups is durable."""
    await broker.publish_and_leave(b"a")
    await broker.publish_and_leave(b"b")
    (first, second) = await broker.pull()
    await broker.ack(first)
    await broker.ack(second)
    await broker.clock.advance_ms(IDLE_MS)
    await broker.try_evict()

    assert await broker.pull() == []


async def test_a_settlement_can_be_repeated_after_an_eviction(broker: IdleBroker) -> None:
    """V6: the last settlements are part of the stored queue, which is not written to unload it."""
    await broker.publish_and_leave(b"a")
    (delivery,) = await broker.pull()
    await broker.ack(delivery)
    await broker.clock.advance_ms(IDLE_MS)
    evicted = await broker.try_evict()

    await broker.ack(delivery)

    assert evicted is EvictionOutcome.EVICTED
    assert await broker.pull() == []


async def test_looking_at_a_queue_does_not_wake_it(broker: IdleBroker) -> None:
    """I1: list, get, peek and groups read beside the writer."""
    await broker.idle_queue()
    await broker.try_evict()

    listed = await broker.topics.ListQueues(topic_pb2.ListQueuesRequest(topic="orders"))
    await broker.topics.PeekQueue(topic_pb2.PeekQueueRequest(lmq_name=QUEUE))
    await broker.topics.ListGroups(topic_pb2.ListGroupsRequest(lmq_name=QUEUE))

    assert [queue.activity for queue in listed.queues] == [topic_pb2.QUEUE_ACTIVITY_IDLE]
    assert listed.queues[0].messages == 1
    assert not await broker.is_loaded()
    assert len(broker.components.tracking) == 0


@pytest.mark.parametrize("asleep", [0, 1])
async def test_a_queue_over_several_partitions_is_shown_as_one(
    broker: IdleBroker, storage_clock: ManualClock, asleep: int
) -> None:
    """I9: loaded and used wherever that is, as old as its oldest message anywhere."""
    await broker.create_topic("wide", partitions=2)
    times = []
    for partition in (asleep, 1 - asleep):
        await storage_clock.advance_ms(10)
        times.append(storage_clock.wall_ms())
        run = run_of("wide", b"a")
        run.partition = partition
        await broker.calls.Publish(broker_pb2.PublishRequest(runs=[run]))
    broker.service.expire(UNARY_PUBLISHER_IDLE_MS)  # the publisher leaves
    await broker.clock.advance_ms(IDLE_MS)
    await broker.components.cleanup.evict((asleep, "wide"))

    shown = await broker.topics.GetQueue(topic_pb2.GetQueueRequest(lmq_name="wide"))

    queue = shown.queue
    assert queue.activity == topic_pb2.QUEUE_ACTIVITY_MATERIALIZED
    assert queue.messages == 2
    assert queue.oldest_publish_time.ToMilliseconds() == times[0]
    assert queue.last_activity_time.ToMilliseconds() == times[1]
    assert queue.create_time.ToMilliseconds() == times[0]


# --- waiting consumers ------------------------------------------------------------------------


async def test_a_waiting_consumer_gets_what_is_published(broker: IdleBroker) -> None:
    consumer = await broker.waiting_consumer()

    await broker.publish(b"a")

    assert await got(consumer) == b"a"


async def test_a_consumer_that_waits_over_a_restart_of_storage_keeps_its_queue_loaded(
    broker: IdleBroker, stored: RestartableStorage, storage_clock: ManualClock
) -> None:
    """I4, I9: the broker reports again that it tracks the queue, or storage unloads it."""
    consumer = await broker.waiting_consumer()
    await stored.stop()
    for partition in broker.components.links:
        await broker.until_disconnected(partition)
    await stored.start()
    for partition in broker.components.links:
        await broker.reconnect(partition)
    while not await broker.is_loaded():
        await broker.clock.sleep_ms(0)

    await housekeeping(storage_clock, 4 * IDLE_MS)
    still_loaded = await broker.is_loaded()
    await broker.publish(b"a")

    assert await got(consumer) == b"a"
    assert still_loaded


async def test_a_consumer_that_waits_while_its_queue_is_deleted_gets_what_comes_then(
    broker: IdleBroker,
) -> None:
    """I2: the name is another queue then, and the consumer still wants it."""
    consumer = await broker.waiting_consumer()
    await broker.topics.DeleteQueue(topic_pb2.DeleteQueueRequest(lmq_name=QUEUE))

    await broker.publish(b"a")

    assert await got(consumer) == b"a"


async def test_a_queue_with_a_waiting_consumer_is_not_inactive(
    broker: IdleBroker, stored: RestartableStorage
) -> None:
    """R3: the consumer would get no notice of a dead letter in the queue that takes its place."""
    consumer = await broker.waiting_consumer()
    found = await broker.topics.GetQueue(topic_pb2.GetQueueRequest(lmq_name=QUEUE))
    inactive = retention_pb2.RetentionPart(
        partition=0,
        type=retention_pb2.RETENTION_TYPE_INACTIVE_QUEUE,
        age_ms=1,
        queue_ids=[found.queue.queue_id],
        lmq_names=[QUEUE],
        before_ms=[1 << 60],
    )

    async with open_channel(stored.address) as channel:
        applied = await RetentionServiceStub(channel).ApplyRetention(
            retention_pb2.ApplyRetentionRequest(pass_id="pass-1", parts=[inactive])
        )
    entry = action_pb2.OutboxEntry(
        sequence=1,
        destination_lmq_name=QUEUE,
        count=1,
        body=run_of(QUEUE, b"a").batch.SerializeToString(),
        reason=action_pb2.DEAD_REASON_REJECTED,
    )
    dead = action_pb2.AppendFromOutbox(source_partition=1, entry=entry)
    action = action_pb2.Action(append_from_outbox=dead)
    await broker.components.links[QUEUE_PARTITION].call(exchange_pb2.Operation(action=action))

    assert await got(consumer) == b"a"
    assert [(each.queues, each.stale) for each in applied.parts] == [(0, 1)]


async def test_a_lease_on_a_queue_that_was_deleted_loads_it_again(broker: IdleBroker) -> None:
    """I2: loaded before the caller gets a usable handle, whatever was loaded once."""
    await broker.publish_and_leave(b"a")
    await broker.topics.DeleteQueue(topic_pb2.DeleteQueueRequest(lmq_name=QUEUE))

    await broker.lease()

    assert await broker.is_loaded()


async def test_a_lease_on_a_queue_of_a_topic_that_was_created_again_loads_it_again(
    broker: IdleBroker,
) -> None:
    """I2: the queue went with its topic."""
    await broker.publish_and_leave(b"a")
    await broker.topics.DeleteTopic(topic_pb2.DeleteTopicRequest(name=TOPIC, force=True))
    await broker.create_topic()

    await broker.lease()

    assert await broker.is_loaded()


async def test_a_lease_on_a_queue_that_was_deleted_in_one_partition_only_loads_it_again(
    broker: IdleBroker, gates: GatedStorage
) -> None:
    """I2: the other could not be reached, and the caller got that error."""
    await broker.create_topic("wide", partitions=2)
    await broker.publish_and_leave(b"a", "wide")
    await gates.links[1].break_now()
    await broker.until_disconnected(1)
    with pytest.raises(Unavailable):
        await broker.topics.DeleteQueue(topic_pb2.DeleteQueueRequest(lmq_name="wide"))

    await broker.lease("wide")

    listed = await broker.topics.ListQueues(topic_pb2.ListQueuesRequest(topic="wide"))
    assert [queue.partition for queue in listed.queues] == [0, 1]


async def test_a_lease_on_a_queue_that_a_failed_commit_has_unloaded_loads_it_again(
    broker: IdleBroker, stored: RestartableStorage
) -> None:
    """I2: storage dropped its memory and went on."""
    await broker.publish_and_leave(b"a")
    stored.disk.next_commit = Fault.BEFORE_WRITING
    with pytest.raises(CommitOutcomeUnknown):
        await broker.publish(b"lost", NEIGHBOUR)
    while not await published(broker, NEIGHBOUR):
        await broker.clock.advance_ms(10)  # the link reconnects

    await broker.lease()

    assert await broker.is_loaded()


# --- what no broker tracks --------------------------------------------------------------------


async def test_storage_unloads_what_no_broker_tracks_after_twice_the_window(
    broker: IdleBroker, start_broker: StartBroker, storage_clock: ManualClock
) -> None:
    """I9: the broker that loaded it is gone, its successor never used it."""
    await broker.publish_and_leave(b"a")
    successor: IdleBroker = await start_broker(broker_id="successor")

    await housekeeping(storage_clock, IDLE_MS)
    after_one = await successor.is_loaded()
    await housekeeping(storage_clock, 2 * IDLE_MS)

    assert after_one
    assert not await successor.is_loaded()


async def test_storage_leaves_to_the_broker_what_it_tracks(
    broker: IdleBroker, storage_clock: ManualClock
) -> None:
    """I9"""
    await broker.publish(b"a")

    await housekeeping(storage_clock, 10 * IDLE_MS)

    assert await broker.is_loaded()


@pytest.mark.parametrize("first", ["slow", "orders"])
async def test_a_long_window_of_one_topic_keeps_no_queue_of_another_loaded(
    broker: IdleBroker, start_broker: StartBroker, storage_clock: ManualClock, first: str
) -> None:
    """I9: whichever was used first."""
    await broker.create_topic("slow", idle_after_ms=1_000 * IDLE_MS)
    order = ["slow/g", QUEUE] if first == "slow" else [QUEUE, "slow/g"]
    for lmq_name in order:
        await broker.publish_and_leave(b"a", lmq_name)
    successor: IdleBroker = await start_broker(broker_id="successor")

    await housekeeping(storage_clock, 4 * IDLE_MS)

    assert not await successor.is_loaded()
    assert await successor.is_loaded("slow/g")
