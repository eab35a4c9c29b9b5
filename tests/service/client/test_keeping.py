"""Messages in hand are kept for their handler when a topic changes or its partition moves (K1)."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

import tidemark
from tests.service.client.conftest import Connect
from tests.service.client.test_attempts import QUEUE, VISIBILITY_MS, pass_time
from tests.service.client.test_owners import start_second_broker
from tests.support.local_broker import LocalBroker, in_time, local_broker, ticking
from tests.support.sdk_calls import publish, take
from tidemark.clock import ManualClock

pytestmark = pytest.mark.slow


@pytest.fixture
async def clock() -> ManualClock:
    """Time of the broker, its storage and the client that works."""
    return ManualClock()


@pytest.fixture
async def local(tmp_path: Path, clock: ManualClock) -> AsyncIterator[LocalBroker]:
    async with local_broker(tmp_path, clock, partitions=1, client_timeout_ms=3_600_000) as local:
        yield local


async def move(
    local: LocalBroker, stack: AsyncExitStack, clock: ManualClock, *clients: tidemark.Client
) -> None:
    """Another broker takes the partition; returns once the clients publish there."""
    await start_second_broker(local, stack, clock)
    for client in clients:
        await ticking(clock, publish(client, "orders/other", b"x"))


async def test_a_shorter_visibility_timeout_of_the_topic_takes_nothing_from_a_handler(
    client: tidemark.Client, connect: Connect, clock: ManualClock
) -> None:
    """K1, S7: what was reserved before is renewed in time, though each renewal lasts less."""
    slow = await connect("slow", clock=clock)
    await publish(client, QUEUE, b"1")

    async with slow.subscribe([QUEUE]) as deliveries:
        (first,) = await take(deliveries, 1)
        await client.admin.update_topic("orders", {"visibility_timeout_ms": VISIBILITY_MS // 6})
        await pass_time(clock, 4 * VISIBILITY_MS, slow)

        await in_time(first.ack(wait=True))


async def test_a_message_in_hand_is_renewed_and_settled_where_its_partition_has_moved(
    local: LocalBroker, client: tidemark.Client, connect: Connect, clock: ManualClock
) -> None:
    """K1, C2: its receipt stays good, and what waited in the buffer goes back untried."""
    slow = await connect("slow", clock=clock)
    await publish(client, QUEUE, b"1", b"2")

    async with AsyncExitStack() as stack, slow.subscribe([QUEUE], credit=2) as deliveries:
        (first,) = await take(deliveries, 1)
        await move(local, stack, clock, slow)
        await pass_time(clock, 4 * VISIBILITY_MS, slow)
        await ticking(clock, first.ack(wait=True))
        (second,) = await ticking(clock, take(deliveries, 1))
        await ticking(clock, second.ack(wait=True))
        (group,) = await client.admin.list_groups(QUEUE)

        assert (second.payload, first.attempt, second.attempt) == (b"2", 0, 0)
        assert (group.inflight, group.unsettled) == (0, 0)


async def test_acks_under_way_follow_a_partition_that_moves(
    local: LocalBroker, client: tidemark.Client, connect: Connect, clock: ManualClock
) -> None:
    """K4, C2: they are not waited for, and `flush` returns when the other broker has them."""
    quick = await connect("quick", clock=clock)
    await publish(client, QUEUE, b"1", b"2", b"3")

    async with AsyncExitStack() as stack, quick.subscribe([QUEUE]) as deliveries:
        taken = await take(deliveries, 3)
        await start_second_broker(local, stack, clock)
        for each in taken:
            await each.ack()
        await ticking(clock, deliveries.flush())
        (group,) = await client.admin.list_groups(QUEUE)

        assert (group.inflight, group.unsettled) == (0, 0)
