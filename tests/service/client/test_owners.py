"""Partitions that move from one broker to another, and a client that follows them."""

import asyncio
from contextlib import AsyncExitStack

import tidemark
from broker_svc.app import broker
from tests.support.local_broker import BROKER_SERVICE, SERVES_WITHIN_MS, LocalBroker, in_time
from tidemark.api.storage.v1.storage_pb2 import GetQueueRequest
from tidemark.clock import Clock, SystemClock
from tidemark.names import partition_of
from tidemark.rpc import open_channel, wait_until_serving
from tidemark.settings import BrokerSettings

QUEUE = "orders/a"


async def start_second_broker(
    local: LocalBroker, stack: AsyncExitStack, clock: Clock | None = None
) -> str:
    """A broker that claims every partition, so that the first one is fenced."""
    settings = BrokerSettings(
        broker_id="second",
        partitions=local.partitions,
        listen="127.0.0.1:0",
        storage_addresses=(local.storage_server.address,),
    )
    server = await stack.enter_async_context(broker(settings, clock or SystemClock()))
    async with open_channel(server.address) as channel:
        await wait_until_serving(channel, BROKER_SERVICE, SERVES_WITHIN_MS)
    return server.address


async def test_publishes_and_subscriptions_follow_their_partition_to_its_owner(
    local: LocalBroker, client: tidemark.Client
) -> None:
    """S8, S11, E10: nothing is asked of the user, nothing is lost, the epoch stays."""
    publisher = await client.publisher(QUEUE)
    await publisher.publish(b"before")
    async with AsyncExitStack() as stack:
        mine = await stack.enter_async_context(client.subscribe([QUEUE]))
        owned = await stack.enter_async_context(client.subscribe(["own/a"], group="o"))
        (before,) = [await in_time(anext(mine))]
        await before.ack()
        await in_time(mine.flush())
        moved_to = await start_second_broker(local, stack)

        receipts = await in_time(
            asyncio.gather(*(publisher.publish(b"%d" % number) for number in range(10)))
        )
        pulled = [await in_time(anext(mine)) for _ in range(10)]
        await (await client.publisher("own/a")).publish(b"still mine")
        kept = await in_time(anext(owned))
        for each in (*pulled, kept):  # before that broker stops, or closing waits for it
            await each.ack()
        await in_time(asyncio.gather(mine.flush(), owned.flush()))

        assert [receipt.offset for receipt in receipts] == list(range(1, 11))
        assert [each.payload for each in pulled] == [b"%d" % number for number in range(10)]
        assert (kept.payload, kept.epoch > 0) == (b"still mine", True)
        assert moved_to in [each.address for each in client._routes._others]


async def test_a_delivery_in_hand_is_acknowledged_at_the_new_owner_of_its_partition(
    local: LocalBroker, client: tidemark.Client
) -> None:
    """C2, V6: its receipt stays valid, and the message does not come again."""
    publisher = await client.publisher(QUEUE)
    await publisher.publish(b"in hand")
    async with AsyncExitStack() as stack:
        mine = await stack.enter_async_context(client.subscribe([QUEUE]))
        delivery = await in_time(anext(mine))
        await start_second_broker(local, stack)

        await in_time(delivery.ack(wait=True))

        queue = await local.storage.GetQueue(
            GetQueueRequest(partition=partition_of(QUEUE, local.partitions), lmq_name=QUEUE)
        )
        assert (queue.queue.messages, queue.queue.inflight) == (0, 0)
