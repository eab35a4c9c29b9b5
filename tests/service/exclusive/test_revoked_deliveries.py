"""What an evicted client still holds: it counts for nothing and is forgotten in time (I4)."""

import asyncio

import pytest

from tests.service.exclusive.conftest import Start
from tests.support.exclusive_broker import QUEUE, ExclusiveBroker
from tests.support.exclusive_clients import REMOVE, subscribe
from tests.support.held_takeovers import held_takeover
from tests.support.local_broker import in_time, run_of, until
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.broker.v1.message_pb2 import Ack
from tidemark.api.broker.v1.subscription_pb2 import SubscriptionEntry
from tidemark.clock import ManualClock
from tidemark.errors import Unavailable


async def test_a_broker_that_stops_waits_for_nothing_that_was_revoked(
    start: Start, clock: ManualClock
) -> None:
    """E9: who was evicted has nothing to settle, so it needs no grace. Time stands still."""
    broker = await start(clock)
    ada, bob = await broker.session_client("ada"), broker.unary_client("bob")
    await subscribe(ada, QUEUE)
    await broker.publish(run_of(QUEUE, b"1"))
    await ada.receive()
    await subscribe(bob, QUEUE)

    stopping = asyncio.create_task(broker.server.stop(60_000))

    await in_time(ada.session.until_ended())
    await stopping


async def test_revoked_tags_are_remembered_up_to_a_bound(
    broker: ExclusiveBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E8: a client that is evicted repeatedly and settles nothing does not cost ever more."""
    monkeypatch.setattr("broker_svc.consume.deliveries.ENDED_MAX", 2)
    ada, bob = await broker.session_client("ada"), broker.unary_client("bob")
    await broker.publish(run_of(QUEUE, b"1"))
    held = []
    for _ in range(3):
        await subscribe(ada, QUEUE)
        held += await ada.receive()
        await subscribe(bob, QUEUE)

    refusals = [await ada.settle(each, Ack()) for each in held]

    assert refusals == ["UNKNOWN_DELIVERY_TAG", "FENCED", "FENCED"]


# --- answers that are lost -----------------------------------------------------------------------


async def published_by_one_that_leaves(broker: ExclusiveBroker) -> None:
    """Its publisher must not keep the queue loaded."""
    changed = topic_pb2.UpdateTopicRequest(
        name="own", settings=topic_pb2.TopicSettings(idle_after_ms=100)
    )
    changed.update_mask.paths.append("idle_after_ms")
    await broker.topics.UpdateTopic(changed)
    session = await broker.session("publisher")
    await session.publish(QUEUE, [b"1"])
    await session.close()


async def outcome_once_idle(broker: ExclusiveBroker) -> str:
    """What becomes of the queue after its idle window."""
    outcomes = [""]

    async def idle() -> bool:
        request = topic_pb2.TryEvictInactiveQueueRequest(lmq_name=QUEUE)
        outcome = (await broker.topics.TryEvictInactiveQueue(request)).outcome
        name = topic_pb2.EvictionOutcome.Name(outcome)
        outcomes.append(name.removeprefix("EVICTION_OUTCOME_"))
        return outcomes[-1] not in ("ACTIVE", "NOT_IDLE_ENOUGH")

    await until(idle)
    return outcomes[-1]


async def test_what_a_takeover_revoked_whose_answer_was_lost_keeps_no_queue_loaded(
    broker: ExclusiveBroker,
) -> None:
    """I4, E9: the evicted client stays and settles nothing."""
    ada, bob = await broker.session_client("ada"), broker.unary_client("bob")
    await subscribe(ada, QUEUE)
    await published_by_one_that_leaves(broker)
    (held,) = await ada.receive()
    async with held_takeover(broker, bob, broker.link.answers) as subscribing:
        await broker.link.break_now()
        with pytest.raises(Unavailable):
            await subscribing
    await ada.until_told()

    await subscribe(bob, QUEUE)
    await bob.sync(REMOVE, SubscriptionEntry(lmq_name=QUEUE))

    assert await outcome_once_idle(broker) in ("EVICTED", "NOT_MATERIALIZED")
    assert await ada.settle(held, Ack()) == "FENCED"


async def test_what_a_removal_revoked_whose_answer_was_lost_keeps_no_queue_loaded(
    broker: ExclusiveBroker,
) -> None:
    """I4: the removal is repeated; storage has nothing left to revoke."""
    ada = await broker.session_client("ada")
    await subscribe(ada, QUEUE)
    await published_by_one_that_leaves(broker)
    (held,) = await ada.receive()
    broker.link.answers.close()
    removing = asyncio.create_task(ada.sync(REMOVE, SubscriptionEntry(lmq_name=QUEUE)))
    await in_time(broker.link.answers.until_held())
    await broker.link.break_now()
    broker.link.answers.let_go()
    (failed,) = await removing
    assert failed.HasField("error")

    async def removed() -> bool:
        (result,) = await ada.sync(REMOVE, SubscriptionEntry(lmq_name=QUEUE))
        return not result.HasField("error")

    await until(removed)

    assert await outcome_once_idle(broker) in ("EVICTED", "NOT_MATERIALIZED")
    assert await ada.settle(held, Ack()) == "FENCED"
