"""Several storage nodes and a broker in the process of the test, over real gRPC and RocksDB."""

import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from broker_svc.app import broker
from storage_svc.app import storage
from tests.support.local_broker import (
    BROKER_SERVICE,
    SERVES_WITHIN_MS,
    LocalBroker,
    until,
)
from tests.support.storage_client import NO_LIFECYCLE
from tidemark.api.broker.v1.broker_pb2_grpc import BrokerServiceStub
from tidemark.api.broker.v1.topic_pb2_grpc import TopicServiceStub
from tidemark.api.storage.v1 import storage_pb2
from tidemark.api.storage.v1.storage_pb2_grpc import StorageServiceStub
from tidemark.clock import Clock, SystemClock
from tidemark.local.ports import free_address
from tidemark.registry.protocol import Timers
from tidemark.rpc import open_channel, wait_until_serving
from tidemark.settings import BrokerSettings, StorageSettings

TIMERS = Timers(
    beat_ms=100,
    time_to_live_ms=3_000,
    first_wait_ms=300,
    stable_ms=300,
    move_ms=20,
    leave_ms=60_000,
)
"""Members join and leave in less time than usual, and are judged dead as late as ever."""


class StorageNodes(LocalBroker):
    """Storage nodes by their place in the sorted list of addresses, and a broker over all."""

    def __init__(self, directory: Path, nodes: int, partitions: int) -> None:
        super().__init__(directory, SystemClock(), partitions)
        self.addresses = tuple(sorted(free_address() for _ in range(nodes)))
        self._directory = directory
        self._nodes: dict[int, AsyncExitStack] = {}
        self._stubs: dict[int, StorageServiceStub] = {}

    def data_dir(self, node: int) -> Path:
        return self._directory / f"storage-{node}"

    async def start_node(self, node: int, *, clock: Clock | None = None, **settings: Any) -> None:
        chosen = StorageSettings(
            **{
                "partitions": self.partitions,
                "listen": self.addresses[node],
                "data_dir": self.data_dir(node),
                "storage_addresses": self.addresses,
                "disk_free_bytes_min": 0,
                "await_sweep": False,
                "lifecycle_address": NO_LIFECYCLE,
                **settings,
            }
        )
        running = AsyncExitStack()
        await running.enter_async_context(storage(chosen, clock or SystemClock(), timers=TIMERS))
        self._nodes[node] = running
        channel = await self._clients.enter_async_context(open_channel(self.addresses[node]))
        self._stubs[node] = StorageServiceStub(channel)

    async def stop_node(self, node: int) -> None:
        await self._nodes.pop(node).aclose()

    def wipe(self, node: int) -> None:
        """Its volume vanishes."""
        shutil.rmtree(self.data_dir(node))

    def stub(self, node: int) -> StorageServiceStub:
        return self._stubs[node]

    async def described(self, node: int) -> storage_pb2.DescribeStorageResponse:
        return await self.stub(node).DescribeStorage(storage_pb2.DescribeStorageRequest())

    async def held(self) -> Mapping[int, list[int]]:
        """The partitions of each node that runs, without those that are lost."""
        return {
            node: [
                each.partition
                for each in (await self.described(node)).held
                if "DATA_LOST" not in [fault.reason for fault in each.faults]
            ]
            for node in sorted(self._nodes)
        }

    async def until_held(self, **expected: list[int]) -> None:
        """Until nodes hold just these: `until_held(n0=[0, 3], n1=[1], n2=[2])`."""
        wanted = {int(name[1:]): numbers for name, numbers in expected.items()}

        async def is_so() -> bool:
            return await self.held() == wanted

        await until(is_so)

    async def start_broker(self, storage_address: str = "", **settings: Any) -> None:
        chosen = BrokerSettings(
            partitions=self.partitions,
            listen=self.address,
            storage_addresses=self.addresses,
            **settings,
        )
        self._broker = AsyncExitStack()
        self.server = await self._broker.enter_async_context(broker(chosen, SystemClock()))
        channel = await self._clients.enter_async_context(open_channel(self.address))
        self.api, self.topics = BrokerServiceStub(channel), TopicServiceStub(channel)
        await wait_until_serving(channel, BROKER_SERVICE, SERVES_WITHIN_MS)

    async def close(self) -> None:
        await super().close()
        for node in list(self._nodes):
            await self.stop_node(node)


@asynccontextmanager
async def storage_nodes(
    directory: Path, nodes: int = 3, partitions: int = 4
) -> AsyncIterator[StorageNodes]:
    """None of them started."""
    several = StorageNodes(directory, nodes, partitions)
    try:
        yield several
    finally:
        await several.close()
