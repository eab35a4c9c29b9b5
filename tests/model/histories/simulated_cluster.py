"""A broker and its storage as simulated processes: all their code, a real RocksDB, no gRPC.

Either can be killed in the middle of anything and started again, the link between them interrupted,
and a commit told to fail before or after it was written. With a shared store instead of RocksDB, a
second storage node takes the partition over while the first still serves its broker and clients.
"""

import asyncio
import random
from pathlib import Path
from typing import Any, Final

from broker_svc.api.broker_service import BrokerService
from broker_svc.api.topic_service import TopicService
from broker_svc.api.unary_clients import UnaryClients
from broker_svc.app import EXPIRE_EVERY_MS, build_components, static_registry
from broker_svc.components import BrokerComponents
from broker_svc.links.storage_nodes import StorageNode
from storage_svc.api.storage_service import StorageService
from storage_svc.engines.engine import Engines, Identity
from tests.model.histories.scenario import TOPIC, Disturb
from tests.model.histories.simulated_storage import RememberedEngines, open_storage
from tests.model.histories.simulated_time import Process, SimulatedClock
from tests.model.histories.wires import Wire
from tests.support.faulty_engine import Fault, FaultyEngines
from tests.support.session import Session
from tests.support.shared_engine import LostAnswer, SharedEngines, SharedStore
from tidemark.api.broker.v1 import broker_pb2, topic_pb2
from tidemark.errors import Unavailable
from tidemark.settings import BrokerSettings

PARTITIONS: Final = 1
CLUSTER_ID: Final = "simulated"
CLIENT_TIMEOUT_MS: Final = 2_000
DOWN_MS_MAX: Final = 200
COMMIT_WITHIN_MS: Final = 200
TRIP_MS_MAX: Final = 2
BOTH_SERVE_MS_MAX: Final = 800
FAULTS: Final = ("broker", "storage", "both", "link", "commit")
SHARED_FAULTS: Final = ("takeover", "takeover", "takeover", "answer", *FAULTS)


class SimulatedCluster:
    """One storage process, one broker process, and the wires that clients use."""

    def __init__(
        self,
        data_dir: Path,
        clock: SimulatedClock,
        chance: random.Random,
        *,
        shared: bool = False,
    ) -> None:
        self.clock = clock
        self.chance = chance
        self.partitions = PARTITIONS
        self.store = SharedStore(self._trip) if shared else None
        self._engines = RememberedEngines(data_dir)
        self._disk: FaultyEngines
        self._storage = Process()
        self._broker = Process()
        self._storage_service: StorageService
        self._link = Wire(None, self._storage, clock, chance)
        self._service: BrokerService
        self._components: BrokerComponents
        self._topics: TopicService
        self._client_wires: dict[Wire, None] = {}
        self._hurting = asyncio.Lock()
        self._nodes: dict[Process, SharedEngines] = {}
        """Of a shared store, by the processes that use it."""

    async def start(self) -> None:
        """Everything runs, and there is an exclusive topic."""
        await self.start_storage()
        await self.start_broker()
        await self.ready()
        settings = topic_pb2.TopicSettings(subscription=topic_pb2.SUBSCRIPTION_KIND_EXCLUSIVE)
        await self.wire(self._topics).CreateTopic(
            topic_pb2.CreateTopicRequest(name=TOPIC, settings=settings)
        )

    async def stop(self) -> None:
        await self.kill_broker()
        await self.kill_storage()

    async def ready(self) -> None:
        async with self._hurting:
            for link in self._components.links.values():
                await link.connected.wait()

    async def hurt(self, chance: random.Random, disturbed: Disturb) -> None:
        """One fault at a time; two processes may die together."""
        async with self._hurting:
            what = chance.choice(FAULTS if self.store is None else SHARED_FAULTS)
            disturbed(f"{what} fails")
            if what == "link":
                self._link.interrupt()
            elif what == "takeover":
                await self._take_over(chance)
            elif what == "answer" and self.store is not None:
                self.store.next_answer = chance.choice(list(LostAnswer))
            elif what == "commit":
                await self._fail_a_commit(chance, self._disk)
            else:
                await self._restart(chance, what)
            disturbed(f"{what} is mended")

    async def _restart(self, chance: random.Random, what: str) -> None:
        if what != "storage":
            await self.kill_broker()
        if what != "broker":
            await self.kill_storage()
        await self.clock.sleep_ms(chance.randint(0, DOWN_MS_MAX))
        if what != "broker":
            await self.start_storage()
        if what != "storage":
            await self.start_broker()

    async def _trip(self) -> None:
        await self.clock.sleep_ms(self.chance.randint(0, TRIP_MS_MAX))

    async def _take_over(self, chance: random.Random) -> None:
        """A second storage node and broker start, while clients still use the first ones."""
        storage, broker, link = self._storage, self._broker, self._link
        if chance.random() < 0.5:
            self._nodes[storage].running.clear()
        self._storage = Process()
        await self._storage.start(self._serve_storage())
        wires, self._client_wires = self._client_wires, {}
        await self.start_broker()
        await self.clock.sleep_ms(chance.randint(0, DOWN_MS_MAX))
        self._nodes[storage].running.set()
        await self.clock.sleep_ms(chance.randint(0, BOTH_SERVE_MS_MAX))
        link.cut()
        for wire in wires:
            wire.cut()
        await broker.kill()
        await storage.kill()

    async def _fail_a_commit(self, chance: random.Random, disk: FaultyEngines) -> None:
        """The next one; its outcome is unknown to the caller."""
        disk.next_commit = chance.choice(list(Fault))
        for _ in range(COMMIT_WITHIN_MS):
            if _has_failed(disk):
                return
            await self.clock.sleep_ms(1)
        disk.next_commit = None

    # --- storage -------------------------------------------------------------------------------

    async def start_storage(self) -> None:
        self._storage = Process()
        await self._storage.start(self._serve_storage())
        self._link.reach(self._storage_service, self._storage)

    async def _serve_storage(self) -> None:
        engines: Engines = self._engines
        if self.store is not None:
            engines = self._nodes[self._storage] = SharedEngines(self.store)
        self._disk = FaultyEngines(engines)
        identities = [Identity(CLUSTER_ID, number, PARTITIONS) for number in range(PARTITIONS)]
        self._storage_service = await open_storage(self._disk, identities, self.clock)

    async def kill_storage(self) -> None:
        self._link.interrupt()
        await self._storage.kill()
        await self._engines.close()

    # --- the broker ----------------------------------------------------------------------------

    async def start_broker(self) -> None:
        self._broker = Process()
        self._link = Wire(self._storage_service, self._storage, self.clock, self.chance)
        settings = BrokerSettings(
            partitions=PARTITIONS, cluster_id=CLUSTER_ID, client_timeout_ms=CLIENT_TIMEOUT_MS
        )
        link: Any = self._link
        node = StorageNode("storage", link)
        self._components, timers = build_components(settings, [node], self.clock)
        self._components.assignments.follow(static_registry(settings, settings.listen).view)
        clients = UnaryClients(
            self._components.directory, self._components.settlements, self._components.subscriptions
        )
        first_session_id = self.chance.getrandbits(40)
        self._service = BrokerService(self._components, clients, first_session_id)
        self._topics = TopicService(self._components)
        running = [node.link.run()]
        running += [link.run() for link in self._components.links.values()]
        running += [timer.run() for timer in timers]
        for each in (*running, self._components.cleanup.run(), self._expire(self._service)):
            self._broker.spawn(each)

    async def _expire(self, service: BrokerService) -> None:
        while True:
            await self.clock.sleep_ms(EXPIRE_EVERY_MS)
            service.expire(self.clock.monotonic_ms())

    async def kill_broker(self) -> None:
        self._link.cut()
        for wire in list(self._client_wires):
            wire.cut()
        self._client_wires.clear()
        await self._broker.kill()

    def remembered(self) -> dict[str, int]:
        """What the broker still keeps of clients (E6, I9); nothing once all have gone."""
        components = self._components
        kept = {
            "exclusive queues": components.subscriptions.exclusive_queues,
            "subscriptions": len(components.subscriptions),
            "eviction markers": components.subscriptions.eviction_markers,
            "feeds": len(components.dispatcher),
            "deliveries": len(components.directory),
        }
        return {what: count for what, count in kept.items() if count}

    # --- clients -------------------------------------------------------------------------------

    def place(self, queue: str) -> str:
        """There is one broker."""
        return ""

    def stub(self, place: str) -> Wire:
        return self.wire(self._service)

    def wire(self, servicer: Any) -> Wire:
        """A connection to the broker as it is now."""
        wire = Wire(servicer, self._broker, self.clock, self.chance)
        self._client_wires[wire] = None
        return wire

    async def connect(self, client_id: str, place: str) -> Session:
        """What `tidemark.client.connect` does, over a wire."""
        wire = self.stub(place)
        call: Any = wire.Session()
        hello = broker_pb2.Hello(client_id=client_id)
        await call.write(broker_pb2.SessionRequest(hello=hello))
        frames = aiter(call)
        first = await anext(frames, None)
        if first is None:
            raise Unavailable("the broker ended the session without a welcome")
        return Session(_Channel(wire), call, frames, first)  # type: ignore[arg-type]


def _has_failed(disk: FaultyEngines) -> bool:
    return disk.next_commit is None


class _Channel:
    """What a session closes in the end."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def close(self) -> None:
        self._wire.cut()
