"""Calls of a client while its broker cannot serve them yet."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeAlias

import pytest

import tidemark
from tests.service.client.conftest import until_disconnected
from tests.support.gated_storage import GatedLink, gated_storage
from tests.support.local_broker import LocalBroker, in_time, local_broker, until
from tests.support.sdk_calls import publish, take
from tidemark.clock import ManualClock, SystemClock
from tidemark.errors import ClientClosed, CommitOutcomeUnknown, TopicExists, Unavailable

Gated: TypeAlias = tuple[LocalBroker, tidemark.Client, GatedLink]
"""A broker, a client of it, and the way between the broker and the only partition."""

VISIBILITY_MS = 60_000


@pytest.fixture
async def gated(tmp_path: Path) -> AsyncIterator[Gated]:
    async with local_broker(tmp_path, partitions=1) as local:
        await local.stop_broker()
        async with gated_storage(local.storage_server.address, 1) as gates:
            await local.start_broker(gates.address)
            async with tidemark.connect(local.address, client_id="ada") as client:
                await client.create_topic("orders")
                yield local, client, gates.links[0]
                gates.links[0].requests.let_go()
            await local.stop_broker()


async def break_link(gated: Gated) -> None:
    """The link is down, and stays so until the gate opens."""
    _, client, link = gated
    link.requests.close()
    await link.break_now()

    async def is_down() -> bool:
        return (await client.admin.list_partitions())[0].link_state == "DOWN"

    await until(is_down)


async def test_a_topic_is_created_while_the_link_is_down(gated: Gated) -> None:
    """S8: right after the start it raised UNAVAILABLE, the topic being stored already."""
    _, client, link = gated
    await break_link(gated)

    topic = await in_time(client.create_topic("jobs", max_attempts=3))

    assert (topic.name, topic.settings.max_attempts) == ("jobs", 3)
    with pytest.raises(TopicExists):
        await in_time(client.create_topic("jobs", max_attempts=4))
    link.requests.let_go()
    await in_time(publish(client, "jobs", b"1"))


async def test_pulls_and_settlements_are_repeated_once_the_link_is_up(gated: Gated) -> None:
    """V6: settling twice is a success."""
    _, client, link = gated
    await publish(client, "orders", b"1")
    await break_link(gated)
    pulling = asyncio.create_task(client.pull("orders", wait_ms=60_000))
    link.requests.let_go()
    pulled = await in_time(pulling)
    assert pulled.payloads == [b"1"]

    await break_link(gated)
    settling = asyncio.create_task(client.settle(pulled))
    link.requests.let_go()
    await in_time(settling)

    assert len(await client.pull("orders")) == 0


@pytest.mark.parametrize("answers", [True, False], ids=["it comes back", "it stays away"])
async def test_an_ack_whose_answer_was_lost_is_repeated_after_its_time(
    gated: Gated, answers: bool
) -> None:
    """K4, V6: it had succeeded, and the message did not come back; only storage knows that."""
    local, client, link = gated
    clock = ManualClock()
    await publish(client, "orders", b"1")
    async with (
        tidemark.connect(local.address, client_id="bob", clock=clock) as bob,
        bob.subscribe(["orders"], visibility_ms=VISIBILITY_MS) as deliveries,
    ):
        (delivery,) = await take(deliveries, 1)
        link.answers.close()
        acking = asyncio.create_task(delivery.ack(wait=True))
        await in_time(link.answers.until_held())  # it is on disk
        await local.stop_broker()
        await until_disconnected(bob)

        await clock.advance_ms(VISIBILITY_MS)
        assert not acking.done()
        if answers:
            link.answers.let_go()
            await local.start_broker()

            async def is_acked() -> bool:
                await clock.advance_ms(10)  # bob waits before each attempt to connect
                return acking.done()

            await until(is_acked)
            await acking
        else:
            await clock.advance_ms(60_000)

            with pytest.raises(CommitOutcomeUnknown):
                await in_time(acking)


async def test_a_deletion_is_not_repeated(gated: Gated) -> None:
    """What was created under the name meanwhile would go with it."""
    _, client, link = gated
    await publish(client, "orders", b"1")
    await break_link(gated)

    with pytest.raises(Unavailable):
        await in_time(client.admin.delete_queue("orders"))

    link.requests.let_go()


async def test_a_call_survives_the_restart_of_its_broker(gated: Gated) -> None:
    """S5."""
    local, client, _ = gated
    await local.stop_broker()

    asking = asyncio.create_task(client.admin.get_topic("orders"))
    await SystemClock().sleep_ms(0)
    await local.start_broker()

    assert (await in_time(asking)).name == "orders"


async def test_a_closed_client_stops_repeating(gated: Gated) -> None:
    """It was cancelled in the midst of the task that had made the call."""
    _, client, link = gated
    await publish(client, "orders", b"1")
    pulled = await client.pull("orders")
    await break_link(gated)
    calls = [
        asyncio.create_task(client.settle(pulled)),
        asyncio.create_task(client.pull("orders", wait_ms=60_000)),
    ]
    await in_time(link.requests.until_held())

    await in_time(client.close())

    for call in calls:
        with pytest.raises(ClientClosed):
            await in_time(call)
