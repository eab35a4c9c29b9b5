"""Two processes under one client id: the SDK notifies the replaced one and drops the queue (E7)."""

import asyncio
import threading

import pytest

import tidemark
from tests.service.client.conftest import Connect, until_disconnected
from tests.support.local_broker import LocalBroker, in_time
from tests.support.sdk_calls import publish, take
from tidemark.client import EvictionReason
from tidemark.clock import ManualClock
from tidemark.errors import Fenced

OWN = "own/a"


async def test_a_process_whose_client_id_another_one_uses_is_told_and_its_loop_ends(
    client: tidemark.Client, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """E1, E7, E8: the second gets what the first had in hand, and everything else."""
    evictions: list[tidemark.Eviction] = []
    second = await connect(client.client_id)
    await publish(client, OWN, b"one")
    async with client.subscribe([OWN], on_evicted=evictions.append) as mine:
        (held,) = await take(mine, 1)

        async with second.subscribe([OWN]) as theirs:
            (taken,) = await take(theirs, 1)
            with pytest.raises(StopAsyncIteration):
                await in_time(anext(mine))
            with pytest.raises(Fenced):
                await held.nack()

    assert evictions == [(OWN, "default", taken.epoch, EvictionReason.REPLACED)]
    assert taken.epoch > held.epoch
    assert "another process with this client_id has taken the queue" in caplog.text


async def test_a_client_that_another_one_evicts_is_told_that_reason(
    client: tidemark.Client, connect: Connect
) -> None:
    """E2."""
    evictions: list[tidemark.Eviction] = []
    bob = await connect("bob")
    async with client.subscribe([OWN], on_evicted=evictions.append) as mine, bob.subscribe([OWN]):
        with pytest.raises(StopAsyncIteration):
            await in_time(anext(mine))

    assert [each.reason for each in evictions] == [EvictionReason.EVICTED]


async def test_a_replaced_process_neither_resyncs_nor_subscribes_by_itself(
    local: LocalBroker, connect: Connect, client: tidemark.Client
) -> None:
    """E5, E7: not with its heartbeats, and not when it connects again."""
    clock = ManualClock()
    first, second = await connect("worker", clock=clock), await connect("worker")
    evictions: list[tidemark.Eviction] = []
    async with (
        first.subscribe([OWN, "own/b"], on_evicted=evictions.append) as mine,
        second.subscribe([OWN]) as theirs,
    ):
        await publish(client, "own/b", b"still its own")
        await take(mine, 1)
        session = first._routes.home.session
        assert session is not None
        await clock.advance_ms(60_000)  # several heartbeats
        await session.abort()
        await until_disconnected(first)
        await clock.advance_ms(5_000)
        await in_time(first._routes.home.ready(None))
        await publish(client, "own/b", b"still its own")
        await take(mine, 1)

        for number in range(10):
            await publish(client, OWN, b"%d" % number)
        handled = [each.payload for each in await take(theirs, 10)]

        assert handled == [b"%d" % number for number in range(10)]
        assert mine.lmq_names == ["own/b"]
        await clock.advance_ms(5_000)
    assert [(each.lmq_name, each.reason) for each in evictions] == [(OWN, "REPLACED")]


async def test_a_process_that_was_replaced_while_it_was_away_does_not_steal_the_queue_back(
    connect: Connect, client: tidemark.Client
) -> None:
    """E7: its link broke, the notice never reached it; its resync is answered with the reason."""
    clock = ManualClock()
    evictions: list[tidemark.Eviction] = []
    away = await connect("worker", clock=clock)
    async with away.subscribe([OWN], on_evicted=evictions.append) as mine:
        session = away._routes.home.session
        assert session is not None
        await session.abort()
        await until_disconnected(away)
        async with (await connect("worker")).subscribe([OWN]) as theirs:
            await clock.advance_ms(5_000)
            with pytest.raises(StopAsyncIteration):
                await in_time(anext(mine))
            await publish(client, OWN, b"one")

            assert [each.payload for each in await take(theirs, 1)] == [b"one"]
        await clock.advance_ms(5_000)

    assert [each.reason for each in evictions] == [EvictionReason.REPLACED]


async def test_a_process_that_is_started_again_under_its_id_is_served_at_once(
    client: tidemark.Client, connect: Connect
) -> None:
    """E1, E9: what its earlier life had in hand is no obstacle, and is not told as a failure."""
    await publish(client, OWN, b"one")
    died = await connect("worker")
    async with died.subscribe([OWN]) as before:
        (held,) = await take(before, 1)
        session = died._routes.home.session
        assert session is not None
        await session.abort()

        async with (await connect("worker")).subscribe([OWN]) as deliveries:
            (again,) = await take(deliveries, 1)

            assert (again.payload, again.epoch > held.epoch) == (b"one", True)
            await again.ack()
            await in_time(deliveries.flush())


async def test_the_blocking_client_tells_that_it_was_replaced(
    local: LocalBroker, client: tidemark.Client
) -> None:
    """E7."""
    evictions: list[tidemark.Eviction] = []
    subscribed = threading.Event()

    def script() -> list[bytes]:
        with (
            tidemark.sync.connect(local.address, client_id="worker") as mine,
            mine.subscribe([OWN], on_evicted=evictions.append) as deliveries,
        ):
            subscribed.set()
            return [each.payload for each in deliveries]

    running = asyncio.create_task(asyncio.to_thread(script))
    await in_time(asyncio.to_thread(subscribed.wait))
    async with (
        tidemark.connect(local.address, client_id="worker") as second,
        second.subscribe([OWN]),
    ):
        assert await in_time(running) == []

    assert [each.reason for each in evictions] == [EvictionReason.REPLACED]
