"""A link to storage that breaks in a cleanup or a lease: unavailable, and never an outcome (I2)."""

import asyncio

import pytest

from broker_svc.idle.cleanup import EvictionOutcome
from tests.support.gated_storage import GatedLink, GatedStorage
from tests.support.idle_broker import IDLE_MS, KEY, QUEUE_PARTITION, IdleBroker, cleaning, leases_of
from tidemark.errors import Unavailable


async def test_a_link_that_breaks_in_a_direct_cleanup_is_unavailable_and_no_outcome(
    broker: IdleBroker, link: GatedLink
) -> None:
    """I2: whether storage has unloaded it is unknown."""
    await broker.idle_queue()
    link.answers.close()
    cleanup = asyncio.create_task(broker.try_evict())
    await link.answers.until_held()

    await link.break_now()

    with pytest.raises(Unavailable):
        await cleanup
    assert broker.components.tracking.find(KEY) is not None
    link.answers.let_go()
    await broker.reconnect()
    assert await broker.try_evict() is EvictionOutcome.NOT_MATERIALIZED


async def test_a_link_that_breaks_in_an_automatic_cleanup_is_tried_again_after_a_window(
    broker: IdleBroker, link: GatedLink
) -> None:
    """I2, I3"""
    await broker.idle_queue()
    link.requests.close()
    cleanup = asyncio.create_task(broker.components.cleanup.run_once())
    await link.requests.until_held()

    await link.break_now()

    assert await cleanup == []
    assert broker.components.tracking.find(KEY) is not None
    link.requests.let_go()
    await broker.reconnect()
    await broker.clock.advance_ms(IDLE_MS)
    assert EvictionOutcome.EVICTED in await broker.components.cleanup.run_once()


async def test_a_lease_that_waits_for_a_cleanup_whose_link_breaks_is_unavailable(
    broker: IdleBroker, link: GatedLink
) -> None:
    """I2"""
    cleanup = await cleaning(broker, link)
    lease = asyncio.create_task(broker.lease())
    await broker.clock.advance_ms(0)

    await link.break_now()

    for broken in (cleanup, lease):
        with pytest.raises(Unavailable):
            await broken
    assert leases_of(broker) == 0


async def test_a_link_that_breaks_while_a_queue_is_loaded_drops_the_lease(
    broker: IdleBroker, link: GatedLink
) -> None:
    """I2"""
    link.answers.close()
    lease = asyncio.create_task(broker.lease())
    await link.answers.until_held()

    await link.break_now()

    with pytest.raises(Unavailable):
        await lease
    assert leases_of(broker) == 0
    link.answers.let_go()
    await broker.reconnect()
    await broker.lease()
    assert await broker.is_loaded()


@pytest.mark.parametrize("broken", [0, 1])
async def test_a_link_that_breaks_while_another_partition_is_waited_for_takes_no_share(
    broker: IdleBroker, gates: GatedStorage, broken: int
) -> None:
    """I2, L4: the lease holds where the queue is loaded, and elsewhere once the link is up."""
    await broker.create_topic("wide", partitions=2)
    for each in gates.links.values():
        each.answers.close()
    lease = asyncio.create_task(broker.components.leases.create("wide", (1, 0), IDLE_MS))
    for each in gates.links.values():
        await each.answers.until_held()

    await gates.links[broken].break_now()
    await broker.until_disconnected(broken)
    gates.links[1 - broken].answers.let_go()
    held = await lease

    queue = broker.components.tracking.find((broken, "wide"))
    assert queue is not None
    assert (queue.leases, queue.loading) == (1, None)
    gates.links[broken].answers.let_go()
    await broker.reconnect(broken)
    assert queue.loading is not None
    await queue.loading
    held.release()
    assert leases_of(broker) == 0


async def test_a_lease_whose_links_all_break_is_unavailable_and_leaves_none(
    broker: IdleBroker, gates: GatedStorage
) -> None:
    """I2"""
    await broker.create_topic("wide", partitions=2)
    for each in gates.links.values():
        each.answers.close()
    lease = asyncio.create_task(broker.components.leases.create("wide", (1, 0), IDLE_MS))
    for each in gates.links.values():
        await each.answers.until_held()

    for each in gates.links.values():
        await each.break_now()

    with pytest.raises(Unavailable):
        await lease
    assert leases_of(broker) == 0


async def test_a_lease_asked_for_without_a_link_is_unavailable_and_leaves_none(
    broker: IdleBroker, link: GatedLink
) -> None:
    """I2"""
    await link.break_now()
    await broker.until_disconnected(QUEUE_PARTITION)

    with pytest.raises(Unavailable):
        await broker.lease()

    assert leases_of(broker) == 0
