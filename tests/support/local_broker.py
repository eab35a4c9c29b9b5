"""A broker and its storage in the process of the test, over real gRPC and a real RocksDB.

Both parts are the real ones, made by their own `app.py`; each can be stopped and started again at
the same address, over the same data.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc

from broker_svc.app import broker
from broker_svc.links.expiry_timer import FINEST_MS
from storage_svc.app import storage
from storage_svc.engines.engine import Engines
from tests.support.engine_choice import ENGINE
from tests.support.faulty_engine import FaultyEngines
from tests.support.session import Consumer, Session, batch_of
from tests.support.storage_client import NO_LIFECYCLE
from tidemark.api.broker.v1 import broker_pb2, message_pb2, topic_pb2
from tidemark.api.broker.v1.broker_pb2_grpc import BrokerServiceStub
from tidemark.api.broker.v1.message_pb2 import Ack, Delivery, PublishRun, Settlement
from tidemark.api.broker.v1.topic_pb2_grpc import TopicServiceStub
from tidemark.api.storage.v1.action_pb2_grpc import DelegationServiceStub
from tidemark.api.storage.v1.storage_pb2_grpc import StorageServiceStub
from tidemark.client.transport.codec import Action, Range, settlement_of
from tidemark.clock import Clock, ManualClock, SystemClock
from tidemark.local.ports import free_address
from tidemark.names import partition_of
from tidemark.rpc import from_status, open_channel, wait_until_serving
from tidemark.rpc.server import RpcServer
from tidemark.settings import BrokerSettings, StorageSettings

BROKER_SERVICE: Final = "tidemark.api.broker.v1.BrokerService"
SERVES_WITHIN_MS: Final = 60_000
ANSWERS_WITHIN_MS: Final = 60_000
"""Only ends a hang: a busy machine may stand still for seconds."""
SILENT_MS_MAX: Final = 600_000
"""After which a client that sends nothing is gone, where the clock is real."""
TOPIC: Final = "orders"
PLAIN: Final = TOPIC
"""The plain queue of the topic."""
QUEUE: Final = "orders/x"
"""A lite queue of the topic."""

T = TypeVar("T")


class LocalBroker:
    """The two services, and stubs to call them."""

    def __init__(self, data_dir: Path, clock: Clock, partitions: int, **settings: Any) -> None:
        self.partitions = partitions
        self._clock = clock
        self._data_dir = data_dir
        self._storage_settings = {
            "await_sweep": False,
            "lifecycle_address": NO_LIFECYCLE,
            **settings.pop("storage", {}),
        }
        self.wrap: Callable[[Engines], Engines] = lambda same: same
        """What is put around the engines of storage, to break them."""
        self._settings = settings
        self._storage: AsyncExitStack | None = None
        self._broker: AsyncExitStack | None = None
        self._clients = AsyncExitStack()
        self._storage_listen, self._broker_listen = free_address(), free_address()
        self.storage_server: RpcServer
        self.server: RpcServer
        self.storage: StorageServiceStub
        self.api: BrokerServiceStub
        self.topics: TopicServiceStub
        self.owner: DelegationServiceStub

    @property
    def address(self) -> str:
        return self._broker_listen

    @property
    def storage_address(self) -> str:
        return self._storage_listen

    # --- the services --------------------------------------------------------------------------

    async def start_storage(self) -> None:
        settings = StorageSettings(
            partitions=self.partitions,
            listen=self._storage_listen,
            data_dir=self._data_dir,
            disk_free_bytes_min=0,
            **{**ENGINE, **self._storage_settings},
        )
        self._storage = AsyncExitStack()
        self.storage_server = await self._storage.enter_async_context(
            storage(settings, self._clock, self.wrap)
        )
        channel = await self._clients.enter_async_context(open_channel(self._storage_listen))
        self.storage = StorageServiceStub(channel)

    async def stop_storage(self) -> None:
        if self._storage is not None:
            stack, self._storage = self._storage, None
            await stack.aclose()

    async def start_broker(self, storage_address: str = "") -> None:
        """Also on storage behind gates, at an address of its own."""
        settings = BrokerSettings(
            partitions=self.partitions,
            listen=self._broker_listen,
            storage_addresses=(storage_address or self._storage_listen,),
            **self._settings,
        )
        self._broker = AsyncExitStack()
        self.server = await self._broker.enter_async_context(broker(settings, self._clock))
        channel = await self._clients.enter_async_context(open_channel(self._broker_listen))
        self.api = BrokerServiceStub(channel)
        self.topics = TopicServiceStub(channel)
        self.owner = DelegationServiceStub(channel)
        await wait_until_serving(channel, BROKER_SERVICE, SERVES_WITHIN_MS)

    async def stop_broker(self) -> None:
        if self._broker is not None:
            stack, self._broker = self._broker, None
            await stack.aclose()

    async def close(self) -> None:
        await self._clients.aclose()
        await self.stop_broker()
        await self.stop_storage()

    # --- clients -------------------------------------------------------------------------------

    async def session(self, client_id: str = "ada", **options: Any) -> Session:
        """A session that is gone, at the latest, when the test ends."""
        session = await Session.open(self.address, client_id, **options)
        self._clients.push_async_callback(session.abort)
        return session

    async def channel(self) -> grpc.aio.Channel:
        """A connection of its own, for what the client does not do."""
        return await self._clients.enter_async_context(open_channel(self.address))

    async def narrow_channel(self) -> grpc.aio.Channel:
        """A connection that buffers little while it is not read: gRPC widens any other."""
        channel = grpc.aio.insecure_channel(self.address, options=[("grpc.http2.bdp_probe", 0)])
        return await self._clients.enter_async_context(channel)

    async def create_topic(self, name: str = TOPIC, **settings: Any) -> topic_pb2.Topic:
        request = topic_pb2.CreateTopicRequest(
            name=name, settings=topic_pb2.TopicSettings(**settings)
        )
        return (await self.topics.CreateTopic(request)).topic

    async def delete_topic(self, name: str) -> None:
        await self.topics.DeleteTopic(topic_pb2.DeleteTopicRequest(name=name, force=True))

    async def publish(
        self, *runs: PublishRun, client_id: str = "ada"
    ) -> list[message_pb2.PublishResult]:
        request = broker_pb2.PublishRequest(client_id=client_id, runs=runs)
        return list((await self.api.Publish(request)).results)

    async def pull(self, lmq_name: str, *, client_id: str = "ada", **fields: Any) -> list[Delivery]:
        request = broker_pb2.PullRequest(client_id=client_id, lmq_name=lmq_name, **fields)
        return list((await self.api.Pull(request)).deliveries)

    async def settle(
        self,
        receipt: bytes,
        action: Action,
        ranges: Iterable[Range] = (),
        *,
        client_id: str = "ada",
    ) -> message_pb2.SettleResult:
        settlements: list[Settlement] = [settlement_of(receipt, action, ranges)]
        request = broker_pb2.SettleRequest(client_id=client_id, settlements=settlements)
        (result,) = (await self.api.Settle(request)).results
        return result

    async def queue(self, lmq_name: str) -> topic_pb2.Queue:
        request = topic_pb2.GetQueueRequest(lmq_name=lmq_name)
        return (await self.topics.GetQueue(request)).queue

    def names_in(self, partition: int, count: int, topic: str = TOPIC) -> list[str]:
        """Names of lite queues that live in one partition."""
        names: list[str] = []
        number = 0
        while len(names) < count:
            name = f"{topic}/{number}"
            if partition_of(name, self.partitions) == partition:
                names.append(name)
            number += 1
        return names


@asynccontextmanager
async def local_broker(
    data_dir: Path, clock: Clock | None = None, *, partitions: int = 2, **settings: Any
) -> AsyncIterator[LocalBroker]:
    """Storage and broker, serving; `settings` are those of the broker, `storage` of storage."""
    if clock is None:  # sessions of tests send no heartbeats, and the machine may be slow
        settings.setdefault("client_timeout_ms", SILENT_MS_MAX)
    local = LocalBroker(data_dir, clock or SystemClock(), partitions, **settings)
    try:
        await local.start_storage()
        await local.start_broker()
        yield local
    finally:
        await local.close()


def run_of(lmq_name: str, *payloads: bytes, **fields: Any) -> PublishRun:
    """A run with a count that is right, unless `fields` change it."""
    return PublishRun(
        **{
            "lmq_name": lmq_name,
            "batch": batch_of(payloads),
            "count": len(payloads),
            **fields,
        }
    )


def payloads_of(deliveries: Iterable[Delivery]) -> list[bytes]:
    return [message.payload for delivery in deliveries for message in delivery.batch.messages]


async def in_time(answer: Awaitable[T]) -> T:
    """The answer, or a failure instead of a test that hangs."""
    return await SystemClock().wait_for(answer, ANSWERS_WITHIN_MS)


async def take(consumer: Consumer, messages: int) -> list[Delivery]:
    """Deliveries that hold at least that many messages."""
    taken: list[Delivery] = []
    while sum(each.count for each in taken) < messages:
        taken += await in_time(consumer.deliveries())
    return taken


async def waiting_consumer(
    session: Session, *queues: str, group: str = "", credit: int = 100
) -> Consumer:
    """A consumer that has acknowledged a first message of each queue, and waits for more."""
    consumer = session.open_consumer(group, credit=credit)
    await consumer.subscribe(*queues)
    for queue in queues:
        await session.publish(queue, [b"first"])
    for each in await take(consumer, len(queues)):
        await session.settle(each.delivery_tag, Ack())
    return consumer


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Repeat a check until it holds; for conditions that no event signals."""

    async def ask() -> None:
        while not await condition():
            await SystemClock().sleep_ms(5)

    await in_time(ask())


async def ticking(clock: ManualClock, answer: Coroutine[Any, Any, T]) -> T:
    """The answer, with time moving as finely as expiry looks at it until it is there.

    How far time gets depends on the load of the machine, and not on expiry.
    """
    waiting = asyncio.create_task(answer)

    async def is_there() -> bool:
        await clock.advance_ms(FINEST_MS)
        return waiting.done()

    await until(is_there)
    return await waiting


def reason_of(result: message_pb2.PublishResult | message_pb2.SettleResult) -> str:
    """The reason of a refusal; "" for a success."""
    return from_status(result.error).reason if result.HasField("error") else ""


async def groups(local: LocalBroker, lmq_name: str = QUEUE) -> list[topic_pb2.Group]:
    """The groups of a queue, as operators see them."""
    request = topic_pb2.ListGroupsRequest(lmq_name=lmq_name)
    return list((await local.topics.ListGroups(request)).groups)


async def until_share(session: Session, *partitions: int) -> None:
    """The broker has heard which partitions of the plain queue take their share."""

    async def heard() -> bool:
        return sorted((await session.open_publisher(PLAIN)).partitions) == sorted(partitions)

    await until(heard)


async def commits(local: LocalBroker) -> int:
    """Commits of all partitions since storage started."""
    response = await local.topics.ListPartitions(topic_pb2.ListPartitionsRequest())
    return sum(each.commits for each in response.partitions)


async def with_faulty_disks(local: LocalBroker) -> list[FaultyEngines]:
    """The same services over disks that fail on demand."""
    disks: list[FaultyEngines] = []

    def wrap(engines: Engines) -> Engines:
        disks.append(FaultyEngines(engines))
        return disks[-1]

    await local.stop_broker()
    await local.stop_storage()
    local.wrap = wrap
    await local.start_storage()
    await local.start_broker()
    return disks
