"""One owner and only one, over takeovers, restarts and deletions (E1, E8, E9, E10)."""

from typing import Any

import pytest

from tests.service.exclusive.conftest import NewClient
from tests.support.exclusive_broker import OTHER_QUEUE, QUEUE, ExclusiveBroker
from tests.support.exclusive_clients import (
    ACTIVE,
    EVICTED,
    NOT_SUBSCRIBED,
    REMOVE,
    REMOVE_ALL,
    RESYNC_REQUIRED,
    resync,
    subscribe,
)
from tests.support.local_broker import payloads_of, run_of
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.broker.v1.message_pb2 import Ack, Extend, Nack
from tidemark.api.broker.v1.subscription_pb2 import SubscriptionEntry

# --- one owner ------------------------------------------------------------------------------------


async def test_a_new_subscriber_preempts_the_old(
    broker: ExclusiveBroker, client: NewClient
) -> None:
    """E1, E3, E9."""
    ada, bob = await client("ada"), await client("bob")
    first = await subscribe(ada, QUEUE)

    second = await subscribe(bob, QUEUE)
    await broker.publish(run_of(QUEUE, b"1"))

    assert second > first
    (delivery,) = await bob.receive()
    assert payloads_of([delivery]) == [b"1"]
    assert delivery.epoch == second
    assert await ada.arrived(QUEUE) == []


async def test_groups_have_an_owner_each(broker: ExclusiveBroker, client: NewClient) -> None:
    """E1."""
    ada, bob = await client("ada", "red"), await client("bob", "blue")
    await subscribe(ada, QUEUE)
    await subscribe(bob, QUEUE)

    await broker.publish(run_of(QUEUE, b"1"))

    assert payloads_of(await ada.receive()) == [b"1"]
    assert payloads_of(await bob.receive()) == [b"1"]


@pytest.mark.also_on_redis
async def test_what_the_old_owner_holds_goes_to_the_new_one_now(
    broker: ExclusiveBroker, client: NewClient
) -> None:
    """E8, E9: revoked in the commit that raises the epoch, and not counted as an attempt (V8)."""
    ada, bob = await client("ada"), await client("bob")
    await subscribe(ada, QUEUE)
    await broker.publish(run_of(QUEUE, b"1", b"2"))
    (old,) = await ada.receive(2)

    await subscribe(bob, QUEUE)

    (new,) = await bob.receive(2)
    assert payloads_of([new]) == [b"1", b"2"]
    assert new.epoch > old.epoch
    assert (new.attempt_count, new.delivery_count) == (0, 2)


@pytest.mark.parametrize(
    "action", [Ack(), Nack(), Extend(visibility_ms=60_000)], ids=["ack", "nack", "extend"]
)
@pytest.mark.also_on_redis
async def test_an_evicted_client_settles_nothing(
    broker: ExclusiveBroker, client: NewClient, action: Any
) -> None:
    """E8."""
    ada, bob = await client("ada"), await client("bob")
    await subscribe(ada, QUEUE)
    await broker.publish(run_of(QUEUE, b"1"))
    (old,) = await ada.receive()
    await subscribe(bob, QUEUE)
    (new,) = await bob.receive()

    assert await ada.settle(old, action) == "FENCED"

    assert (await broker.queue(QUEUE)).messages == 1
    assert await bob.settle(new, Ack()) == ""
    assert (await broker.queue(QUEUE)).messages == 0


async def test_an_owner_that_gives_up_leaves_its_messages_to_the_next(
    broker: ExclusiveBroker, client: NewClient
) -> None:
    ada, bob = await client("ada"), await client("bob")
    first = await subscribe(ada, QUEUE)
    await broker.publish(run_of(QUEUE, b"1"))
    (old,) = await ada.receive()

    (removed,) = await ada.sync(REMOVE, SubscriptionEntry(lmq_name=QUEUE))

    assert removed.state == NOT_SUBSCRIBED
    assert await ada.settle(old, Ack()) == "FENCED"
    assert await subscribe(bob, QUEUE) > first
    assert payloads_of(await bob.receive()) == [b"1"]
    assert await ada.report({}) == []


async def test_removing_everything_gives_up_every_queue(
    broker: ExclusiveBroker, client: NewClient
) -> None:
    ada = await client("ada")
    epochs = {name: await subscribe(ada, name) for name in (QUEUE, OTHER_QUEUE)}

    assert await ada.sync(REMOVE_ALL) == []

    assert await resync(ada, epochs) == [(EVICTED, 0), (EVICTED, 0)]
    del broker


# --- restarts -------------------------------------------------------------------------------------


async def test_after_a_broker_restart_the_owner_resyncs_and_goes_on(
    broker: ExclusiveBroker,
) -> None:
    """E10: nothing unsettled is skipped, and nothing settled comes again."""
    ada = await broker.session_client("ada", credit=1)
    epoch = await subscribe(ada, QUEUE)
    await broker.publish(run_of(QUEUE, b"1"), run_of(QUEUE, b"2"))
    (first,) = await ada.receive()
    assert await ada.settle(first, Ack()) == ""

    await broker.restart_broker()
    again = await broker.session_client("ada")
    assert (await broker.unary_client("ada").pull(QUEUE)).subscription_state == RESYNC_REQUIRED

    assert await resync(again, {QUEUE: epoch}) == [(ACTIVE, epoch)]
    (delivery,) = await again.receive()
    assert (payloads_of([delivery]), delivery.epoch) == ([b"2"], epoch)
    assert delivery.attempt_count == 0


async def test_receipts_of_a_unary_owner_stay_good_over_a_broker_restart(
    broker: ExclusiveBroker,
) -> None:
    """E10."""
    ada = broker.unary_client("ada")
    epoch = await subscribe(ada, QUEUE)
    await broker.publish(run_of(QUEUE, b"1"))
    (held,) = await ada.receive()

    await broker.restart_broker()

    assert await ada.settle(held, Ack()) == ""
    assert await resync(ada, {QUEUE: epoch}) == [(ACTIVE, epoch)]
    await broker.publish(run_of(QUEUE, b"2"))
    assert payloads_of(await ada.receive()) == [b"2"]


@pytest.mark.also_on_redis
async def test_epochs_grow_over_restarts_and_over_deletion_of_the_queue(
    broker: ExclusiveBroker, client: NewClient
) -> None:
    """E10."""
    epochs = [await subscribe(await client("ada"), QUEUE)]

    await broker.restart_broker()
    epochs.append(await subscribe(await client("bob"), QUEUE))
    await broker.topics.DeleteQueue(topic_pb2.DeleteQueueRequest(lmq_name=QUEUE))
    epochs.append(await subscribe(await client("cy"), QUEUE))
    await broker.stop_broker()
    await broker.stop_storage()
    await broker.start_storage()
    await broker.start_broker()
    epochs.append(await subscribe(await client("ada"), QUEUE))

    assert epochs == sorted(set(epochs))


async def test_a_receipt_from_before_the_queue_was_deleted_settles_nothing_of_the_new_one(
    broker: ExclusiveBroker,
) -> None:
    """E8, E10."""
    ada = broker.unary_client("ada")
    await subscribe(ada, QUEUE)
    await broker.publish(run_of(QUEUE, b"old"))
    (old,) = await ada.receive()
    await broker.topics.DeleteQueue(topic_pb2.DeleteQueueRequest(lmq_name=QUEUE))
    bob = broker.unary_client("bob")
    await subscribe(bob, QUEUE)
    await broker.publish(run_of(QUEUE, b"new"))

    assert await ada.settle(old, Ack()) != ""

    assert payloads_of(await bob.receive()) == [b"new"]
