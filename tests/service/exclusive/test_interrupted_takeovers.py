"""Takeovers that are interrupted: the owner is read from storage (E9, E10)."""

import asyncio
from typing import Any

import pytest

from tests.service.exclusive.conftest import Start
from tests.support.exclusive_broker import QUEUE, ExclusiveBroker
from tests.support.exclusive_clients import ADD, EVICTED, TRANSFERRING, subscribe
from tests.support.faulty_engine import Fault, FaultyEngines
from tests.support.held_takeovers import (
    WAYS,
    gate_of,
    held_takeover,
    until_gone,
    until_published,
    until_transferring,
)
from tests.support.local_broker import in_time, payloads_of, run_of
from tidemark.api.broker.v1 import broker_pb2, topic_pb2
from tidemark.api.broker.v1.message_pb2 import Ack
from tidemark.api.broker.v1.subscription_pb2 import SubscriptionEntry, SubscriptionSync
from tidemark.clock import SystemClock
from tidemark.errors import CommitOutcomeUnknown, Unavailable


async def test_a_takeover_that_never_arrived_leaves_the_owner(broker: ExclusiveBroker) -> None:
    """E9: the owner was read from storage."""
    ada, bob = await broker.session_client("ada"), broker.unary_client("bob")
    epoch = await subscribe(ada, QUEUE)

    async with held_takeover(broker, bob, broker.link.requests) as subscribing:
        await broker.link.break_now()
        with pytest.raises(Unavailable):
            await subscribing

    await until_published(broker, b"1")
    (delivery,) = await ada.receive()
    assert (payloads_of([delivery]), delivery.epoch) == ([b"1"], epoch)
    assert ada.session.unsubscribed == []
    assert await subscribe(bob, QUEUE) > epoch


async def test_a_takeover_whose_answer_was_lost_evicts_the_owner_once_storage_was_read(
    broker: ExclusiveBroker,
) -> None:
    """E2, E9: the new owner has only to repeat its subscription."""
    ada, bob = await broker.session_client("ada"), broker.unary_client("bob")
    epoch = await subscribe(ada, QUEUE)

    async with held_takeover(broker, bob, broker.link.answers) as subscribing:
        await broker.link.break_now()
        with pytest.raises(Unavailable):
            await subscribing

    (notice,) = await ada.until_told()
    assert (notice.state, notice.epoch) == (EVICTED, epoch + 1)
    assert await subscribe(bob, QUEUE) > epoch + 1
    await broker.publish(run_of(QUEUE, b"1"))
    assert payloads_of(await bob.receive()) == [b"1"]
    assert await ada.arrived(QUEUE) == []


async def test_storage_that_restarts_in_the_middle_of_a_takeover_is_asked_who_owns(
    broker: ExclusiveBroker,
) -> None:
    """E9, E10: until then no client does."""
    ada, bob = await broker.session_client("ada"), broker.unary_client("bob")
    epoch = await subscribe(ada, QUEUE)
    await broker.publish(run_of(QUEUE, b"1"))
    (held,) = await ada.receive()

    async with held_takeover(broker, bob, broker.link.answers) as subscribing:
        await broker.link.break_now()
        await broker.stop_storage()
        with pytest.raises(Unavailable):
            await subscribing
        assert await ada.arrived(QUEUE) == []
        assert ada.session.unsubscribed == []
        await broker.start_storage()

    (notice,) = await ada.until_told()
    assert (notice.state, notice.epoch) == (EVICTED, epoch + 1)
    assert await ada.settle(held, Ack()) == "FENCED"
    assert await subscribe(bob, QUEUE) > epoch + 1
    assert payloads_of(await bob.receive()) == [b"1"]


@WAYS
async def test_a_client_that_goes_in_the_middle_of_its_takeover_blocks_no_other(
    broker: ExclusiveBroker, kind: str, way: str
) -> None:
    """E9: what it asked for is carried through, as if it had gone a moment later."""
    ada, cy = await broker.session_client("ada"), broker.unary_client("cy")
    epoch = await subscribe(ada, QUEUE)
    gate = gate_of(broker, way)
    gate.close()
    subscribing: asyncio.Future[Any]
    if kind == "session":
        bob = await broker.session_client("bob")
        subscribing = asyncio.create_task(subscribe(bob, QUEUE))
        await until_transferring(broker, "bob")
        await bob.leave()
    else:
        sync = SubscriptionSync(mode=ADD, entries=[SubscriptionEntry(lmq_name=QUEUE)])
        request = broker_pb2.SyncSubscriptionsRequest(client_id="bob", sync=sync)
        call = broker.api.SyncSubscriptions(request)
        subscribing = asyncio.ensure_future(call)
        await until_transferring(broker, "bob")
        call.cancel()
    await asyncio.wait({subscribing})
    assert subscribing.cancelled() or subscribing.exception() is not None
    await until_gone(broker, "bob")

    gate.let_go()

    (notice,) = await ada.until_told()
    assert (notice.state, notice.epoch) == (EVICTED, epoch + 1)
    assert await subscribe(cy, QUEUE) > epoch + 1
    await broker.publish(run_of(QUEUE, b"1"))
    assert payloads_of(await cy.receive()) == [b"1"]


async def test_a_takeover_that_was_lost_over_a_deleted_queue_is_resolved(
    broker: ExclusiveBroker,
) -> None:
    """E10: storage has never heard of the group of the new queue, and epochs grow all the same."""
    ada, bob = broker.unary_client("ada"), broker.unary_client("bob")
    epoch = await subscribe(ada, QUEUE)
    await broker.topics.DeleteQueue(topic_pb2.DeleteQueueRequest(lmq_name=QUEUE))
    await broker.publish(run_of(QUEUE, b"1"))

    async with held_takeover(broker, bob, broker.link.requests) as subscribing:
        await broker.link.break_now()
        with pytest.raises(Unavailable):
            await subscribing
    await until_published(broker, b"2")

    assert await subscribe(bob, QUEUE) > epoch
    assert payloads_of(await bob.receive(2)) == [b"1", b"2"]


@pytest.mark.parametrize("fault", Fault)
async def test_a_takeover_whose_commit_failed_stays_in_transfer_until_storage_was_read(
    start: Start, faulty_disks: list[FaultyEngines], fault: Fault
) -> None:
    """E9, S2: it may have been written or not, and until then no client is served."""
    broker = await start()
    (disk,) = faulty_disks
    ada, bob = await broker.session_client("ada"), broker.unary_client("bob")
    epoch = await subscribe(ada, QUEUE)
    await broker.publish(run_of(QUEUE, b"1"))
    (held,) = await ada.receive()
    disk.gate.clear()
    subscribing = asyncio.create_task(subscribe(bob, QUEUE))
    await in_time(disk.waiting.wait())
    looking = asyncio.create_task(bob.pull(QUEUE, wait_ms=500))  # tells the state of its end
    await until_transferring(broker, "bob")
    broker.link.requests.close()  # for the question who owns

    disk.next_commit = fault
    disk.gate.set()

    with pytest.raises(CommitOutcomeUnknown):
        await subscribing
    await in_time(broker.link.requests.until_held())
    assert (await looking).subscription_state == TRANSFERRING
    assert ada.session.unsubscribed == []
    broker.link.requests.let_go()
    if fault is Fault.AFTER_WRITING:
        (notice,) = await ada.until_told()
        assert (notice.state, notice.epoch) == (EVICTED, epoch + 1)
        assert await ada.settle(held, Ack()) == "FENCED"
        assert await subscribe(bob, QUEUE) > epoch + 1
        assert payloads_of(await bob.receive()) == [b"1"]
    else:
        while (reason := await ada.settle(held, Ack())) == "UNAVAILABLE":
            await SystemClock().sleep_ms(5)  # the link reconnects
        assert reason == ""
        await broker.publish(run_of(QUEUE, b"2"))
        assert payloads_of(await ada.receive()) == [b"2"]
        assert ada.session.unsubscribed == []
