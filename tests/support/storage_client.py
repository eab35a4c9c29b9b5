"""Storage as tests use it: stubs, and a real service behind them.

`RunningStorage` is the service in this process, on a free port over a real RocksDB; `StorageClient`
the stubs to any storage service. Nothing here knows what a right answer is.
"""

from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from storage_svc.app import storage
from storage_svc.engines.engine import Engines
from tests.support.engine_choice import ENGINE, engine_variables
from tests.support.exchange_client import ExchangeClient, ExchangeStream
from tidemark.api.broker.v1.topic_pb2 import Topic, TopicSettings
from tidemark.api.storage.v1 import storage_pb2
from tidemark.api.storage.v1.action_pb2 import (
    Action,
    ActionResult,
    DelegateActionsRequest,
)
from tidemark.api.storage.v1.action_pb2_grpc import DelegationServiceStub
from tidemark.api.storage.v1.retention_pb2_grpc import RetentionServiceStub
from tidemark.api.storage.v1.storage_pb2_grpc import StorageServiceStub
from tidemark.clock import Clock
from tidemark.local.ports import free_address
from tidemark.local.service_process import ServiceProcess
from tidemark.rpc import open_channel
from tidemark.settings import StorageSettings

NO_LIFECYCLE = "127.0.0.1:1"
"""Nothing listens here: a cluster on the default ports must not meet the tests."""

CLUSTER_ID = "cluster-a"
INCARNATION = 7


class StorageClient:
    """The stubs to one storage service, and the few calls that most tests begin with."""

    def __init__(self, channel: Any) -> None:
        self.storage: Any = StorageServiceStub(channel)
        self.owner: Any = DelegationServiceStub(channel)
        self.retention: Any = RetentionServiceStub(channel)

    async def claim(self, partition: int = 0, **fields: Any) -> Any:
        fields = {
            "cluster_id": CLUSTER_ID,
            "broker_id": "broker-a",
            "incarnation": INCARNATION,
            "broker_address": "127.0.0.1:1",
            **fields,
        }
        request = storage_pb2.ClaimPartitionRequest(partition=partition, **fields)
        return await self.storage.ClaimPartition(request)

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[ExchangeStream]:
        """An exchange that carries no partition yet."""
        stream = ExchangeStream(self.storage.Exchange())
        try:
            yield stream
        finally:
            await stream.close()

    @asynccontextmanager
    async def bound(
        self, partition: int = 0, broker_epoch: int = 0
    ) -> AsyncIterator[ExchangeClient]:
        """An exchange with one partition, under an epoch that may or may not be good."""
        async with self.stream() as stream:
            yield await stream.bind(partition, broker_epoch)

    @asynccontextmanager
    async def exchange(self, partition: int = 0, **claim: Any) -> AsyncIterator[ExchangeClient]:
        """Claim the partition and bind to it. Storage knows the link: time may be moved."""
        claimed = await self.claim(partition, **claim)
        async with self.bound(partition, claimed.broker_epoch) as exchange:
            await exchange.bind_answered.wait()
            yield exchange

    async def create_topic(self, name: str, **settings: Any) -> Topic:
        topic = Topic(name=name, settings=TopicSettings(**settings))
        request = storage_pb2.PutTopicRequest(topic=topic, create=True)
        created: Topic = (await self.storage.PutTopic(request)).topic
        return created

    async def update_topic(self, name: str, expected_version: int = 0, **settings: Any) -> Topic:
        topic = Topic(name=name, settings=TopicSettings(**settings))
        request = storage_pb2.PutTopicRequest(topic=topic, expected_version=expected_version)
        changed: Topic = (await self.storage.PutTopic(request)).topic
        return changed

    async def queue(self, lmq_name: str, partition: int = 0) -> Any:
        request = storage_pb2.GetQueueRequest(partition=partition, lmq_name=lmq_name)
        return await self.storage.GetQueue(request)

    async def info(self, partition: int = 0) -> Any:
        described = await self.storage.DescribeStorage(storage_pb2.DescribeStorageRequest())
        return described.held[partition]

    async def scan(
        self, kind: storage_pb2.ScanKind.ValueType, partition: int = 0, **fields: Any
    ) -> Any:
        request = storage_pb2.ScanPartitionRequest(partition=partition, kind=kind, **fields)
        return await self.storage.ScanPartition(request)

    async def due(self, kind: storage_pb2.ScanKind.ValueType, partition: int = 0) -> list[Action]:
        """The actions that a sweep would plan."""
        return [fact.action for fact in (await self.scan(kind, partition)).facts]

    async def delegate(self, *actions: Action, partition: int = 0) -> list[ActionResult]:
        request = DelegateActionsRequest(partition=partition, actions=actions)
        return list((await self.owner.DelegateActions(request)).results)

    async def report_held(
        self, broker_epoch: int, receipts: Iterable[bytes] = (), partition: int = 0
    ) -> Any:
        """Tell storage what the broker still holds."""
        page = storage_pb2.ReportHeldReservationsRequest(
            partition=partition, broker_epoch=broker_epoch, receipts=receipts
        )
        return await self.storage.ReportHeldReservations(iter([page]))


class RunningStorage(StorageClient):
    """A real storage service in this process; `restart` ends it and starts another on its data."""

    def __init__(
        self, data_dir: Path, clock: Clock, *, engines: Engines | None = None, **settings: Any
    ) -> None:
        """`engines` take the place of RocksDB."""
        self.data_dir = data_dir
        self.clock = clock
        self._engines = engines
        self._settings = {
            "partitions": 1,
            "disk_free_bytes_min": 0,
            "await_sweep": False,
            "lifecycle_address": NO_LIFECYCLE,
            **ENGINE,
            **settings,
        }
        self._running = AsyncExitStack()

    async def start(self) -> None:
        settings = StorageSettings(
            cluster_id=CLUSTER_ID,
            listen="127.0.0.1:0",
            data_dir=self.data_dir,
            **self._settings,
        )
        serving = storage(settings, self.clock, lambda usual: self._engines or usual)
        server = await self._running.enter_async_context(serving)
        channel = await self._running.enter_async_context(open_channel(server.address))
        super().__init__(channel)
        self.address = server.address

    async def stop(self) -> None:
        await self._running.aclose()

    async def restart(self, clock: Clock | None = None, **settings: Any) -> None:
        """Everything that is only in memory is gone; what was answered is not."""
        await self.stop()
        self.clock = clock or self.clock
        self._settings.update(settings)
        await self.start()


def storage_process(data_dir: Path, log_file: Path, **settings: str) -> ServiceProcess:
    """A storage service in a process of its own, not yet started; settings by their last words."""
    address = free_address()
    environment = {
        "TIDEMARK_CLUSTER_ID": CLUSTER_ID,
        "TIDEMARK_STORAGE_AWAIT_SWEEP": "false",
        "TIDEMARK_LIFECYCLE_ADDRESS": NO_LIFECYCLE,
        "TIDEMARK_STORAGE_LISTEN": address,
        "TIDEMARK_STORAGE_DATA_DIR": str(data_dir),
        **engine_variables(),
        **{f"TIDEMARK_{name.upper()}": value for name, value in settings.items()},
    }
    return ServiceProcess(
        "storage",
        "storage_svc",
        address=address,
        health_service="tidemark.api.storage.v1.StorageService",
        environment=environment,
        log_file=log_file,
    )


async def loaded(storage: StorageClient) -> int:
    """How many queues of partition 0 are materialized."""
    count: int = (await storage.info()).materialized_queues
    return count
