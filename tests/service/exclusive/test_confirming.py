"""A resync confirms ownership and never takes it (E7)."""

import pytest

from tests.service.exclusive.conftest import NewClient
from tests.support.exclusive_broker import QUEUE, ExclusiveBroker
from tests.support.exclusive_clients import (
    ACTIVE,
    EVICTED,
    REPLACED,
    RESYNC_REQUIRED,
    resync,
    subscribe,
)
from tests.support.local_broker import payloads_of, run_of
from tidemark.names import partition_of


async def test_a_resync_by_the_owner_confirms(broker: ExclusiveBroker, client: NewClient) -> None:
    """E7."""
    ada = await client("ada")
    epoch = await subscribe(ada, QUEUE)

    assert await resync(ada, {QUEUE: epoch}) == [(ACTIVE, epoch)]

    await broker.publish(run_of(QUEUE, b"1"))
    assert payloads_of(await ada.receive()) == [b"1"]


@pytest.mark.parametrize("off_by", [-1, 1])
async def test_only_the_very_epoch_confirms(client: NewClient, off_by: int) -> None:
    """E7."""
    ada = await client("ada")
    epoch = await subscribe(ada, QUEUE)

    assert await resync(ada, {QUEUE: epoch + off_by}) == [(REPLACED, epoch)]

    assert await ada.arrived(QUEUE) == []


async def test_a_resync_never_takes_a_queue_without_an_owner(
    broker: ExclusiveBroker, client: NewClient
) -> None:
    """E7."""
    ada = await client("ada")
    await broker.publish(run_of(QUEUE, b"1"))

    ((state, _),) = await resync(ada, {QUEUE: 0})

    assert state == EVICTED
    assert await ada.arrived(QUEUE) == []


async def test_a_reconnect_is_a_new_incarnation_that_goes_on_by_resync(
    broker: ExclusiveBroker,
) -> None:
    """E7: nothing is delivered before; afterwards the epoch is the same, and none was evicted."""
    first = await broker.session_client("ada")
    epoch = await subscribe(first, QUEUE)
    second = await broker.session_client("ada")
    assert second.session.welcome.session_id != first.session.welcome.session_id
    await broker.publish(run_of(QUEUE, b"1"))
    assert payloads_of(await first.receive()) == [b"1"]
    assert await second.arrived(QUEUE) == []

    assert await resync(second, {QUEUE: epoch}) == [(ACTIVE, epoch)]

    await broker.publish(run_of(QUEUE, b"2"))
    (delivery,) = await second.receive()
    assert (payloads_of([delivery]), delivery.epoch) == ([b"2"], epoch)
    assert await first.arrived(QUEUE) == []
    assert first.session.unsubscribed == []
    await first.leave()  # the end of the old incarnation is not that of the new
    await broker.publish(run_of(QUEUE, b"3"))
    assert sorted(payloads_of(await second.receive(2))) == [b"1", b"3"]


async def test_a_stale_resync_does_not_evict_another_incarnation_that_owns(
    broker: ExclusiveBroker,
) -> None:
    """E3, E7: the client owns the queue, not under the epoch that one of its sessions has."""
    session, unary = await broker.session_client("ada"), broker.unary_client("ada")
    stale = await subscribe(session, QUEUE)
    await subscribe(broker.unary_client("bob"), QUEUE)
    epoch = await subscribe(unary, QUEUE)

    assert await resync(session, {QUEUE: stale}) == [(REPLACED, epoch)]

    assert (await unary.pull(QUEUE)).subscription_state == ACTIVE
    await broker.publish(run_of(QUEUE, b"1"))
    assert payloads_of(await unary.receive()) == [b"1"]


async def test_who_is_told_that_it_was_evicted_hears_by_which_epoch_also_after_a_restart(
    broker: ExclusiveBroker, client: NewClient
) -> None:
    """E5, E10: storage knows the owner; no client has asked this broker yet."""
    stale = await subscribe(await client("ada"), QUEUE)
    epoch = await subscribe(await client("bob"), QUEUE)
    await broker.restart_broker()

    assert await resync(await client("ada"), {QUEUE: stale}) == [(EVICTED, epoch)]


async def test_a_resync_confirms_its_queues_also_if_one_that_it_drops_is_behind_a_broken_link(
    broker: ExclusiveBroker, client: NewClient
) -> None:
    """E4: what is dropped is consumed no longer, and no other queue waits for its partition."""
    ada = await client("ada")
    partition = partition_of(QUEUE, broker.partitions)
    (kept,) = broker.names_in(1 - partition, 1, "own")
    epoch, dropped = await subscribe(ada, kept), await subscribe(ada, QUEUE)
    broker.link.requests.close()
    await broker.link.break_now()

    assert await resync(ada, {kept: epoch}) == [(ACTIVE, epoch)]

    (notice,) = await ada.report({kept: epoch, QUEUE: dropped})
    assert (notice.lmq_name, notice.state) == (QUEUE, RESYNC_REQUIRED)
    broker.link.requests.let_go()
