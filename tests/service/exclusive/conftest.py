"""Fixtures: a broker with an exclusive topic behind gates, and the two forms of its clients."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.support.exclusive_broker import PARTITIONS, ExclusiveBroker
from tests.support.exclusive_clients import Client
from tidemark.api.broker.v1.topic_pb2 import SUBSCRIPTION_KIND_EXCLUSIVE
from tidemark.clock import Clock, SystemClock

Start: TypeAlias = Callable[..., Awaitable[ExclusiveBroker]]
NewClient: TypeAlias = Callable[..., Awaitable[Client]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts a broker with settings of its own; `own` is exclusive and `shared` is not."""
    async with AsyncExitStack() as stack:

        async def start(clock: Clock | None = None, **settings: Any) -> ExclusiveBroker:
            broker = ExclusiveBroker(tmp_path, clock or SystemClock(), PARTITIONS, **settings)
            stack.push_async_callback(broker.close)
            await broker.start_storage()
            await broker.start_gates()
            await broker.start_broker()
            await broker.create_topic("own", subscription=SUBSCRIPTION_KIND_EXCLUSIVE)
            await broker.create_topic("shared")
            return broker

        yield start


@pytest.fixture
async def broker(start: Start) -> ExclusiveBroker:
    """The default settings, the time of the machine."""
    return await start()


@pytest.fixture(params=["session", "unary"])
def kind(request: pytest.FixtureRequest) -> str:
    """Tests that ask for a client run with either form of one."""
    return str(request.param)


@pytest.fixture
async def client(broker: ExclusiveBroker, kind: str) -> NewClient:
    """Makes clients, all of the same form."""

    async def client(client_id: str, group: str = "") -> Client:
        if kind == "session":
            return await broker.session_client(client_id, group)
        return broker.unary_client(client_id, group)

    return client
