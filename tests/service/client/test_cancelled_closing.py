"""Closing that is cancelled, at each of its awaits in turn: nothing of the client is left."""

import asyncio
from collections.abc import Callable, Coroutine, Generator
from types import coroutine
from typing import Any

import pytest

import tidemark
from tests.service.client.conftest import Connect
from tests.support.local_broker import LocalBroker, in_time, until
from tests.support.sdk_calls import publish, take
from tidemark.errors import ClientClosed

pytestmark = pytest.mark.slow

SHARED, OWN = "orders/a", "own/a"


@coroutine
def _cancelled_at(
    work: Coroutine[Any, Any, None], is_chosen: Callable[[int], bool]
) -> Generator[Any, Any, None]:
    """Run a coroutine and cancel the task at the chosen ones of its awaits."""
    task = asyncio.current_task()
    assert task is not None
    step = 0
    error: BaseException | None = None
    while True:
        try:
            awaited = work.send(None) if error is None else work.throw(error)
        except StopIteration:
            return
        step += 1
        if is_chosen(step):
            task.cancel()
        try:
            yield awaited
            error = None
        except BaseException as thrown:
            error = thrown


async def close(client: tidemark.Client, is_chosen: Callable[[int], bool]) -> bool:
    """Close a client in a task that is cancelled at some awaits; whether it ended before."""

    async def work() -> None:
        await _cancelled_at(client.close(), is_chosen)

    closing = asyncio.create_task(work())
    await in_time(asyncio.wait({closing}))
    return not closing.cancelled()


async def in_use(address: str) -> tidemark.Client:
    """A client with a reservation in hand, one untouched, and a publish under way."""
    client = await tidemark.connect(address, client_id="bob").__aenter__()
    shared = await client.subscribe([SHARED]).__aenter__()
    await client.subscribe([OWN]).__aenter__()
    await publish(client, SHARED, b"1", b"2")
    await take(shared, 1)
    publishing = asyncio.create_task((await client.publisher(SHARED)).publish(b"3"))
    publishing.add_done_callback(lambda done: done.cancelled() or done.exception())
    return client


@pytest.mark.parametrize("times", ["once", "at every await from there on"])
async def test_a_client_whose_closing_is_cancelled_at_any_await_leaves_no_task(
    local: LocalBroker, connect: Connect, client: tidemark.Client, times: str
) -> None:
    """K3: the session ended unnoticed, and its connection waited for news of it for good."""
    before = asyncio.all_tasks()
    chosen, has_ended = 0, False

    while not has_ended:
        chosen += 1
        bob = await in_use(local.address)
        is_chosen = chosen.__eq__ if times == "once" else chosen.__le__
        has_ended = await close(bob, is_chosen)

        async def nothing_left() -> bool:
            return not [task for task in asyncio.all_tasks() - before if "client/" in repr(task)]

        await until(nothing_left)
        assert bob._routes.home.session is None
        with pytest.raises(ClientClosed):
            await bob.publisher(SHARED)
        await in_time(bob.close())  # again: it has nothing to do

    assert chosen > 3, "it has more awaits than that"
