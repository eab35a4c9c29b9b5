"""Closing while calls are under way: each of them ends, and no task is left behind."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeAlias

import pytest

import tidemark
from tests.service.client.conftest import Connect, until_disconnected
from tests.support.gated_storage import GatedLink, gated_storage
from tests.support.local_broker import LocalBroker, in_time, local_broker, until
from tests.support.sdk_calls import publish, take
from tidemark.client.transport.session import Session
from tidemark.clock import ManualClock
from tidemark.errors import ClientClosed, TidemarkError

SHARED, OWN = "orders/a", "own/a"

Gated: TypeAlias = tuple[tidemark.Client, ManualClock, GatedLink]
"""A client, its time, and the way between its broker and the only partition."""


@pytest.fixture
async def gated(tmp_path: Path) -> AsyncIterator[Gated]:
    clock = ManualClock()
    async with local_broker(tmp_path, partitions=1) as local:
        await local.stop_broker()
        async with gated_storage(local.storage_server.address, 1) as gates:
            await local.start_broker(gates.address)
            async with tidemark.connect(local.address, client_id="ada", clock=clock) as client:
                await client.create_topic("orders")
                await client.create_topic("own", subscription="exclusive")
                yield client, clock, gates.links[0]
                gates.links[0].answers.let_go()
            await local.stop_broker()


async def ended(clock: ManualClock, work: "asyncio.Task[None]") -> None:
    """Let the time of the client pass until something has ended."""

    async def done() -> bool:
        await clock.advance_ms(100)
        return work.done()

    await until(done)
    await work


def consumers_of(client: tidemark.Client) -> int:
    session = client._routes.home.session
    assert session is not None
    return len(session._consumers)


@pytest.mark.parametrize("held", [0, 1], ids=["idle", "with-a-message"])
async def test_only_a_subscription_that_holds_messages_stops_before_it_leaves(
    gated: Gated, monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    """What it gives back is for others. A stop has the broker recall what waits in each queue."""
    client, _, _ = gated
    stopped: list[int] = []
    stop = Session.stop_consumer

    def noted(session: Session, consumer_id: int) -> None:
        stopped.append(consumer_id)
        stop(session, consumer_id)

    monkeypatch.setattr(Session, "stop_consumer", noted)
    async with client.subscribe([SHARED]) as deliveries:
        for _ in range(held):
            await publish(client, SHARED, b"x")
            await take(deliveries, 1)

    assert len(stopped) == held


async def nacked_and_closed(gated: Gated) -> "asyncio.Task[None]":
    """A nack that is not answered yet, of a subscription that is closed already."""
    client, clock, link = gated
    await publish(client, SHARED, b"x")
    deliveries = await client.subscribe([SHARED]).__aenter__()
    (delivery,) = await take(deliveries, 1)
    link.answers.close()
    nacking = asyncio.create_task(delivery.nack())
    await in_time(link.answers.until_held())

    await ended(clock, asyncio.create_task(deliveries.close()))
    return nacking


async def test_a_wait_for_a_settlement_ends_when_its_subscription_is_closed(
    gated: Gated,
) -> None:
    """The answer comes after the subscription has given up waiting for it."""
    nacking = await nacked_and_closed(gated)
    gated[2].answers.let_go()

    await in_time(nacking)


async def test_a_wait_for_a_settlement_ends_when_the_session_ends_after_the_subscription(
    gated: Gated,
) -> None:
    client = gated[0]
    nacking = await nacked_and_closed(gated)
    session = client._routes.home.session
    assert session is not None
    await session.abort()

    with pytest.raises(ClientClosed):
        await in_time(nacking)


async def test_acks_that_were_never_sent_are_told_as_failed(
    client: tidemark.Client, connect: Connect
) -> None:
    """V6: never silently."""
    failures: list[TidemarkError] = []
    away = await connect("away", clock=ManualClock())
    await publish(client, SHARED, b"x")
    async with away.subscribe(
        [SHARED], on_settle_failed=lambda _, error: failures.append(error)
    ) as deliveries:
        (delivery,) = await take(deliveries, 1)
        session = away._routes.home.session
        assert session is not None
        await session.abort()
        await until_disconnected(away)

        await delivery.ack()

    assert [type(each) for each in failures] == [ClientClosed]


async def test_a_subscription_that_could_not_leave_in_time_is_not_told_that_it_was_evicted(
    gated: Gated,
) -> None:
    """It reported its queue on, was asked to resync, and found that it owned it no longer."""
    client, clock, link = gated
    evictions: list[tidemark.Eviction] = []
    deliveries = await client.subscribe([OWN], on_evicted=evictions.append).__aenter__()
    link.answers.close()

    await ended(clock, asyncio.create_task(deliveries.close()))
    link.answers.let_go()
    await publish(client, OWN, b"x")
    for _ in range(3):
        await clock.advance_ms(20_000)
        await publish(client, OWN, b"x")

    assert evictions == []
    assert consumers_of(client) == 0


async def test_a_subscription_that_is_being_closed_consumes_nothing_after_a_reconnect(
    gated: Gated,
) -> None:
    """No task was left for what the new session brought."""
    client, clock, link = gated
    await publish(client, SHARED, b"x")
    deliveries = await client.subscribe([SHARED]).__aenter__()
    (delivery,) = await take(deliveries, 1)
    link.answers.close()
    nacking = asyncio.create_task(delivery.nack())
    await in_time(link.answers.until_held())
    closing = asyncio.create_task(deliveries.close())

    async def closes() -> bool:
        return deliveries._closed

    await until(closes)
    session = client._routes.home.session
    assert session is not None
    await session.abort()
    await until_disconnected(client)

    await ended(clock, asyncio.create_task(_connected(client)))
    link.answers.let_go()
    await ended(clock, closing)
    await asyncio.gather(nacking, return_exceptions=True)

    assert consumers_of(client) == 0


async def _connected(client: tidemark.Client) -> None:
    await client._routes.home.ready(None)


async def test_the_subscriptions_of_a_client_leave_at_the_same_time(gated: Gated) -> None:
    """A broker that does not answer costs one timeout, not one for each of them."""
    client, clock, link = gated
    subscriptions = [
        await client.subscribe([queue]).__aenter__() for queue in (SHARED, OWN, "orders/b")
    ]
    link.answers.close()

    async def one_leaves() -> bool:
        return any(each._closed for each in subscriptions)

    closing = asyncio.create_task(client.close())
    await until(one_leaves)

    assert all(each._closed for each in subscriptions)
    assert not closing.done()
    await ended(clock, closing)


async def test_a_subscription_whose_closing_is_cancelled_consumes_nothing(gated: Gated) -> None:
    client, _, link = gated
    await publish(client, SHARED, b"x")
    deliveries = await client.subscribe([SHARED]).__aenter__()
    await take(deliveries, 1)
    link.answers.close()
    closing = asyncio.create_task(deliveries.close())
    await in_time(link.answers.until_held())

    closing.cancel()
    await asyncio.wait({closing})
    link.answers.let_go()

    assert consumers_of(client) == 0
    assert client._routes.home.groups == set()


async def test_a_client_whose_closing_is_cancelled_leaves_nothing_behind(gated: Gated) -> None:
    """Its connection stayed, with its heartbeats, and all that it owned."""
    ada, _, link = gated
    before = asyncio.all_tasks()
    client = await tidemark.connect(ada._addresses[0], client_id="bob").__aenter__()
    deliveries = await client.subscribe([SHARED]).__aenter__()
    publisher = await client.publisher(SHARED)
    link.answers.close()
    publishing = asyncio.create_task(publisher.publish(b"x"))
    await in_time(link.answers.until_held())
    closing = asyncio.create_task(client.close())

    async def closes() -> bool:
        return client._state == "closed"

    await until(closes)
    closing.cancel()
    await asyncio.wait({closing})
    link.answers.let_go()
    await asyncio.gather(publishing, return_exceptions=True)

    async def nothing_left() -> bool:
        return not [task for task in asyncio.all_tasks() - before if "client/" in repr(task)]

    await until(nothing_left)
    assert deliveries._closed


async def test_a_wait_for_a_connection_ends_when_the_client_is_closed(
    local: LocalBroker, connect: Connect
) -> None:
    """It waited for the whole of its timeout."""
    away = await connect("away", clock=ManualClock())
    await away.create_topic("orders")
    await local.stop_broker()
    await until_disconnected(away)
    asked = asyncio.create_task(away.publisher(SHARED))
    entering = asyncio.create_task(away.subscribe([SHARED]).__aenter__())

    async def both_wait() -> bool:
        return len(away._routes.home._changed._waiters) == 2

    await until(both_wait)
    await away.close()

    with pytest.raises(TidemarkError):
        await in_time(asked)
    with pytest.raises(TidemarkError):
        await in_time(entering)
