"""Publishers that are closed: what brokers hold for them goes at once (I8)."""

import asyncio

import pytest

import tidemark
import tidemark.sync
from tests.service.client.conftest import Connect
from tests.support.local_broker import LocalBroker, in_time, until
from tidemark.clock import SystemClock
from tidemark.errors import ClientClosed

QUEUE = "brief/a"


@pytest.fixture
async def client(connect: Connect) -> tidemark.Client:
    client = await connect()
    await client.create_topic("brief", idle_after_ms=100)
    return client


async def until_unloaded(client: tidemark.Client) -> None:
    async def is_unloaded() -> bool:
        return (await client.admin.evict_queue(QUEUE)).unloaded

    await until(is_unloaded)


async def test_a_closed_publisher_keeps_no_queue_loaded(client: tidemark.Client) -> None:
    """I8: it held its lease for as long as the client was connected."""
    async with await client.publisher(QUEUE) as publisher:
        receipt = await publisher.publish(b"1")
        held = await client.admin.evict_queue(QUEUE)

    await until_unloaded(client)
    assert held.outcome == "ACTIVE"
    assert receipt.publisher_id
    with pytest.raises(ClientClosed):
        await publisher.publish(b"2")
    with pytest.raises(ClientClosed):
        await publisher.publish_many([b"2"])
    await publisher.close()  # again: it has nothing to do


async def test_the_queue_stays_loaded_until_its_last_publisher_is_closed(
    client: tidemark.Client,
) -> None:
    """I7, I8."""
    first, second = await client.publisher(QUEUE), await client.publisher(QUEUE)
    await first.close()
    held = await client.admin.evict_queue(QUEUE)
    await second.publish(b"1")

    await second.close()

    assert held.outcome == "ACTIVE"
    await until_unloaded(client)
    await (await client.publisher(QUEUE)).publish(b"2")  # and a new one works


async def test_closing_waits_for_what_is_under_way(client: tidemark.Client) -> None:
    """I8: or the broker would make a publisher for what comes after."""
    publisher = await client.publisher(QUEUE)
    publishing = asyncio.gather(*(publisher.publish(b"%d" % number) for number in range(100)))
    await SystemClock().sleep_ms(0)

    await in_time(publisher.close())

    assert publishing.done()
    assert len(await publishing) == 100
    await until_unloaded(client)


async def test_a_publisher_is_closed_with_its_client(connect: Connect) -> None:
    client = await connect("bob")
    await client.create_topic("brief", idle_after_ms=100)
    publisher = await client.publisher(QUEUE)

    await client.close()

    await in_time(publisher.close())


async def test_the_blocking_client_closes_publishers_as_well(
    client: tidemark.Client, local: LocalBroker
) -> None:
    """I8."""

    def script() -> None:
        with tidemark.sync.connect(local.address, client_id="script") as blocking:
            with blocking.publisher(QUEUE) as publisher:
                publisher.publish(b"1")
            with pytest.raises(ClientClosed):
                publisher.publish(b"2")
            deadline_ms = SystemClock().monotonic_ms() + 60_000
            while SystemClock().monotonic_ms() < deadline_ms:
                asking = client.admin.evict_queue(QUEUE)
                if asyncio.run_coroutine_threadsafe(asking, loop).result().unloaded:
                    return
            raise TimeoutError

    loop = asyncio.get_running_loop()
    await in_time(asyncio.to_thread(script))
