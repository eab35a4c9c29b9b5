"""Ownership that ends without a takeover: deleted queues, removals that fail, owners that go."""

import asyncio

import pytest

from tests.service.exclusive.conftest import NewClient, Start
from tests.support.exclusive_broker import QUEUE, ExclusiveBroker
from tests.support.exclusive_clients import (
    ACTIVE,
    EVICTED,
    NOT_SUBSCRIBED,
    REMOVE,
    REMOVE_ALL,
    RESYNC_REQUIRED,
    Client,
    resync,
    subscribe,
)
from tests.support.local_broker import in_time, payloads_of, run_of, until
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.broker.v1.subscription_pb2 import SubscriptionEntry
from tidemark.api.storage.v1.storage_pb2 import ClaimPartitionRequest
from tidemark.clock import ManualClock
from tidemark.errors import Unavailable
from tidemark.names import partition_of
from tidemark.rpc import from_status
from tidemark.settings import BrokerSettings

# --- the queue goes under its owner --------------------------------------------------------------


async def delete(broker: ExclusiveBroker, what: str) -> None:
    if what == "queue":
        await broker.topics.DeleteQueue(topic_pb2.DeleteQueueRequest(lmq_name=QUEUE))
    else:
        request = topic_pb2.DeleteGroupRequest(lmq_name=QUEUE, group="default")
        await broker.topics.DeleteGroup(request)


@pytest.mark.parametrize("what", ["queue", "group"])
async def test_a_session_whose_ownership_was_deleted_is_told_and_can_go_on(
    broker: ExclusiveBroker, what: str
) -> None:
    """E10: it does not starve, and no other client has taken the queue."""
    ada = await broker.session_client("ada")
    epoch = await subscribe(ada, QUEUE)

    await delete(broker, what)

    (notice,) = await ada.until_told()
    assert (notice.lmq_name, notice.state) == (QUEUE, RESYNC_REQUIRED)
    ((state, _),) = await resync(ada, {QUEUE: epoch})
    assert state == EVICTED
    assert await subscribe(ada, QUEUE) > epoch
    await broker.publish(run_of(QUEUE, b"1"))
    assert payloads_of(await ada.receive()) == [b"1"]


@pytest.mark.parametrize("what", ["queue", "group"])
async def test_a_pull_whose_ownership_was_deleted_says_so(
    broker: ExclusiveBroker, what: str
) -> None:
    """E3, E10."""
    ada = broker.unary_client("ada")
    epoch = await subscribe(ada, QUEUE)
    await delete(broker, what)

    async def resync_required() -> bool:
        return (await ada.pull(QUEUE)).subscription_state == RESYNC_REQUIRED

    await until(resync_required)

    assert await subscribe(ada, QUEUE) > epoch
    await broker.publish(run_of(QUEUE, b"1"))
    assert payloads_of(await ada.receive()) == [b"1"]


@pytest.mark.parametrize("what", ["queue", "group"])
async def test_pulls_on_their_way_while_ownership_is_deleted_are_empty(
    broker: ExclusiveBroker, what: str
) -> None:
    """E3: their reserves reach storage after the deletion, and are refused there. Some of the
    refusals arrive after the broker has ended the ownership."""
    ada = broker.unary_client("ada")
    for _ in range(5):
        await subscribe(ada, QUEUE)
        await delete(broker, what)

        states: set[int] = set()
        while states != {RESYNC_REQUIRED}:
            pulled = await asyncio.gather(*(ada.pull(QUEUE) for _ in range(20)))
            states = {each.subscription_state for each in pulled}
            assert not any(each.deliveries for each in pulled)


async def test_another_can_take_what_was_deleted(broker: ExclusiveBroker) -> None:
    """E10."""
    ada, bob = await broker.session_client("ada"), broker.unary_client("bob")
    epoch = await subscribe(ada, QUEUE)
    await delete(broker, "queue")

    assert await subscribe(bob, QUEUE) > epoch

    (notice, *_) = await ada.until_told()
    assert notice.state in (EVICTED, RESYNC_REQUIRED)
    await broker.publish(run_of(QUEUE, b"1"))
    assert payloads_of(await bob.receive()) == [b"1"]


# --- removing ------------------------------------------------------------------------------------


async def owner_in_storage(broker: ExclusiveBroker) -> str:
    request = topic_pb2.ListGroupsRequest(lmq_name=QUEUE)
    (group,) = (await broker.topics.ListGroups(request)).groups
    return group.owner_client_id


async def remove(client: Client, mode: int) -> None:
    entries = [SubscriptionEntry(lmq_name=QUEUE)] if mode == REMOVE else []
    for result in await client.sync(mode, *entries):
        if result.HasField("error"):
            raise from_status(result.error)
        assert result.state == NOT_SUBSCRIBED


@pytest.mark.parametrize("lost", ["requests", "answers"])
async def test_a_removal_that_failed_can_be_repeated(
    broker: ExclusiveBroker, client: NewClient, lost: str
) -> None:
    """E8: whether storage had heard of it or not, in the end no client owns."""
    ada, bob = await client("ada"), broker.unary_client("bob")
    epoch = await subscribe(ada, QUEUE)
    gate = broker.link.requests if lost == "requests" else broker.link.answers
    gate.close()
    removing = asyncio.create_task(remove(ada, REMOVE))
    await in_time(gate.until_held())
    await broker.link.break_now()
    with pytest.raises(Unavailable):
        await removing
    gate.let_go()

    async def removed() -> bool:
        try:
            await remove(ada, REMOVE)
        except Unavailable:  # the link is not up again
            return False
        return True

    await until(removed)

    assert await owner_in_storage(broker) == ""
    assert await subscribe(bob, QUEUE) > epoch


async def test_who_waits_while_the_owner_gives_up_becomes_the_owner(
    broker: ExclusiveBroker, client: NewClient
) -> None:
    """E10: the queue is not forgotten under the one who is next."""
    ada, bob = await client("ada"), await client("bob")
    epoch = await subscribe(ada, QUEUE)
    broker.link.answers.close()
    removing = asyncio.create_task(remove(ada, REMOVE))
    await in_time(broker.link.answers.until_held())
    subscribing = asyncio.create_task(subscribe(bob, QUEUE))
    for _ in range(3):  # bob's call has arrived by the time at which later ones are answered
        await broker.unary_client("bob").report({})

    broker.link.answers.let_go()

    await removing
    assert await subscribing > epoch
    await broker.publish(run_of(QUEUE, b"1"))
    assert payloads_of(await bob.receive()) == [b"1"]


@pytest.mark.parametrize("mode", [REMOVE, REMOVE_ALL], ids=["one", "all"])
async def test_who_removes_is_not_served_any_more(
    broker: ExclusiveBroker, client: NewClient, mode: int
) -> None:
    ada = await client("ada")
    await subscribe(ada, QUEUE)

    await remove(ada, mode)
    await broker.publish(run_of(QUEUE, b"1"))

    assert await owner_in_storage(broker) == ""
    assert await ada.arrived(QUEUE) == []


async def test_a_removal_after_a_broker_restart_gives_up_what_storage_holds(
    broker: ExclusiveBroker, client: NewClient
) -> None:
    """E8, E10."""
    await subscribe(await client("ada"), QUEUE)
    await broker.restart_broker()

    await remove(await client("ada"), REMOVE)

    assert await owner_in_storage(broker) == ""


async def test_a_removal_by_another_client_gives_up_nothing(
    broker: ExclusiveBroker, client: NewClient
) -> None:
    ada, bob = await client("ada"), await client("bob")
    await subscribe(ada, QUEUE)

    await remove(bob, REMOVE)

    assert await owner_in_storage(broker) == "ada"
    await broker.publish(run_of(QUEUE, b"1"))
    assert payloads_of(await ada.receive()) == [b"1"]


async def test_a_removal_by_another_incarnation_leaves_the_one_that_consumes(
    broker: ExclusiveBroker,
) -> None:
    """E7."""
    ada, unary = await broker.session_client("ada"), broker.unary_client("ada")
    await subscribe(ada, QUEUE)

    await remove(unary, REMOVE)

    assert await owner_in_storage(broker) == "ada"
    await broker.publish(run_of(QUEUE, b"1"))
    assert payloads_of(await ada.receive()) == [b"1"]


# --- partitions of other brokers -----------------------------------------------------------------


async def test_a_resync_confirms_what_is_here_though_something_went_to_another_broker(
    broker: ExclusiveBroker,
) -> None:
    """E7, S8: what the client holds elsewhere now is none of this broker's business."""
    ada = await broker.session_client("ada")
    partition = partition_of(QUEUE, broker.partitions)
    (here,) = broker.names_in(1 - partition, 1, topic="own")
    await subscribe(ada, QUEUE)
    epoch = await subscribe(ada, here)
    claim = ClaimPartitionRequest(
        partition=partition,
        cluster_id=BrokerSettings().cluster_id,
        broker_id="another",
        incarnation=1,
        broker_address="another:1",
        assignment_version=1,
    )
    await broker.storage.ClaimPartition(claim)

    async def moved() -> bool:
        return bool(ada.session.go_aways)

    await until(moved)

    assert await resync(ada, {here: epoch}) == [(ACTIVE, epoch)]


# --- incarnations --------------------------------------------------------------------------------


async def test_a_pull_is_served_only_in_the_incarnation_that_subscribed(
    broker: ExclusiveBroker,
) -> None:
    """E3, E7: the same client id is not enough; a resync moves the queue over."""
    ada, unary = await broker.session_client("ada", credit=0), broker.unary_client("ada")
    epoch = await subscribe(ada, QUEUE)
    await broker.publish(run_of(QUEUE, b"1"))

    refused = await unary.pull(QUEUE)

    assert (list(refused.deliveries), refused.subscription_state) == ([], RESYNC_REQUIRED)
    assert await resync(unary, {QUEUE: epoch}) == [(ACTIVE, epoch)]
    assert payloads_of(await unary.receive()) == [b"1"]


async def test_a_unary_owner_that_fell_silent_has_to_resync(
    start: Start, clock: ManualClock
) -> None:
    """E4, E7: the one that comes back is a new incarnation."""
    broker = await start(clock, client_timeout_ms=5_000)
    ada = broker.unary_client("ada")
    epoch = await subscribe(ada, QUEUE)
    await clock.advance_ms(7_000)

    assert (await ada.pull(QUEUE)).subscription_state == RESYNC_REQUIRED

    assert await resync(ada, {QUEUE: epoch}) == [(ACTIVE, epoch)]
    assert (await ada.pull(QUEUE)).subscription_state == ACTIVE
