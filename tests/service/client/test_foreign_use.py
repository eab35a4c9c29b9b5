"""A client where it does not belong: in another event loop, or before it is entered.

Each call is refused at once, and the client goes on where it belongs (K3).
"""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

import tidemark
from tests.support.local_broker import LocalBroker, in_time
from tidemark.errors import ClientClosed, InvalidArgument, TidemarkError

QUEUE = "orders/a"


async def refusal_elsewhere(call: Callable[[], Awaitable[object]]) -> TidemarkError | None:
    """How a call fails in the event loop of another thread; None if it succeeds."""
    refusals: list[TidemarkError] = []

    async def try_it() -> None:
        try:
            await in_time(call())
        except TidemarkError as error:
            refusals.append(error)

    await asyncio.to_thread(asyncio.run, try_it())
    return refusals[0] if refusals else None


async def test_calls_from_another_event_loop_are_refused(local: LocalBroker) -> None:
    await local.create_topic()
    async with tidemark.connect(local.address) as client:
        publisher = await client.publisher(QUEUE)
        await publisher.publish(b"here")
        pulled = await client.pull(QUEUE, group="puller")
        async with client.subscribe([QUEUE]) as deliveries:
            delivery = await in_time(anext(deliveries))
            calls: dict[str, Callable[[], Awaitable[object]]] = {
                "publisher": lambda: client.publisher(QUEUE),
                "publish": lambda: publisher.publish(b"x"),
                "publish_many": lambda: publisher.publish_many([b"x"]),
                "pull": lambda: client.pull(QUEUE, group="other"),
                "create_topic": lambda: client.create_topic("another"),
                "subscribe": lambda: client.subscribe(["orders/b"]).__aenter__(),
                "get_topic": lambda: client.admin.get_topic("orders"),
                "anext": lambda: anext(deliveries),
                "batches": lambda: anext(deliveries.batches()),
                "ack": delivery.ack,
                "ack and wait": lambda: delivery.ack(wait=True),
                "nack": delivery.nack,
                "dead_letter": lambda: delivery.dead_letter("no"),
                "release": delivery.release,
                "extend": lambda: delivery.extend(60_000),
                "settle": lambda: client.settle(pulled),
                "ack of a pulled message": lambda: next(iter(pulled)).ack(),
                "extend of a pulled message": lambda: next(iter(pulled)).extend(60_000),
                "flush": deliveries.flush,
                "close of the publisher": publisher.close,
                "close of the subscription": deliveries.close,
                "close": client.close,
            }
            refusals = {name: await refusal_elsewhere(call) for name, call in calls.items()}

            assert {name: type(each) for name, each in refusals.items()} == dict.fromkeys(
                calls, InvalidArgument
            )
            await in_time(publisher.publish(b"also here"))
            await in_time(delivery.ack(wait=True))
            await in_time(client.settle(pulled))
            groups = await client.admin.list_groups(QUEUE)
            assert {each.name: each.inflight for each in groups} == {"puller": 0, "default": 1}


async def test_nothing_is_called_before_a_client_is_entered(local: LocalBroker) -> None:
    client = tidemark.connect(local.address)
    for call in (client.publisher(QUEUE), client.pull(QUEUE), client.create_topic("another")):
        with pytest.raises(ClientClosed, match="async with"):
            await call
    await client.close()
