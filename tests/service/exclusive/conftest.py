"""A real broker on a real storage service with an exclusive topic, gates between them.

Both can be stopped and started again at the same address over the same data. The gates hold back
or lose what passes between them, so that a test decides who comes first.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.support.exclusive_clients import Client, SessionClient, UnaryClient
from tests.support.gated_storage import GatedLink, GatedStorage, gated_storage
from tests.support.local_broker import LocalBroker
from tidemark.api.broker.v1.topic_pb2 import SUBSCRIPTION_KIND_EXCLUSIVE
from tidemark.clock import Clock, SystemClock
from tidemark.names import partition_of

PARTITIONS = 2
QUEUE = "own/a"
OTHER_QUEUE = "own/b"


class ExclusiveBroker(LocalBroker):
    """A broker that reaches its storage through gates."""

    gates: GatedStorage

    async def start_gates(self) -> None:
        gates = gated_storage(self.storage_address, self.partitions)
        self.gates = await self._clients.enter_async_context(gates)

    async def start_broker(self, storage_address: str = "") -> None:
        await super().start_broker(storage_address or self.gates.address)

    @property
    def link(self) -> GatedLink:
        """The way to the partition of `QUEUE`."""
        return self.gates.links[partition_of(QUEUE, self.partitions)]

    async def restart_broker(self) -> None:
        await self.stop_broker()
        await self.start_broker()

    async def session_client(
        self, client_id: str, group: str = "", credit: int = 100
    ) -> SessionClient:
        return SessionClient(await self.session(client_id), client_id, group, credit)

    def unary_client(self, client_id: str, group: str = "") -> UnaryClient:
        return UnaryClient(self, client_id, group)


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
