"""Several brokers over several storage nodes in the process of the test, over real gRPC."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from broker_svc.app import broker
from tests.support.local_broker import BROKER_SERVICE, SERVES_WITHIN_MS
from tests.support.session import Session
from tests.support.storage_nodes import StorageNodes
from tidemark.api.broker.v1.broker_pb2_grpc import BrokerServiceStub
from tidemark.api.broker.v1.topic_pb2_grpc import TopicServiceStub
from tidemark.clock import SystemClock
from tidemark.local.ports import free_address
from tidemark.rpc import open_channel, wait_until_serving
from tidemark.settings import BrokerSettings


class Brokers(StorageNodes):
    """Brokers by number. The calls of `LocalBroker` go to the first one."""

    def __init__(self, directory: Path, nodes: int, brokers: int, partitions: int) -> None:
        super().__init__(directory, nodes, partitions)
        self.members = tuple((f"broker-{number}", free_address()) for number in range(brokers))
        self._running: dict[int, AsyncExitStack] = {}

    async def start_member(self, number: int, **settings: Any) -> None:
        broker_id, address = self.members[number]
        chosen = BrokerSettings(
            **{
                "broker_id": broker_id,
                "brokers": self.members,
                "partitions": self.partitions,
                "listen": address,
                "storage_addresses": self.addresses,
                **settings,
            }
        )
        running = self._running[number] = AsyncExitStack()
        await running.enter_async_context(broker(chosen, SystemClock()))
        channel = await self._clients.enter_async_context(open_channel(address))
        await wait_until_serving(channel, BROKER_SERVICE, SERVES_WITHIN_MS)

    async def stop_member(self, number: int) -> None:
        await self._running.pop(number).aclose()

    async def call(self, number: int) -> None:
        """Have the calls of `LocalBroker` go to another broker."""
        channel = await self._clients.enter_async_context(open_channel(self.members[number][1]))
        self.api, self.topics = BrokerServiceStub(channel), TopicServiceStub(channel)

    async def session_with(self, number: int, client_id: str = "ada", **options: Any) -> Session:
        """A session with one of the brokers."""
        session = await Session.open(self.members[number][1], client_id, **options)
        self._clients.push_async_callback(session.abort)
        return session

    async def close(self) -> None:
        await self._clients.aclose()
        for number in list(self._running):
            await self.stop_member(number)
        await super().close()


@asynccontextmanager
async def several_brokers(
    directory: Path, *, nodes: int = 2, brokers: int = 3, partitions: int = 4
) -> AsyncIterator[Brokers]:
    """All of them serving; calls go to the first."""
    several = Brokers(directory, nodes, brokers, partitions)
    try:
        for node in range(nodes):
            await several.start_node(node)
        for number in range(brokers):
            await several.start_member(number)
        await several.call(0)
        yield several
    finally:
        await several.close()
