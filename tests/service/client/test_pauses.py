"""Pauses of topics and queues, as an application and an operator meet them (L10)."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

import tidemark
from tests.service.client.conftest import Connect
from tests.support.local_broker import LocalBroker, in_time, local_broker, until
from tests.support.sdk_calls import publish
from tidemark.clock import ManualClock
from tidemark.errors import InvalidName, QueueNotFound, TopicNotFound

Pause = Callable[[tidemark.Client], Awaitable[object]]
PAUSES: dict[str, tuple[Pause, Pause]] = {
    "topic": (
        lambda client: client.admin.pause_topic("orders"),
        lambda client: client.admin.resume_topic("orders"),
    ),
    "queue": (
        lambda client: client.admin.pause_queue("orders/a"),
        lambda client: client.admin.resume_queue("orders/a"),
    ),
}


@pytest.fixture(params=list(PAUSES))
def pauses(request: pytest.FixtureRequest) -> tuple[Pause, Pause]:
    """How to pause the queue `orders/a`, and how to resume it."""
    return PAUSES[request.param]


@pytest.fixture
async def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def local(tmp_path: Path, clock: ManualClock) -> AsyncIterator[LocalBroker]:
    async with local_broker(tmp_path, clock, partitions=2, client_timeout_ms=3_600_000) as local:
        yield local


async def pulled(client: tidemark.Client, lmq_name: str) -> list[bytes]:
    """What a pull gets that does not wait."""
    return [each.payload for each in await in_time(client.pull(lmq_name, wait_ms=0))]


async def test_consumers_get_nothing_while_paused_and_go_on_by_themselves(
    client: tidemark.Client, connect: Connect, pauses: tuple[Pause, Pause]
) -> None:
    """L10: those of a session and those that pull, whether they waited before or came later."""
    pause, resume = pauses
    await publish(client, "orders/a", b"0")
    async with client.subscribe(["orders/a"]) as deliveries:
        first = await in_time(anext(deliveries))

        await pause(client)
        await publish(client, "orders/a", b"1", b"2")
        await first.ack(wait=True)
        assert await pulled(client, "orders/a") == []
        stats = await client.admin.get_queue("orders/a")
        assert (stats.queue.messages, stats.queue.inflight) == (2, 0)
        next_delivery = asyncio.create_task(in_time(anext(deliveries)))
        await resume(client)

        assert (await next_delivery).payload == b"1"


async def test_a_pull_that_waits_goes_on_when_its_queue_is_resumed(
    client: tidemark.Client, connect: Connect, pauses: tuple[Pause, Pause]
) -> None:
    """L10."""
    pause, resume = pauses
    await publish(client, "orders/a", b"0")
    await pause(client)
    waits = asyncio.create_task(in_time(client.pull("orders/a", wait_ms=30_000)))
    assert await pulled(await connect("bob"), "orders/a") == []

    await resume(client)

    assert [each.payload for each in await waits] == [b"0"]


async def test_a_pause_survives_restarts(
    client: tidemark.Client, local: LocalBroker, pauses: tuple[Pause, Pause]
) -> None:
    """L10: of storage, and of the broker."""
    pause, resume = pauses
    await publish(client, "orders/a", b"0")
    await pause(client)

    await local.stop_broker()
    await local.stop_storage()
    await local.start_storage()
    await local.start_broker()

    assert await pulled(client, "orders/a") == []
    await resume(client)
    assert await pulled(client, "orders/a") == [b"0"]


async def test_repeating_a_pause_or_an_end_of_it_changes_nothing(
    client: tidemark.Client,
) -> None:
    """L10: also that a topic is created again, with equal settings."""
    await publish(client, "orders/a", b"0")
    paused = await client.admin.pause_topic("orders")

    assert await client.admin.pause_topic("orders") == paused
    assert await client.create_topic("orders") == paused
    changed = await client.admin.update_topic("orders", {"max_attempts": 3})
    assert changed.paused
    resumed = await client.admin.resume_topic("orders")
    assert await client.admin.resume_topic("orders") == resumed
    assert await client.admin.pause_queue("orders/a") == await client.admin.pause_queue("orders/a")
    assert (await client.admin.resume_queue("orders/a")) == (
        await client.admin.resume_queue("orders/a")
    )

    assert not resumed.paused
    assert await pulled(client, "orders/a") == [b"0"]


async def test_a_queue_goes_on_once_neither_it_nor_its_topic_is_paused(
    client: tidemark.Client,
) -> None:
    """L10."""
    for name in ("orders/a", "orders/b"):
        await publish(client, name, b"0")
    await client.admin.pause_topic("orders")
    await client.admin.pause_queue("orders/a")

    await client.admin.resume_topic("orders")
    assert await pulled(client, "orders/a") == []
    assert await pulled(client, "orders/b") == [b"0"]
    await client.admin.resume_queue("orders/a")

    assert await pulled(client, "orders/a") == [b"0"]


async def test_settling_and_expiry_go_on_while_paused(
    client: tidemark.Client, clock: ManualClock, pauses: tuple[Pause, Pause]
) -> None:
    """L10: and messages that come back wait for the end of the pause."""
    pause, resume = pauses
    await publish(client, "orders/a", b"0", b"1", b"2")
    taken = list(await in_time(client.pull("orders/a", max_messages=3, wait_ms=0)))
    await pause(client)

    await taken[0].ack(wait=True)
    await taken[1].nack()
    await clock.advance_ms(30_020)

    async def expired() -> bool:
        stats = await client.admin.get_queue("orders/a")
        return (stats.queue.messages, stats.queue.inflight) == (3, 0)

    await until(expired)
    assert await pulled(client, "orders/a") == []
    await resume(client)
    again = await in_time(client.pull("orders/a", max_messages=3, wait_ms=0))
    assert sorted((each.payload, each.attempt) for each in again) == [(b"1", 1), (b"2", 1)]


async def test_an_exclusive_queue_keeps_its_owner_while_it_is_paused(
    client: tidemark.Client, connect: Connect
) -> None:
    """L10, E1: a subscriber that takes it over meanwhile is the one that goes on."""
    await client.admin.pause_topic("own")
    await publish(client, "own/a", b"0")
    bob = await connect("bob")

    async def owned_by_bob() -> bool:
        groups = (await client.admin.get_queue("own/a")).groups
        return [each.owner_client_id for each in groups] == ["bob"]

    async with client.subscribe(["own/a"]), bob.subscribe(["own/a"]) as taken_over:
        await until(owned_by_bob)
        next_delivery = asyncio.create_task(in_time(anext(taken_over)))
        await client.admin.resume_topic("own")

        assert (await next_delivery).payload == b"0"


async def test_a_queue_over_several_partitions_is_paused_in_all_of_them(
    client: tidemark.Client,
) -> None:
    """L10: also where its first message comes after the pause."""
    await client.create_topic("wide", partitions=2)
    await publish(client, "wide", b"0")
    await client.admin.pause_queue("wide")

    for number in range(1, 5):
        await publish(client, "wide", b"%d" % number)
    assert await pulled(client, "wide") == []
    stats = await client.admin.get_queue("wide")
    assert (stats.queue.paused, stats.queue.messages) == (True, 5)
    await client.admin.resume_queue("wide")

    found: list[bytes] = []
    while len(found) < 5:
        found += [each.payload for each in await in_time(client.pull("wide", wait_ms=30_000))]
    assert sorted(found) == [b"0", b"1", b"2", b"3", b"4"]


async def test_a_pause_is_shown_where_queues_topics_and_partitions_are(
    client: tidemark.Client,
) -> None:
    """L10."""
    for name in ("orders/a", "orders/b", "own/a"):
        await publish(client, name, b"0")

    await client.admin.pause_queue("orders/a")
    await client.admin.pause_topic("own")

    listed = [each async for each in client.admin.list_queues("orders")]
    assert {each.lmq_name: each.paused for each in listed} == {"orders/a": True, "orders/b": False}
    assert not any(each.topic_paused for each in listed)
    own = (await client.admin.get_queue("own/a")).queue
    assert (own.paused, own.topic_paused) == (False, True)
    topics = {each.name: each.paused async for each in client.admin.list_topics()}
    assert topics == {"orders": False, "own": True}
    partitions = await client.admin.list_partitions()
    assert sum(each.paused_queues for each in partitions) == 1
    assert [each.paused_topics for each in partitions] == [1, 1]
    await client.admin.delete_queue("orders/a")
    partitions = await client.admin.list_partitions()
    assert sum(each.paused_queues for each in partitions) == 0


async def test_pausing_a_topic_writes_no_row_for_its_queues(
    client: tidemark.Client, local: LocalBroker
) -> None:
    """L10, W3: it costs the same with ten queues and with ten million."""
    for number in range(20):
        await publish(client, f"orders/{number}", b"0")
    before = [each.commits for each in await client.admin.list_partitions()]
    queues = [each async for each in client.admin.list_queues("orders")]

    await client.admin.pause_topic("orders")

    after = [each.commits for each in await client.admin.list_partitions()]
    assert sum(after) - sum(before) <= 3  # one at home, and one in each partition
    now = [each async for each in client.admin.list_queues("orders")]
    assert [each.paused for each in now] == [False] * 20
    assert [each.last_activity_time_ms for each in now] == [
        each.last_activity_time_ms for each in queues
    ]


@pytest.mark.parametrize("name", ["pause", "resume"])
async def test_what_does_not_exist_is_neither_paused_nor_created(
    client: tidemark.Client, name: str
) -> None:
    """L10, S3."""
    admin = client.admin
    of_queue, of_topic = getattr(admin, f"{name}_queue"), getattr(admin, f"{name}_topic")

    with pytest.raises(QueueNotFound) as refused:
        await of_queue("orders/nothing")
    with pytest.raises(TopicNotFound):
        await of_queue("nothing/a")
    with pytest.raises(TopicNotFound):
        await of_topic("nothing")
    with pytest.raises(InvalidName):
        await of_topic("a b")

    assert refused.value.metadata["queue"] == "orders/nothing"
    assert [each async for each in admin.list_queues("orders")] == []
