"""Takeovers that stand at a gate, so that a test decides what happens in the middle of one.

A gate holds back what the broker asks storage, or what storage answers.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.support.exclusive_broker import OTHER_QUEUE, QUEUE, ExclusiveBroker
from tests.support.exclusive_clients import TRANSFERRING, Client, subscribe
from tests.support.gated_storage import Gate
from tests.support.local_broker import in_time, run_of, until


def gate_of(broker: ExclusiveBroker, way: str) -> Gate:
    return broker.link.requests if way == "requests" else broker.link.answers


WAYS = pytest.mark.parametrize("way", ["requests", "answers"])
"""Whether the request reaches storage late, or the answer reaches the broker late."""


async def until_transferring(broker: ExclusiveBroker, client_id: str) -> None:
    """Return once the broker has sent the takeover."""
    looking = broker.unary_client(client_id)

    async def transferring() -> bool:
        return (await looking.pull(QUEUE)).subscription_state == TRANSFERRING

    await until(transferring)


@asynccontextmanager
async def held_takeover(
    broker: ExclusiveBroker, client: Client, gate: Gate
) -> AsyncIterator["asyncio.Task[int]"]:
    """A client subscribes, and its takeover stands at the gate until the block ends."""
    # Answered, so that nothing is under way for which the takeover would wait before the gate.
    await broker.publish(run_of(OTHER_QUEUE, b"answered"))
    gate.close()
    subscribing = asyncio.create_task(subscribe(client, QUEUE))
    try:
        await until_transferring(broker, client.client_id)
        await in_time(gate.until_held())
        yield subscribing
    finally:
        gate.let_go()


async def until_published(broker: ExclusiveBroker, payload: bytes) -> None:
    """Publish as soon as the link is up again."""

    async def published() -> bool:
        (result,) = await broker.publish(run_of(QUEUE, payload))
        return not result.HasField("error")

    await until(published)


async def until_gone(broker: ExclusiveBroker, client_id: str) -> None:
    """Return once calls made after the client left have been served: its end was seen by then."""
    for _ in range(3):
        await broker.unary_client(client_id).report({})
