"""A client that lost its queue is notified, is refused, and spends no credit (E2, E3, E5)."""

import asyncio

from tests.service.exclusive.conftest import NewClient, Start
from tests.support.exclusive_broker import OTHER_QUEUE, QUEUE, ExclusiveBroker
from tests.support.exclusive_clients import (
    ACTIVE,
    EVICTED,
    NOT_SUBSCRIBED,
    REMOVE,
    RESYNC_REQUIRED,
    subscribe,
)
from tests.support.local_broker import payloads_of, run_of, until
from tidemark.clock import ManualClock

# --- being told -----------------------------------------------------------------------------------


async def test_the_old_owner_is_told_once_when_it_happens(broker: ExclusiveBroker) -> None:
    """E2: the marker is there before the notice, so a client with a notice is also refused."""
    ada, bob = await broker.session_client("ada"), await broker.session_client("bob")
    await subscribe(ada, QUEUE)

    epoch = await subscribe(bob, QUEUE)

    (notice,) = await ada.until_told()
    assert (notice.group, notice.lmq_name) == ("default", QUEUE)
    assert (notice.state, notice.epoch) == (EVICTED, epoch)
    assert (await broker.unary_client("ada").pull(QUEUE)).subscription_state == EVICTED
    await ada.round_trip()
    assert len(ada.session.unsubscribed) == 1
    assert bob.session.unsubscribed == []


async def test_a_heartbeat_that_reports_a_lost_queue_is_told_again_every_time(
    client: NewClient,
) -> None:
    """E5."""
    ada, bob = await client("ada"), await client("bob")
    held = {QUEUE: await subscribe(ada, QUEUE), OTHER_QUEUE: await subscribe(ada, OTHER_QUEUE)}
    epoch = await subscribe(bob, QUEUE)
    await ada.sync(REMOVE)  # a notice of the eviction itself is read by now

    for _ in range(3):
        (notice,) = await ada.report(held)

        assert (notice.lmq_name, notice.state, notice.epoch) == (QUEUE, EVICTED, epoch)


async def test_a_heartbeat_that_reports_what_the_broker_does_not_know_asks_for_a_resync(
    client: NewClient,
) -> None:
    """E5, E7."""
    ada = await client("ada")

    (notice,) = await ada.report({QUEUE: 7})

    assert (notice.lmq_name, notice.state, notice.epoch) == (QUEUE, RESYNC_REQUIRED, 0)


# --- pulls ----------------------------------------------------------------------------------------


async def test_a_pull_says_where_the_client_stands(broker: ExclusiveBroker) -> None:
    """E3."""
    ada, bob, eve = (broker.unary_client(name) for name in ("ada", "bob", "eve"))

    assert (await ada.pull(QUEUE)).subscription_state == RESYNC_REQUIRED
    await subscribe(ada, QUEUE)
    assert (await ada.pull(QUEUE)).subscription_state == ACTIVE
    assert (await eve.pull(QUEUE)).subscription_state == NOT_SUBSCRIBED
    await subscribe(bob, QUEUE)
    assert (await ada.pull(QUEUE)).subscription_state == EVICTED
    assert (await bob.pull(QUEUE)).subscription_state == ACTIVE


async def test_a_rejected_pull_waits_as_an_empty_one_does(start: Start, clock: ManualClock) -> None:
    """E3: a client that does not look at the state needs no change."""
    broker = await start(clock)
    ada, bob = broker.unary_client("ada"), broker.unary_client("bob")
    await subscribe(ada, QUEUE)
    await subscribe(bob, QUEUE)
    await broker.publish(run_of(QUEUE, b"1"))
    began_ms = clock.monotonic_ms()
    pull = asyncio.create_task(ada.pull(QUEUE, wait_ms=700))

    async def answered() -> bool:
        await clock.advance_ms(10)
        return pull.done()

    await until(answered)

    answer = await pull
    assert clock.monotonic_ms() - began_ms >= 700
    assert list(answer.deliveries) == []
    assert answer.subscription_state == EVICTED
    assert payloads_of(await bob.receive()) == [b"1"]


async def test_an_evicted_session_spends_no_credit(broker: ExclusiveBroker) -> None:
    """E3: with a credit of one, what it did not get on one queue is left for the other."""
    ada = await broker.session_client("ada", credit=1)
    bob = await broker.session_client("bob")
    await subscribe(ada, QUEUE)
    await subscribe(ada, OTHER_QUEUE)
    await subscribe(bob, QUEUE)
    await broker.publish(run_of(QUEUE, b"for bob"))
    assert payloads_of(await bob.receive()) == [b"for bob"]

    await broker.publish(run_of(OTHER_QUEUE, b"for ada"))

    assert payloads_of(await ada.receive()) == [b"for ada"]
