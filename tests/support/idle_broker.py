"""A real broker on a real storage service, with gates between them and clocks that stand still.

The broker's parts are wired as the service wires them; only cleanup does not run by itself, so that
a test decides when it looks. Broker and storage have a clock each: moving one leaves the other.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker_svc.api.broker_service import BrokerService
from broker_svc.api.topic_service import TopicService
from broker_svc.api.unary_clients import UnaryClients
from broker_svc.app import build_components as wire
from broker_svc.app import static_registry
from broker_svc.components import BrokerComponents
from broker_svc.idle.activity_leases import Lease
from broker_svc.idle.cleanup import EvictionOutcome
from broker_svc.links.storage_nodes import StorageNode
from storage_svc.app import storage
from storage_svc.engines.engine import Engines
from tests.support.engine_choice import ENGINE
from tests.support.faulty_engine import FaultyEngines
from tests.support.gated_storage import GatedLink, GatedStorage
from tests.support.local_broker import run_of
from tests.support.storage_client import NO_LIFECYCLE
from tidemark.api.broker.v1 import broker_pb2, message_pb2, subscription_pb2, topic_pb2
from tidemark.api.broker.v1.broker_pb2_grpc import (
    BrokerServiceStub,
    add_BrokerServiceServicer_to_server,
)
from tidemark.api.broker.v1.topic_pb2_grpc import (
    TopicServiceStub,
    add_TopicServiceServicer_to_server,
)
from tidemark.api.storage.v1.storage_pb2_grpc import StorageServiceStub
from tidemark.clock import ManualClock
from tidemark.local.ports import free_address
from tidemark.rpc import RpcServer, open_channel
from tidemark.rpc.statuses import from_status
from tidemark.settings import BrokerSettings, StorageSettings

PARTITIONS = 2
TOPIC = "orders"
IDLE_MS = 1_000
QUEUE = "orders/a"
"""Lives in partition 0."""

QUEUE_PARTITION = 0
KEY = (QUEUE_PARTITION, QUEUE)


@dataclass(frozen=True)
class IdleBroker:
    """A broker as its clients see it, and what is inside."""

    components: BrokerComponents
    service: BrokerService
    clock: ManualClock
    calls: BrokerServiceStub
    topics: TopicServiceStub

    # --- what clients do -----------------------------------------------------------------------

    async def create_topic(self, name: str = TOPIC, **settings: Any) -> None:
        settings = {"idle_after_ms": IDLE_MS, **settings}
        await self.topics.CreateTopic(
            topic_pb2.CreateTopicRequest(name=name, settings=topic_pb2.TopicSettings(**settings))
        )

    async def publish(self, payload: bytes, lmq_name: str = QUEUE) -> message_pb2.PublishReceipt:
        """Publish one message by a unary call; raises why it was refused."""
        request = broker_pb2.PublishRequest(runs=[run_of(lmq_name, payload)])
        published = await self.calls.Publish(request)
        (result,) = published.results
        if result.HasField("error"):
            raise from_status(result.error)
        return result.receipt

    async def publish_and_leave(self, payload: bytes, lmq_name: str = QUEUE) -> None:
        """Publish one message and give the publisher up."""
        receipt = await self.publish(payload, lmq_name)
        destroy = broker_pb2.DestroyPublisherRequest(publisher_id=receipt.publisher_id)
        await self.calls.DestroyPublisher(destroy)

    async def pull(self, lmq_name: str = QUEUE) -> list[message_pb2.Delivery]:
        pull = broker_pb2.PullRequest(client_id="reader", lmq_name=lmq_name)
        return list((await self.calls.Pull(pull)).deliveries)

    async def ack(self, delivery: message_pb2.Delivery) -> None:
        settlement = message_pb2.Settlement(receipt=delivery.receipt, ack=message_pb2.Ack())
        settle = broker_pb2.SettleRequest(client_id="reader", settlements=[settlement])
        (result,) = (await self.calls.Settle(settle)).results
        if result.HasField("error"):
            raise from_status(result.error)

    async def try_evict(self, lmq_name: str = QUEUE) -> EvictionOutcome:
        """The direct call, over the wire."""
        evict = topic_pb2.TryEvictInactiveQueueRequest(lmq_name=lmq_name)
        answer = await self.topics.TryEvictInactiveQueue(evict)
        name = topic_pb2.EvictionOutcome.Name(answer.outcome)
        return EvictionOutcome(name.removeprefix("EVICTION_OUTCOME_"))

    async def is_loaded(self, lmq_name: str = QUEUE) -> bool:
        """Whether storage holds a handle of the queue; looking does not wake it."""
        found = await self.topics.GetQueue(topic_pb2.GetQueueRequest(lmq_name=lmq_name))
        activity: int = found.queue.activity
        return activity == topic_pb2.QUEUE_ACTIVITY_MATERIALIZED

    # --- what happens inside -------------------------------------------------------------------

    async def lease(self, lmq_name: str = QUEUE, idle_after_ms: int = IDLE_MS) -> Lease:
        return await self.components.leases.create(lmq_name, (QUEUE_PARTITION,), idle_after_ms)

    async def idle_queue(self) -> None:
        """The queue holds the message "kept", it is not used, and its window has elapsed."""
        await self.publish_and_leave(b"kept")
        await self.clock.advance_ms(IDLE_MS)

    async def waiting_consumer(self, lmq_name: str = QUEUE) -> "asyncio.Task[bytes]":
        """A subscriber that has found nothing and waits; ends with the payload it gets."""
        session: Any = self.calls.Session()  # its published types lose the response
        entry = subscription_pb2.SubscriptionEntry(lmq_name=lmq_name)
        sync = subscription_pb2.SubscriptionSync(
            consumer_id=1, mode=subscription_pb2.SYNC_MODE_PARTIAL_ADD, entries=[entry]
        )
        first = broker_pb2.SessionRequest(
            hello=broker_pb2.Hello(client_id="subscriber"),
            open_consumers=[broker_pb2.OpenConsumer(consumer_id=1, credit=10)],
            syncs=[sync],
        )
        await session.write(first)
        while not (await session.read()).synced:
            pass
        await self.until_answered()

        async def delivered() -> bytes:
            while not (frame := await session.read()).deliveries:
                pass
            payload: bytes = frame.deliveries[0].batch.messages[0].payload
            return payload

        return asyncio.create_task(delivered())

    async def until_answered(self) -> None:
        """Return in the turn in which the last answer came, before the caller has seen it."""
        while self.components.links[QUEUE_PARTITION].waiting:
            await self.clock.sleep_ms(0)

    async def until_disconnected(self, partition: int = QUEUE_PARTITION) -> None:
        while self.components.links[partition].connected.is_set():
            await self.clock.sleep_ms(0)

    async def reconnect(self, partition: int = QUEUE_PARTITION) -> None:
        """Let the time pass after which a broken link is tried again."""
        link = self.components.links[partition]
        while not link.connected.is_set():
            await self.clock.advance_ms(50)


def leases_of(broker: IdleBroker) -> int:
    return broker.components.leases.active


async def cleaning(broker: IdleBroker, link: GatedLink) -> asyncio.Task[EvictionOutcome]:
    """A cleanup of the idle queue whose answer waits at the gate."""
    await broker.idle_queue()
    link.answers.close()
    cleanup = asyncio.create_task(broker.components.cleanup.evict(KEY))
    await link.answers.until_held()
    return cleanup


class RestartableStorage:
    """A storage service that can go down and come up again, at the same address."""

    def __init__(self, data_dir: Path, clock: ManualClock) -> None:
        self._data_dir = data_dir
        self._clock = clock
        self._running = AsyncExitStack()
        self.address = free_address()
        self.disk: FaultyEngines

    async def start(self) -> None:
        settings = StorageSettings(
            lifecycle_address=NO_LIFECYCLE,
            await_sweep=False,
            listen=self.address,
            data_dir=self._data_dir,
            partitions=PARTITIONS,
            disk_free_bytes_min=0,
            **ENGINE,
        )
        await self._running.enter_async_context(storage(settings, self._clock, self._wrap))

    async def stop(self) -> None:
        await self._running.aclose()

    def _wrap(self, engines: Engines) -> Engines:
        self.disk = FaultyEngines(engines)
        return self.disk


@asynccontextmanager
async def idle_broker(gates: GatedStorage, **settings: Any) -> AsyncIterator[IdleBroker]:
    settings = {"listen": "127.0.0.1:0", "partitions": PARTITIONS, **settings}
    chosen = BrokerSettings(storage_addresses=(gates.address,), **settings)
    clock = ManualClock()
    async with open_channel(gates.address) as upstream:
        stub = StorageServiceStub(upstream)
        node = StorageNode(gates.address, stub)
        components, _ = wire(chosen, [node], clock)
        components.assignments.follow(static_registry(chosen, chosen.listen).view)
        clients = UnaryClients(
            components.directory, components.settlements, components.subscriptions
        )
        service = BrokerService(components, clients, first_session_id=0)
        server = RpcServer(chosen.listen, unary_deadline_ms=None)
        server.add(add_BrokerServiceServicer_to_server, service)
        server.add(add_TopicServiceServicer_to_server, TopicService(components))
        await server.start()
        running = [asyncio.create_task(node.link.run())]
        running += [asyncio.create_task(link.run()) for link in components.links.values()]
        try:
            for link in components.links.values():
                await link.connected.wait()
            async with open_channel(server.address) as channel:
                calls, topics = BrokerServiceStub(channel), TopicServiceStub(channel)
                yield IdleBroker(components, service, clock, calls, topics)
        finally:
            await server.stop(0)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
