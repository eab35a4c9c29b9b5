"""Fixtures: a broker with its storage in the process of the test, and clients of it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeAlias

import pytest

import tidemark
from tests.support.local_broker import LocalBroker, local_broker, until

Connect: TypeAlias = Callable[..., Awaitable[tidemark.Client]]


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[LocalBroker]:
    """Two partitions, the topic `orders`, the exclusive topic `own`."""
    async with local_broker(tmp_path) as local:
        yield local


@pytest.fixture
async def connect(local: LocalBroker) -> AsyncIterator[Connect]:
    """Clients that are closed, at the latest, when the test ends."""
    async with AsyncExitStack() as stack:

        async def connect(client_id: str = "ada", **options: Any) -> tidemark.Client:
            address = options.pop("address", local.address)
            client = tidemark.connect(address, client_id=client_id, **options)
            return await stack.enter_async_context(client)

        yield connect


@pytest.fixture
async def client(connect: Connect) -> tidemark.Client:
    """A client, after it has created both topics."""
    client = await connect()
    await client.create_topic("orders")
    await client.create_topic("own", subscription="exclusive")
    return client


async def until_disconnected(client: tidemark.Client) -> None:
    async def disconnected() -> bool:
        return client._routes.home.session is None

    await until(disconnected)
