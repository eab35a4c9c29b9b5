"""Every outcome of an attempt to unload a queue, automatic and direct (I4, I6)."""

import asyncio

import pytest

from broker_svc.idle.cleanup import EvictionOutcome
from tests.service.idle.conftest import StartBroker
from tests.support.gated_storage import GatedStorage
from tests.support.idle_broker import IDLE_MS, KEY, QUEUE, QUEUE_PARTITION, TOPIC, IdleBroker
from tidemark.api.broker.v1 import subscription_pb2, topic_pb2
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.errors import TopicNotFound


def purge() -> exchange_pb2.Operation:
    return exchange_pb2.Operation(purge=exchange_pb2.Purge(lmq_name=QUEUE))


async def take_away(broker: IdleBroker, what: str) -> None:
    """What an operator can do to a queue while clients hold deliveries of it."""
    match what:
        case "queue":
            await broker.topics.DeleteQueue(topic_pb2.DeleteQueueRequest(lmq_name=QUEUE))
        case "topic":
            await broker.topics.DeleteTopic(topic_pb2.DeleteTopicRequest(name=TOPIC, force=True))
        case "group":
            group = topic_pb2.DeleteGroupRequest(lmq_name=QUEUE, group="default")
            await broker.topics.DeleteGroup(group)
        case "progress":
            start = subscription_pb2.StartPosition(earliest=True)
            reset = topic_pb2.ResetGroupRequest(lmq_name=QUEUE, group="default", start=start)
            await broker.topics.ResetGroup(reset)


# --- skipped by the broker --------------------------------------------------------------------


async def test_not_tracked_is_the_automatic_answer_when_the_record_went_away_meanwhile(
    broker: IdleBroker, gates: GatedStorage
) -> None:
    """I4, I6"""
    await broker.idle_queue()
    gates.links[QUEUE_PARTITION].answers.close()
    direct = asyncio.create_task(broker.components.cleanup.evict(KEY))
    await gates.links[QUEUE_PARTITION].answers.until_held()
    gates.links[QUEUE_PARTITION].answers.let_go()
    await broker.until_answered()

    automatic = await broker.components.cleanup.run_once()

    assert automatic == [EvictionOutcome.NOT_TRACKED]
    assert await direct is EvictionOutcome.EVICTED


async def test_not_tracked_is_the_automatic_answer_after_waiting_for_a_direct_call(
    broker: IdleBroker, gates: GatedStorage
) -> None:
    """I4, I6: the direct call has unloaded it; storage is not asked again."""
    await broker.idle_queue()
    gates.links[QUEUE_PARTITION].answers.close()
    direct = asyncio.create_task(broker.components.cleanup.evict(KEY))
    await gates.links[QUEUE_PARTITION].answers.until_held()
    automatic = asyncio.create_task(broker.components.cleanup.run_once())
    await broker.clock.advance_ms(0)

    gates.links[QUEUE_PARTITION].answers.let_go()

    assert await direct is EvictionOutcome.EVICTED
    assert await automatic == [EvictionOutcome.NOT_TRACKED]


async def test_a_queue_with_a_lease_is_active_even_long_after_its_window(
    broker: IdleBroker,
) -> None:
    """I4"""
    await broker.publish(b"a")  # the publisher is kept
    await broker.clock.advance_ms(10 * IDLE_MS)

    assert await broker.try_evict() is EvictionOutcome.ACTIVE
    assert (
        await broker.components.cleanup.run_once() == []
    )  # its record waits for the lease to drop
    assert await broker.is_loaded()


async def test_a_lease_that_comes_after_the_candidates_were_taken_makes_the_queue_active(
    broker: IdleBroker,
) -> None:
    """I4: the automatic path looks once more before it asks storage."""
    await broker.idle_queue()
    lease = asyncio.create_task(broker.lease())  # runs before what run_once starts

    outcomes = await broker.components.cleanup.run_once()

    assert outcomes == [EvictionOutcome.ACTIVE]
    (await lease).release()


async def test_a_queue_is_not_idle_enough_until_its_whole_window_has_elapsed(
    broker: IdleBroker,
) -> None:
    """I3, I4"""
    await broker.publish_and_leave(b"a")
    await broker.clock.advance_ms(IDLE_MS - 1)

    early = await broker.try_evict()
    await broker.clock.advance_ms(1)

    assert early is EvictionOutcome.NOT_IDLE_ENOUGH
    assert await broker.try_evict() is EvictionOutcome.EVICTED


async def test_the_automatic_path_finds_a_queue_not_idle_enough_that_is_used_meanwhile(
    broker: IdleBroker,
) -> None:
    """I3, I4: it was taken for a candidate, and used before its turn came."""
    lease = await broker.lease()
    lease.release()
    await broker.clock.advance_ms(IDLE_MS)
    passing = asyncio.create_task(broker.components.cleanup.run_once())
    again = broker.components.leases.begin(QUEUE, (QUEUE_PARTITION,), IDLE_MS)
    assert again is not None
    again.release()
    (queue,) = lease.queues
    queue.check_at_ms = None
    broker.components.tracking.watch(queue, broker.clock.monotonic_ms())

    assert await passing == [EvictionOutcome.NOT_IDLE_ENOUGH]
    await broker.clock.advance_ms(IDLE_MS)
    assert EvictionOutcome.EVICTED in await broker.components.cleanup.run_once()


@pytest.mark.parametrize("path", ["direct", "automatic"])
async def test_a_settlement_on_its_way_keeps_its_queue_loaded(
    broker: IdleBroker, gates: GatedStorage, path: str
) -> None:
    """I4"""
    await broker.publish_and_leave(b"a")
    (delivery,) = await broker.pull()
    await broker.clock.advance_ms(IDLE_MS)
    gates.links[QUEUE_PARTITION].answers.close()
    acked = asyncio.create_task(broker.ack(delivery))
    await gates.links[QUEUE_PARTITION].answers.until_held()

    outcome = await tried(broker, path)

    assert outcome is EvictionOutcome.PENDING_SETTLEMENTS
    gates.links[QUEUE_PARTITION].answers.let_go()
    await acked


@pytest.mark.parametrize("path", ["direct", "automatic"])
async def test_a_queue_with_unsettled_deliveries_stays_loaded(
    broker: IdleBroker, path: str
) -> None:
    """I4"""
    await broker.publish_and_leave(b"a")
    (delivery,) = await broker.pull()
    await broker.clock.advance_ms(IDLE_MS)

    outcome = await tried(broker, path)

    assert outcome is EvictionOutcome.HAS_DELIVERIES
    await broker.ack(delivery)
    await broker.clock.advance_ms(IDLE_MS)
    assert await tried(broker, path) is EvictionOutcome.EVICTED


@pytest.mark.parametrize("what", ["queue", "topic", "group", "progress"])
async def test_deliveries_that_an_operator_has_taken_away_keep_no_queue_loaded(
    broker: IdleBroker, what: str
) -> None:
    """I4: storage has ended their reservations, so nothing else ever will."""
    await broker.publish_and_leave(b"a")
    await broker.pull()

    await take_away(broker, what)

    while len(broker.components.directory):  # told with the answer, or just after it
        await broker.clock.sleep_ms(0)
    await broker.clock.advance_ms(IDLE_MS)
    await broker.components.cleanup.run_once()
    assert len(broker.components.tracking) == 0


async def test_deliveries_of_one_queue_do_not_keep_another_loaded(broker: IdleBroker) -> None:
    """I4: the counters are those of that queue."""
    await broker.publish_and_leave(b"a")
    await broker.publish_and_leave(b"b", "orders/c")
    await broker.pull("orders/c")
    await broker.clock.advance_ms(IDLE_MS)

    assert await broker.try_evict() is EvictionOutcome.EVICTED
    assert await broker.try_evict("orders/c") is EvictionOutcome.HAS_DELIVERIES


# --- answered by storage ----------------------------------------------------------------------


@pytest.mark.parametrize("path", ["direct", "automatic"])
async def test_an_idle_queue_is_evicted(broker: IdleBroker, path: str) -> None:
    """I3, I4"""
    await broker.idle_queue()

    outcome = await tried(broker, path)

    assert outcome is EvictionOutcome.EVICTED
    assert not await broker.is_loaded()


async def test_an_evicted_queue_is_forgotten_completely(broker: IdleBroker) -> None:
    """I9"""
    await broker.publish_and_leave(b"a")
    (delivery,) = await broker.pull()
    await broker.ack(delivery)
    await broker.clock.advance_ms(IDLE_MS)

    assert EvictionOutcome.EVICTED in await broker.components.cleanup.run_once()

    components = broker.components
    left = [
        len(components.tracking),
        len(components.dispatcher),
        len(components.publishers),
        len(components.directory),
    ]
    assert left == [0, 0, 0, 0]
    assert components.tracking.next_candidate_ms() is None


@pytest.mark.parametrize("path", ["direct", "automatic"])
async def test_a_queue_that_was_deleted_is_not_present(broker: IdleBroker, path: str) -> None:
    """I4"""
    await broker.idle_queue()
    await broker.topics.DeleteQueue(topic_pb2.DeleteQueueRequest(lmq_name=QUEUE))

    outcome = await tried(broker, path)

    assert outcome is EvictionOutcome.NOT_PRESENT
    assert len(broker.components.tracking) == 0


@pytest.mark.parametrize("path", ["direct", "automatic"])
async def test_a_queue_that_was_unloaded_behind_the_record_is_not_materialized(
    broker: IdleBroker, path: str
) -> None:
    """I4: as after a link that broke between storage's eviction and its answer."""
    await broker.idle_queue()
    link = broker.components.links[QUEUE_PARTITION]
    unmaterialize = exchange_pb2.Unmaterialize(lmq_name=QUEUE)
    await link.call(exchange_pb2.Operation(unmaterialize=unmaterialize))

    outcome = await tried(broker, path)

    assert outcome is EvictionOutcome.NOT_MATERIALIZED
    assert len(broker.components.tracking) == 0


@pytest.mark.parametrize("path", ["direct", "automatic"])
async def test_reservations_of_an_earlier_broker_are_in_flight(
    broker: IdleBroker, start_broker: StartBroker, path: str
) -> None:
    """I4: tags were lost with the broker that gave them out, the reservation was not."""
    await broker.publish_and_leave(b"a")
    await broker.pull()
    successor: IdleBroker = await start_broker(broker_id="successor")
    (await successor.lease()).release()
    await successor.clock.advance_ms(IDLE_MS)

    outcome = await tried(successor, path)

    assert outcome is EvictionOutcome.HAS_INFLIGHT
    assert await successor.is_loaded()


@pytest.mark.parametrize("path", ["direct", "automatic"])
async def test_a_change_in_the_same_commit_wins_the_race(broker: IdleBroker, path: str) -> None:
    """I4: what the commit changes could not be loaded again yet."""
    await broker.idle_queue()
    link = broker.components.links[QUEUE_PARTITION]

    attempt = asyncio.create_task(tried_inside(broker, path))
    if path == "automatic":
        await broker.clock.sleep_ms(0)  # it has its candidates and asks storage in the next turn
    purged = link.send(purge())  # so both gather for one frame, this one ahead

    assert await attempt is EvictionOutcome.RACE_LOST
    assert (await purged).removed.messages == 1
    assert await broker.is_loaded()
    await broker.clock.advance_ms(IDLE_MS)
    assert await tried(broker, path) is EvictionOutcome.EVICTED  # the next attempt


# --- the direct call ---------------------------------------------------------------------------


async def test_the_direct_call_reports_the_truth_about_a_queue_that_is_not_tracked(
    broker: IdleBroker,
) -> None:
    """I6: never NOT_TRACKED."""
    await broker.idle_queue()

    outcomes = [await broker.try_evict() for _ in range(3)]

    assert outcomes == [
        EvictionOutcome.EVICTED,
        EvictionOutcome.NOT_MATERIALIZED,
        EvictionOutcome.NOT_MATERIALIZED,
    ]
    assert await broker.try_evict("orders/never-used") is EvictionOutcome.NOT_PRESENT
    assert len(broker.components.tracking) == 0


async def test_the_direct_call_unloads_what_an_earlier_broker_left_loaded(
    broker: IdleBroker, start_broker: StartBroker
) -> None:
    """I6: this broker does not track it, storage holds it all the same."""
    await broker.publish_and_leave(b"a")
    successor: IdleBroker = await start_broker(broker_id="successor")

    assert await successor.try_evict() is EvictionOutcome.EVICTED
    assert not await successor.is_loaded()


async def test_the_direct_call_about_an_unknown_topic_says_so(broker: IdleBroker) -> None:
    with pytest.raises(TopicNotFound):
        await broker.try_evict("nothing/here")


async def test_a_queue_over_several_partitions_is_reported_for_each(broker: IdleBroker) -> None:
    """I9: cleanup covers every partition; the summary is the first that is not EVICTED."""
    await broker.create_topic("wide", partitions=2)
    lease = await broker.components.leases.create("wide", (1, 0), IDLE_MS)
    lease.release()
    await broker.clock.advance_ms(IDLE_MS)
    await broker.components.cleanup.evict((0, "wide"))

    answer = await broker.topics.TryEvictInactiveQueue(
        topic_pb2.TryEvictInactiveQueueRequest(lmq_name="wide")
    )

    assert answer.outcome == topic_pb2.EVICTION_OUTCOME_NOT_MATERIALIZED
    assert {each.partition: each.outcome for each in answer.partitions} == {
        0: topic_pb2.EVICTION_OUTCOME_NOT_MATERIALIZED,
        1: topic_pb2.EVICTION_OUTCOME_EVICTED,
    }
    assert len(broker.components.tracking) == 0


# --- how often storage is asked ---------------------------------------------------------------


async def test_the_automatic_path_does_not_ask_again_about_what_it_has_unloaded(
    broker: IdleBroker, gates: GatedStorage
) -> None:
    """I6: a gate that stays closed shows that nothing is asked."""
    await broker.idle_queue()
    assert await broker.components.cleanup.run_once() == [EvictionOutcome.EVICTED]
    gates.links[QUEUE_PARTITION].requests.close()

    for _ in range(3):
        await broker.clock.advance_ms(IDLE_MS)
        assert await broker.components.cleanup.run_once() == []

    assert broker.components.links[QUEUE_PARTITION].waiting == 0
    assert broker.components.tracking.next_candidate_ms() is None


async def test_use_after_an_eviction_makes_the_queue_a_candidate_again(
    broker: IdleBroker,
) -> None:
    """I6: suppression ends when something happens."""
    await broker.idle_queue()
    await broker.components.cleanup.run_once()

    await broker.idle_queue()

    assert await broker.components.cleanup.run_once() == [EvictionOutcome.EVICTED]


async def test_every_outcome_has_a_name_on_the_wire() -> None:
    """I4: closed on both sides."""
    wire = {
        name.removeprefix("EVICTION_OUTCOME_")
        for name, _ in topic_pb2.EvictionOutcome.items()
        if not name.endswith("UNSPECIFIED")
    }

    assert wire == {outcome.value for outcome in EvictionOutcome}


async def tried(broker: IdleBroker, path: str) -> EvictionOutcome:
    """One attempt: over the wire, or as the cleanup loop makes it."""
    return await broker.try_evict() if path == "direct" else await tried_inside(broker, path)


async def tried_inside(broker: IdleBroker, path: str) -> EvictionOutcome:
    if path == "direct":
        return await broker.components.cleanup.evict(KEY)
    (outcome,) = set(await broker.components.cleanup.run_once())
    return outcome
