"""What goes wrong elsewhere with exclusive queues and must not here; races by held-back frames.

The numbers are those of the list in docs/EXCLUSIVE_QUEUES.md.
"""

import asyncio
from typing import TypeAlias

import pytest

from tests.service.exclusive.conftest import NewClient, Start
from tests.support.exclusive_broker import OTHER_QUEUE, QUEUE, ExclusiveBroker
from tests.support.exclusive_clients import ACTIVE, EVICTED, NOT_SUBSCRIBED, resync, subscribe
from tests.support.held_takeovers import (
    WAYS,
    gate_of,
    held_takeover,
    until_gone,
    until_transferring,
)
from tests.support.local_broker import in_time, payloads_of, run_of, until
from tidemark.api.broker.v1 import broker_pb2
from tidemark.api.broker.v1.message_pb2 import Ack, Extend
from tidemark.clock import ManualClock

pytestmark = pytest.mark.slow

PullTask: TypeAlias = "asyncio.Task[broker_pb2.PullResponse]"


# --- 1 --------------------------------------------------------------------------------------------


@WAYS
async def test_a_pull_that_passed_the_door_brings_nothing_once_another_owns(
    broker: ExclusiveBroker, way: str
) -> None:
    """E9: hole 1. The check and the read are two steps; the epoch ties them together."""
    ada, bob = broker.unary_client("ada"), broker.unary_client("bob")
    await subscribe(ada, QUEUE)
    await broker.publish(run_of(QUEUE, b"1"))
    gate = gate_of(broker, way)
    gate.close()
    pull = asyncio.create_task(ada.pull(QUEUE))
    await in_time(gate.until_held())
    subscribing = asyncio.create_task(subscribe(bob, QUEUE))
    await until_transferring(broker, "bob")

    gate.let_go()

    epoch = await subscribing
    answer = await pull
    assert list(answer.deliveries) == []
    (delivery,) = await bob.receive()
    assert (payloads_of([delivery]), delivery.epoch) == ([b"1"], epoch)
    assert (await ada.pull(QUEUE)).subscription_state == EVICTED


@WAYS
async def test_what_was_on_its_way_to_a_session_is_not_delivered_once_another_owns(
    broker: ExclusiveBroker, way: str
) -> None:
    """E9: hole 1. The answer for the lower epoch is discarded, and costs no credit."""
    ada = await broker.session_client("ada", credit=0)
    bob = await broker.session_client("bob")
    await subscribe(ada, QUEUE)
    await broker.publish(run_of(QUEUE, b"1"))
    gate = gate_of(broker, way)
    gate.close()
    ada.consumer.give_credit(1)
    await in_time(gate.until_held())
    subscribing = asyncio.create_task(subscribe(bob, QUEUE))
    await until_transferring(broker, "bob")

    gate.let_go()

    epoch = await subscribing
    (delivery,) = await bob.receive()
    assert (payloads_of([delivery]), delivery.epoch) == ([b"1"], epoch)
    assert await ada.arrived(QUEUE) == []
    await subscribe(ada, "own/other")
    await broker.publish(run_of("own/other", b"2"))
    assert payloads_of(await ada.receive()) == [b"2"]


async def test_nothing_is_delivered_to_anybody_during_the_transfer(broker: ExclusiveBroker) -> None:
    """E9."""
    ada, bob = await broker.session_client("ada"), broker.unary_client("bob")
    await subscribe(ada, QUEUE)
    await broker.publish(run_of("own/elsewhere", b"so that the topic is known"))

    async with held_takeover(broker, bob, broker.link.requests) as subscribing:
        publishing = asyncio.create_task(broker.publish(run_of(QUEUE, b"1")))
        assert (await broker.unary_client("ada").pull(QUEUE)).subscription_state == NOT_SUBSCRIBED
        assert await ada.arrived(QUEUE) == []

    await subscribing
    await publishing
    assert payloads_of(await bob.receive()) == [b"1"]
    assert await ada.arrived(QUEUE) == []


# --- 2 --------------------------------------------------------------------------------------------


async def test_many_that_race_end_with_one_owner(
    broker: ExclusiveBroker, client: NewClient
) -> None:
    """E10: hole 2."""
    racing = [await client(f"racer-{number}") for number in range(8)]
    broker.link.requests.close()
    subscribing = [asyncio.create_task(subscribe(each, QUEUE)) for each in racing]
    await in_time(broker.link.requests.until_held())

    broker.link.requests.let_go()

    epochs = await asyncio.gather(*subscribing)
    assert len(set(epochs)) == len(racing)
    held = dict(zip((each.client_id for each in racing), epochs, strict=True))
    owner = max(held, key=lambda each: held[each])
    for each in racing:
        ((state, _),) = await resync(each, {QUEUE: held[each.client_id]})
        assert state == (ACTIVE if each.client_id == owner else EVICTED)
    await broker.publish(run_of(QUEUE, b"1"))
    (winner,) = (each for each in racing if each.client_id == owner)
    assert payloads_of(await winner.receive()) == [b"1"]
    for each in racing:
        assert await each.arrived(QUEUE) == []


async def test_a_second_subscriber_waits_for_the_takeover_of_the_first(
    broker: ExclusiveBroker, client: NewClient
) -> None:
    """E9, E10: hole 2. Each evicts the one before it; no client is evicted or registered twice."""
    ada = await broker.session_client("ada")
    bob, cy = await broker.session_client("bob"), await client("cy")
    first = await subscribe(ada, QUEUE)

    async with held_takeover(broker, bob, broker.link.answers) as bobs:
        cys = asyncio.create_task(subscribe(cy, QUEUE))
        # Cy's call has arrived by the time at which one that was sent after it is answered.
        await until_gone(broker, "cy")
        assert (await broker.unary_client("cy").pull(QUEUE)).subscription_state == NOT_SUBSCRIBED

    assert (await bobs, await cys) == (first + 1, first + 2)
    (told,) = await ada.until_told()
    assert (told.state, told.epoch) == (EVICTED, first + 1)
    (told,) = await bob.until_told()
    assert (told.state, told.epoch) == (EVICTED, first + 2)
    await broker.publish(run_of(QUEUE, b"1"))
    assert payloads_of(await cy.receive()) == [b"1"]
    assert await ada.arrived(QUEUE) == await bob.arrived(QUEUE) == []


# --- 3 and 4 --------------------------------------------------------------------------------------


async def test_a_stale_resync_after_a_reconnect_registers_no_client(
    broker: ExclusiveBroker,
) -> None:
    """E7: hole 3. The markers went with the connection; the epoch rejects it as well."""
    ada, bob = await broker.session_client("ada"), await broker.session_client("bob")
    stale = await subscribe(ada, QUEUE)
    epoch = await subscribe(bob, QUEUE)
    await ada.leave()
    again = await broker.session_client("ada")

    assert await resync(again, {QUEUE: stale}) == [(EVICTED, epoch)]

    (notice,) = await again.until_told()
    assert (notice.state, notice.epoch) == (EVICTED, epoch)
    await broker.publish(run_of(QUEUE, b"1"))
    assert payloads_of(await bob.receive()) == [b"1"]
    assert await again.arrived(QUEUE) == []
    assert bob.session.unsubscribed == []


@pytest.mark.parametrize("first", ["ada", "bob"])
async def test_a_stale_resync_after_a_broker_restart_registers_no_client(
    broker: ExclusiveBroker, client: NewClient, first: str
) -> None:
    """E7, E10: hole 4, in either order."""
    held = {name: await subscribe(await client(name), QUEUE) for name in ("ada", "bob")}

    await broker.restart_broker()
    again = {name: await client(name) for name in held}
    for name in sorted(held, reverse=first == "bob"):
        ((state, _),) = await resync(again[name], {QUEUE: held[name]})
        assert state == (ACTIVE if name == "bob" else EVICTED)

    await broker.publish(run_of(QUEUE, b"1"))
    (delivery,) = await again["bob"].receive()
    assert (payloads_of([delivery]), delivery.epoch) == ([b"1"], held["bob"])
    assert await again["ada"].arrived(QUEUE) == []


# --- 5 and 9 --------------------------------------------------------------------------------------


async def pull_that_waits(broker: ExclusiveBroker, client_id: str) -> PullTask:
    """A pull that has heard from storage that there is nothing: only a wake-up ends it."""
    broker.link.answers.close()
    pull = asyncio.create_task(broker.unary_client(client_id).pull(QUEUE, wait_ms=2_000))
    await in_time(broker.link.answers.until_held())
    broker.link.answers.let_go()
    await broker.publish(run_of(OTHER_QUEUE, b"whose answer comes after that of the pull"))
    return pull


async def at_its_end(pull: PullTask, clock: ManualClock) -> broker_pb2.PullResponse:
    """The answer of a pull that nothing wakes, once its time is over."""

    async def answered() -> bool:
        await clock.advance_ms(100)
        return pull.done()

    await until(answered)
    return await pull


async def test_a_new_message_wakes_the_owner_and_not_who_was_evicted(
    start: Start, clock: ManualClock
) -> None:
    """E9: hole 5. Both wait when it is published, and who was evicted came first."""
    broker = await start(clock)
    ada, bob = broker.unary_client("ada"), broker.unary_client("bob")
    await subscribe(ada, QUEUE)
    began_as_owner = await pull_that_waits(broker, "ada")
    await subscribe(bob, QUEUE)
    began_evicted = asyncio.create_task(ada.pull(QUEUE, wait_ms=2_000))
    waiting = await pull_that_waits(broker, "bob")

    await broker.publish(run_of(QUEUE, b"1"))

    assert payloads_of((await in_time(waiting)).deliveries) == [b"1"]
    for pull in (began_as_owner, began_evicted):
        answer = await at_its_end(pull, clock)
        assert (list(answer.deliveries), answer.subscription_state) == ([], EVICTED)


async def test_a_wake_up_in_the_middle_of_a_takeover_is_not_lost(
    start: Start, clock: ManualClock
) -> None:
    """E9: hole 5. The broker learns of the message before it learns the owner."""
    broker = await start(clock)
    ada, bob = broker.unary_client("ada"), await broker.session_client("bob")
    await subscribe(ada, QUEUE)
    pull = await pull_that_waits(broker, "ada")
    broker.link.answers.close()
    publishing = asyncio.create_task(broker.publish(run_of(QUEUE, b"1")))
    await in_time(broker.link.answers.until_held())
    subscribing = asyncio.create_task(subscribe(bob, QUEUE))
    await until_transferring(broker, "bob")

    broker.link.answers.let_go()

    epoch = await subscribing
    (delivery,) = await bob.receive()
    assert (payloads_of([delivery]), delivery.epoch) == ([b"1"], epoch)
    assert list((await at_its_end(pull, clock)).deliveries) == []
    await publishing


async def test_a_client_that_ignores_notices_disturbs_no_other(
    broker: ExclusiveBroker, client: NewClient
) -> None:
    """E3, E5: hole 9. It goes on pulling and reporting; the owner gets every message at once."""
    deaf, bob = await client("deaf"), await client("bob")
    held = {QUEUE: await subscribe(deaf, QUEUE)}
    await subscribe(bob, QUEUE)
    reader = broker.unary_client("deaf")
    await deaf.arrived(QUEUE)  # the notice of the eviction itself is read by now

    for number in range(20):
        pulling = asyncio.create_task(reader.pull(QUEUE, wait_ms=20))
        assert [notice.state for notice in await deaf.report(held)] == [EVICTED]
        await broker.publish(run_of(QUEUE, b"%d" % number))

        (delivery,) = await bob.receive()

        assert payloads_of([delivery]) == [b"%d" % number]
        assert await bob.settle(delivery, Ack()) == ""
        assert list((await pulling).deliveries) == []
    assert await deaf.arrived(QUEUE) == []


# --- 6 --------------------------------------------------------------------------------------------


async def test_a_repeated_subscribe_by_the_owner_changes_nothing(
    broker: ExclusiveBroker, client: NewClient
) -> None:
    """E7: hole 6, one after the other and all at once."""
    ada = await client("ada")
    epoch = await subscribe(ada, QUEUE)
    await broker.publish(run_of(QUEUE, b"1"))
    (held,) = await ada.receive()

    assert await subscribe(ada, QUEUE) == epoch
    assert await asyncio.gather(*(subscribe(ada, QUEUE) for _ in range(5))) == [epoch] * 5

    assert await ada.report({QUEUE: epoch}) == []
    assert await ada.settle(held, Ack()) == ""
    await broker.publish(run_of(QUEUE, b"2"))
    assert payloads_of(await ada.receive()) == [b"2"]


async def test_a_repeated_subscribe_leaves_the_owners_waiting_pull_alone(
    broker: ExclusiveBroker,
) -> None:
    """E7: holes 5 and 6. The pull waits on, and is woken."""
    ada = broker.unary_client("ada")
    await subscribe(ada, QUEUE)
    broker.link.answers.close()
    waiting = asyncio.create_task(ada.pull(QUEUE, wait_ms=60_000))
    await in_time(broker.link.answers.until_held())
    broker.link.answers.let_go()

    await subscribe(ada, QUEUE)
    await broker.publish(run_of(QUEUE, b"1"))

    assert payloads_of((await in_time(waiting)).deliveries) == [b"1"]


# --- 7 and 8 --------------------------------------------------------------------------------------


async def test_a_stale_ack_after_everything_was_restarted_advances_nothing(
    broker: ExclusiveBroker,
) -> None:
    """E8: hole 7."""
    ada, bob = broker.unary_client("ada"), broker.unary_client("bob")
    await subscribe(ada, QUEUE)
    await broker.publish(run_of(QUEUE, b"1", b"2"))
    (stale,) = await ada.receive(2)
    epoch = await subscribe(bob, QUEUE)
    await broker.stop_broker()
    await broker.stop_storage()
    await broker.start_storage()
    await broker.start_broker()

    assert await ada.settle(stale, Ack()) == "FENCED"
    assert await resync(bob, {QUEUE: epoch}) == [(ACTIVE, epoch)]
    assert await ada.settle(stale, Ack()) == "FENCED"

    assert payloads_of(await bob.receive(2)) == [b"1", b"2"]


@WAYS
@pytest.mark.parametrize("action", [Ack(), Extend(visibility_ms=60_000)], ids=["ack", "extend"])
async def test_a_settle_that_comes_after_the_takeover_is_fenced(
    broker: ExclusiveBroker, client: NewClient, way: str, action: Ack | Extend
) -> None:
    """E8: holes 7 and 8. It carries the epoch of its reservation, never that of a newer owner."""
    ada, bob = await client("ada"), await client("bob")
    await subscribe(ada, QUEUE)
    await broker.publish(run_of(QUEUE, b"1"))
    (old,) = await ada.receive()

    async with held_takeover(broker, bob, gate_of(broker, way)) as subscribing:
        settling = asyncio.create_task(ada.settle(old, action))
        await broker.unary_client("ada").pull(QUEUE)

    assert await settling == "FENCED"
    epoch = await subscribing
    (new,) = await bob.receive()
    assert (payloads_of([new]), new.epoch) == ([b"1"], epoch)
    assert await bob.settle(new, Ack()) == ""


async def test_an_ack_that_comes_before_the_takeover_counts(
    broker: ExclusiveBroker, client: NewClient
) -> None:
    """E8: the owner was the owner when storage heard of it."""
    ada, bob = await client("ada"), await client("bob")
    await subscribe(ada, QUEUE)
    await broker.publish(run_of(QUEUE, b"1"))
    (held,) = await ada.receive()
    broker.link.requests.close()
    settling = asyncio.create_task(ada.settle(held, Ack()))
    await in_time(broker.link.requests.until_held())

    subscribing = asyncio.create_task(subscribe(bob, QUEUE))
    await until_transferring(broker, "bob")
    broker.link.requests.let_go()

    assert await settling == ""
    await subscribing
    await broker.publish(run_of(QUEUE, b"2"))
    assert payloads_of(await bob.receive()) == [b"2"]
