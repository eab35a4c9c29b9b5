"""What a subscription hands out, and how much it asks for, once it has lost something."""

import asyncio

import pytest

import tidemark
from tests.service.client.conftest import Connect
from tests.support.local_broker import in_time
from tests.support.sdk_calls import publish, take
from tidemark.clock import ManualClock
from tidemark.errors import InvalidArgument


async def test_nothing_of_a_lost_queue_is_handed_out_any_more(
    client: tidemark.Client, connect: Connect
) -> None:
    """E9: the rest of the batch that is being looped over is the new owner's."""
    evicted = asyncio.Event()
    bob = await connect("bob")
    await publish(client, "own/a", b"one", b"two", b"three")
    async with client.subscribe(["own/a"], on_evicted=lambda _: evicted.set()) as mine:
        await take(mine, 1)

        async with bob.subscribe(["own/a"]) as his:
            await in_time(evicted.wait())
            with pytest.raises(StopAsyncIteration):
                await in_time(anext(mine))

            assert [each.payload for each in await take(his, 3)] == [b"one", b"two", b"three"]


async def test_a_lost_queue_gives_no_credit_back_that_it_did_not_use(
    client: tidemark.Client, connect: Connect
) -> None:
    """What was settled of a batch had given its credit back before."""
    evicted = asyncio.Event()
    bob = await connect("bob")
    await publish(client, "own/a", *(b"%d" % number for number in range(10)))
    async with client.subscribe(
        ["own/a", "own/b"], credit=10, on_evicted=lambda _: evicted.set()
    ) as mine:
        for each in (await take(mine, 10))[:9]:
            await each.ack()
        await in_time(mine.flush())

        async with bob.subscribe(["own/a"]):
            await in_time(evicted.wait())
        await publish(client, "own/b", *(b"%d" % number for number in range(30)))
        await take(mine, 10)
        (group,) = await client.admin.list_groups("own/b")

        assert group.inflight == 10


async def test_the_rest_of_a_batch_is_not_handed_out_after_its_time(
    client: tidemark.Client, connect: Connect
) -> None:
    """It is ready for others by then, as what waited behind it is."""
    clock = ManualClock()
    slow = await connect("slow", clock=clock)
    await publish(client, "orders/a", b"one", b"two")
    async with slow.subscribe(
        ["orders/a"], credit=10, visibility_ms=60_000, max_lease_ms=0
    ) as deliveries:
        await take(deliveries, 1)

        await clock.advance_ms(60_000)
        await publish(client, "orders/a", b"three")

        assert [each.payload for each in await take(deliveries, 1)] == [b"three"]


async def test_a_queue_is_refused_also_while_the_other_subscription_is_being_made(
    client: tidemark.Client,
) -> None:
    """Two of one client would take an exclusive queue from each other with every heartbeat."""

    async def enter() -> tidemark.Subscription:
        return await client.subscribe(["own/a"]).__aenter__()

    first, second = await in_time(asyncio.gather(enter(), enter(), return_exceptions=True))

    assert isinstance(first, tidemark.Subscription)
    assert isinstance(second, InvalidArgument)
