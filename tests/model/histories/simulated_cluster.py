"""A broker and its storage as simulated processes: all their code, a real RocksDB, no gRPC.

Either can be killed in the middle of anything and started again, the link between them interrupted,
and a commit told to fail before or after it was written. With a shared store instead of RocksDB, a
second storage node takes the partition over while the first still serves its broker and clients,
and the store loses the last commits: an operator confirms what is reported as lost.
"""

import asyncio
import random
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from broker_svc.api.broker_service import BrokerService
from broker_svc.api.topic_service import TopicService
from broker_svc.api.unary_clients import UnaryClients
from broker_svc.app import EXPIRE_EVERY_MS, build_components, static_registry
from broker_svc.components import BrokerComponents
from broker_svc.links.storage_nodes import StorageNode
from storage_svc.api.storage_service import StorageService
from storage_svc.engines.engine import Identity
from storage_svc.operations.partition_time import StampTime
from storage_svc.partition.health import FaultReason
from storage_svc.partition.partition import Partition
from tests.model.histories.checker import LOST_WITHIN_MS
from tests.model.histories.history import LOST
from tests.model.histories.scenario import TOPIC, Disturb
from tests.model.histories.simulated_storage import RememberedEngines, open_storage, watched
from tests.model.histories.simulated_time import Process, SimulatedClock
from tests.model.histories.stores import Answered
from tests.model.histories.wires import Wire
from tests.support.faulty_engine import Fault, FaultyEngines
from tests.support.session import Session
from tests.support.shared_engine import LostAnswer, SharedEngines, SharedStore
from tidemark.api.broker.v1 import broker_pb2, topic_pb2
from tidemark.api.storage.v1 import storage_pb2
from tidemark.errors import TidemarkError, Unavailable
from tidemark.settings import BrokerSettings

PARTITIONS: Final = 1
CLUSTER_ID: Final = "simulated"
CLIENT_TIMEOUT_MS: Final = 2_000
DOWN_MS_MAX: Final = 200
COMMIT_WITHIN_MS: Final = 200
TRIP_MS_MAX: Final = 2
BOTH_SERVE_MS_MAX: Final = 800
FAULTS: Final = ("broker", "storage", "both", "link", "commit")
SHARED_FAULTS: Final = ("takeover", "takeover", "move", "move", "tail", "tail", "answer", *FAULTS)
TAIL_COMMITS_MAX: Final = 6
OPERATOR_EVERY_MS: Final = 10
CONFIRM_WITHIN_MS: Final = 1_000


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
        self.answers: list[Answered] = []
        """Of nodes that share the store."""
        self._partition: Partition
        self._first_sequence = 0
        """Of the store, once there is a topic: that is not lost."""
        self._disturbed: Disturb | None = None
        self._operator: asyncio.Task[None] | None = None
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
        if self.store is not None:
            self._first_sequence = self.store.stored(0).mark.sequence
            self._operator = asyncio.create_task(self._operate())

    async def stop(self) -> None:
        if self._operator is not None:
            self._operator.cancel()
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
            self._disturbed = disturbed
            disturbed(f"{what} fails")
            if what == "link":
                self._link.interrupt()
            elif what == "takeover":
                await self._take_over(chance)
            elif what == "move":
                await self._move(chance)
            elif what == "tail":
                await self._lose_tail(chance)
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

    async def _move(self, chance: random.Random, lost: int = 0) -> None:
        """A second storage node opens the partition, and the broker goes there after a while; the
        first one may stand still meanwhile, and believes for longer that it holds it."""
        old = self._storage
        if chance.random() < 0.5:
            self._nodes[old].running.clear()
        if lost and self.store is not None:
            self.store.lose_tail(0, lost)
        self._storage = Process()
        await self._storage.start(self._serve_storage())
        with suppress(TidemarkError):
            for _ in range(chance.randint(0, TAIL_COMMITS_MAX)):  # as sweeps do without a broker
                await self._partition.call(StampTime())
        await self.clock.sleep_ms(chance.randint(0, DOWN_MS_MAX))
        self._link.reach(self._storage_service, self._storage)
        self._link.interrupt()
        self._nodes[old].running.set()
        await self.clock.sleep_ms(chance.randint(0, DOWN_MS_MAX))
        await old.kill()

    async def _lose_tail(self, chance: random.Random) -> None:
        """The broker, which has seen the commits, outlives them: else they have no witness."""
        assert self.store is not None
        await self._until_held()
        there = self.store.stored(0).mark.sequence - self._first_sequence
        lost = min(chance.randint(1, TAIL_COMMITS_MAX), there)
        how = chance.choice(("stays", "restarts", "moves"))
        if how == "moves":
            await self._move(chance, lost)
        elif how == "restarts":
            await self.kill_storage()
            self.store.lose_tail(0, lost)
            await self.clock.sleep_ms(chance.randint(0, DOWN_MS_MAX))
            await self.start_storage()
        else:
            self.store.lose_tail(0, lost)
            with suppress(TidemarkError):
                await self._partition.verify()
        await self._until_held()

    async def _until_held(self) -> None:
        """Until the broker has claimed the partition at the present node, and so is a witness."""
        while not self._partition.has_connected_broker or self._is_lost():
            await self.clock.sleep_ms(1)

    def _is_lost(self) -> bool:
        return self._partition.health.has(FaultReason.DATA_LOST)

    async def _operate(self) -> None:
        """Confirm what a partition reports as lost."""
        while True:
            await self.clock.sleep_ms(OPERATOR_EVERY_MS)
            if not self._is_lost() or self._disturbed is None:
                continue
            self._disturbed(LOST)
            await self.clock.sleep_ms(LOST_WITHIN_MS + self.chance.randint(1, DOWN_MS_MAX))
            wire = Wire(self._storage_service, self._storage, self.clock, self.chance)
            request = storage_pb2.ConfirmLossRequest(partition=0)
            with suppress(TidemarkError, TimeoutError):
                await self.clock.wait_for(wire.ConfirmLoss(request), CONFIRM_WITHIN_MS)
            self._disturbed("a loss is confirmed")

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
        identity = Identity(CLUSTER_ID, 0, PARTITIONS)
        if self.store is None:
            self._disk = FaultyEngines(self._engines)
            partition = Partition(self._disk, identity, self.clock)
        else:
            engines = self._nodes[self._storage] = SharedEngines(self.store)
            self._disk = FaultyEngines(engines)
            partition = watched(self._disk, identity, self.clock, self.store, self.answers)
        self._storage_service = await open_storage([partition], self.clock)
        self._partition = partition

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
            "exclusive queues": len(components.subscriptions.ownerships),
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
