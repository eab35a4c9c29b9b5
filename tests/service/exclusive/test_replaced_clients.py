"""Several processes under one client id: the last to subscribe owns, others are notified (E7)."""

import asyncio

import pytest

from tests.service.exclusive.conftest import Start
from tests.support.exclusive_broker import QUEUE, ExclusiveBroker
from tests.support.exclusive_clients import (
    ACTIVE,
    REMOVE,
    REPLACED,
    RESYNC_REQUIRED,
    Client,
    resync,
    subscribe,
)
from tests.support.held_takeovers import held_takeover
from tests.support.local_broker import in_time, payloads_of, run_of
from tidemark.api.broker.v1.message_pb2 import Ack
from tidemark.api.broker.v1.subscription_pb2 import SubscriptionEntry
from tidemark.clock import ManualClock
from tidemark.errors import Unavailable


async def incarnation(broker: ExclusiveBroker, kind: str) -> Client:
    """One more incarnation of the client `ada`."""
    if kind == "session":
        return await broker.session_client("ada")
    return broker.unary_client("ada")


async def test_a_session_is_told_that_another_of_its_client_id_has_replaced_it(
    broker: ExclusiveBroker, kind: str
) -> None:
    """E1, E7: by the epoch that fences it; the other one gets no notice, and all messages."""
    first = await broker.session_client("ada")
    held = {QUEUE: await subscribe(first, QUEUE)}
    second = await incarnation(broker, kind)

    epoch = await subscribe(second, QUEUE)

    assert epoch > held[QUEUE]
    (notice,) = await first.until_told()
    assert (notice.group, notice.lmq_name) == ("default", QUEUE)
    assert (notice.state, notice.epoch) == (REPLACED, epoch)
    assert await second.report({QUEUE: epoch}) == []
    await broker.publish(run_of(QUEUE, b"1"))
    assert payloads_of(await second.receive()) == [b"1"]
    assert await first.arrived(QUEUE) == []


async def test_a_replaced_client_is_not_marked_as_evicted(broker: ExclusiveBroker) -> None:
    """E2, E4: a marker would shut out the incarnation that owns."""
    first, second = await broker.session_client("ada"), broker.unary_client("ada")
    await subscribe(first, QUEUE)

    await subscribe(second, QUEUE)

    await first.until_told()
    assert (await second.pull(QUEUE)).subscription_state == ACTIVE


async def test_a_replaced_client_that_goes_on_reporting_is_told_again_every_time(
    broker: ExclusiveBroker, kind: str
) -> None:
    """E5: also one that cannot be notified by itself."""
    first = await incarnation(broker, kind)
    held = {QUEUE: await subscribe(first, QUEUE)}
    second = await broker.session_client("ada")
    epoch = await subscribe(second, QUEUE)
    await first.sync(REMOVE)  # a notice of the replacement itself is read by now

    for _ in range(3):
        (notice,) = await first.report(held)

        assert (notice.lmq_name, notice.state, notice.epoch) == (QUEUE, REPLACED, epoch)
    assert second.session.unsubscribed == []


@pytest.mark.parametrize("restarted", [False, True], ids=["", "broker restarted"])
async def test_a_replaced_client_that_reconnects_does_not_steal_the_queue_back(
    broker: ExclusiveBroker, restarted: bool
) -> None:
    """E7, E8, E10: its link broke before the notice; its resync has an old epoch."""
    first, second = await broker.session_client("ada"), await broker.session_client("ada")
    stale = await subscribe(first, QUEUE)
    epoch = await subscribe(second, QUEUE)
    await first.leave()
    if restarted:
        await broker.restart_broker()
        second = await broker.session_client("ada")
    again = await broker.session_client("ada")

    assert await resync(again, {QUEUE: stale}) == [(REPLACED, epoch)]

    (notice,) = await again.until_told()
    assert (notice.state, notice.epoch) == (REPLACED, epoch)
    assert await resync(second, {QUEUE: epoch}) == [(ACTIVE, epoch)]
    await broker.publish(run_of(QUEUE, b"1"))
    assert payloads_of(await second.receive()) == [b"1"]
    assert await again.arrived(QUEUE) == []
    assert second.session.unsubscribed == []


async def test_what_a_replaced_client_holds_goes_to_the_one_that_replaced_it(
    broker: ExclusiveBroker, kind: str
) -> None:
    """E8, E9: now and untried; the ack of the other process is fenced."""
    first = await incarnation(broker, kind)
    await subscribe(first, QUEUE)
    await broker.publish(run_of(QUEUE, b"1"))
    (held,) = await first.receive()
    second = await broker.session_client("ada")

    epoch = await subscribe(second, QUEUE)

    (delivery,) = await second.receive()
    assert (payloads_of([delivery]), delivery.epoch, delivery.attempt_count) == ([b"1"], epoch, 0)
    assert await first.settle(held, Ack()) == "FENCED"
    assert await second.settle(delivery, Ack()) == ""


async def test_a_process_that_is_started_again_takes_over_from_its_dead_session(
    start: Start, clock: ManualClock
) -> None:
    """E1, V6: the broker has not noticed yet that the old one is gone, and when it does, the
    new one keeps the queue. Time stands still.
    """
    broker = await start(clock, client_timeout_ms=5_000)
    dead = await broker.session_client("ada")
    await subscribe(dead, QUEUE)
    await broker.publish(run_of(QUEUE, b"1"))
    await dead.receive()

    again = await broker.session_client("ada")
    epoch = await subscribe(again, QUEUE)

    assert payloads_of(await again.receive()) == [b"1"]
    await dead.leave()
    assert await again.report({QUEUE: epoch}) == []
    await broker.publish(run_of(QUEUE, b"2"))
    assert payloads_of(await again.receive()) == [b"2"]
    assert again.session.unsubscribed == []


async def test_a_reconnect_that_confirms_replaces_no_client(broker: ExclusiveBroker) -> None:
    """E7: the same epoch is the same process; its old connection gets no notice."""
    first = await broker.session_client("ada")
    epoch = await subscribe(first, QUEUE)
    second = await broker.session_client("ada")

    assert await resync(second, {QUEUE: epoch}) == [(ACTIVE, epoch)]

    assert await subscribe(second, QUEUE) == epoch
    await first.round_trip()
    assert first.session.unsubscribed == []


async def test_a_heartbeat_with_the_epoch_of_another_connection_asks_for_a_resync(
    broker: ExclusiveBroker,
) -> None:
    """E5, E7: the process has confirmed on another connection; this one does not know."""
    first, second = await broker.session_client("ada"), await broker.session_client("ada")
    epoch = await subscribe(first, QUEUE)
    await resync(second, {QUEUE: epoch})

    (notice,) = await first.report({QUEUE: epoch})

    assert (notice.state, notice.epoch) == (RESYNC_REQUIRED, 0)


async def test_a_replacement_whose_answer_was_lost_is_told_once_storage_was_read(
    broker: ExclusiveBroker,
) -> None:
    """E2, E9: and the one that asked has only to ask again."""
    first, second = await broker.session_client("ada"), broker.unary_client("ada")
    epoch = await subscribe(first, QUEUE)

    async with held_takeover(broker, second, broker.link.answers) as subscribing:
        await broker.link.break_now()
        with pytest.raises(Unavailable):
            await subscribing

    (notice,) = await first.until_told()
    assert (notice.state, notice.epoch) == (REPLACED, epoch + 1)
    assert (await second.pull(QUEUE)).subscription_state == RESYNC_REQUIRED, "there is no marker"
    assert await subscribe(second, QUEUE) > epoch
    await broker.publish(run_of(QUEUE, b"1"))
    assert payloads_of(await second.receive()) == [b"1"]
    assert await first.arrived(QUEUE) == []


async def test_many_processes_under_one_client_id_that_race_end_with_one_owner(
    broker: ExclusiveBroker,
) -> None:
    """E10: each has an epoch of its own, and all but the last are notified."""
    racing = [await broker.session_client("ada") for _ in range(6)]
    broker.link.requests.close()
    subscribing = [asyncio.create_task(subscribe(each, QUEUE)) for each in racing]
    await in_time(broker.link.requests.until_held())

    broker.link.requests.let_go()

    epochs = await asyncio.gather(*subscribing)
    assert len(set(epochs)) == len(racing)
    last = max(range(len(racing)), key=lambda at: epochs[at])
    for at, each in enumerate(racing):
        if at != last:
            (notice,) = await each.until_told()
            assert notice.state == REPLACED
            assert notice.epoch > epochs[at]
    await broker.publish(run_of(QUEUE, b"1"))
    assert payloads_of(await racing[last].receive()) == [b"1"]
    assert racing[last].session.unsubscribed == []


async def test_a_late_removal_of_a_replaced_client_gives_up_nothing(
    broker: ExclusiveBroker,
) -> None:
    """E8: it names the epoch it had; the owner is just between two connections."""
    first, second = await broker.session_client("ada"), await broker.session_client("ada")
    stale = await subscribe(first, QUEUE)
    epoch = await subscribe(second, QUEUE)
    await second.leave()

    await first.sync(REMOVE, SubscriptionEntry(lmq_name=QUEUE, epoch=stale))

    again = await broker.session_client("ada")
    assert await resync(again, {QUEUE: epoch}) == [(ACTIVE, epoch)]
