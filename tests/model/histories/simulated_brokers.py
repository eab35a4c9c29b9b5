"""Three brokers as simulated processes over one storage, and a registry that they cannot trust.

Its views reach each broker at another time, and a registry that was flushed gives one version
twice, with different holders. Clients ask the holder as a rule, and sometimes any broker.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from broker_svc.api.broker_service import BrokerService
from broker_svc.api.topic_service import TopicService
from broker_svc.api.unary_clients import UnaryClients
from broker_svc.app import build_components
from broker_svc.components import BrokerComponents
from broker_svc.links.link_state import LinkState
from broker_svc.links.partition_link import PartitionLink
from broker_svc.links.storage_nodes import StorageNode
from tests.model.histories.claims import Claim
from tests.model.histories.simulated_cluster import (
    CLIENT_TIMEOUT_MS,
    CLUSTER_ID,
    DOWN_MS_MAX,
    PARTITIONS,
    SimulatedCluster,
)
from tests.model.histories.simulated_time import Process, SimulatedClock
from tests.model.histories.wires import Wire
from tidemark.api.storage.v1 import storage_pb2
from tidemark.errors import Fenced
from tidemark.registry.protocol import Assignment, Member, View
from tidemark.settings import BrokerSettings

BROKERS: Final = 3
FAULTS: Final = ("move", "move", "move", "flush", "broker", "storage", "link", "commit")
VIEW_DELAY_MS_MAX: Final = 300
_KNOWS_HOLDER: Final = 0.85
"""How often a client asks the broker that holds the partition, and not any."""
_IDS: Final = [f"broker-{number}" for number in range(BROKERS)]
_MEMBERS: Final = {each: Member(each, f"{each}:1", incarnation=0) for each in _IDS}


def _without_grpc(address: str) -> None:
    """Stands for a probe: no simulated broker can be called at an address."""


class BrokerWire(Wire):
    """From a broker to storage; records the answers to its claims."""

    claims: list[Claim]

    async def ClaimPartition(
        self, request: storage_pb2.ClaimPartitionRequest
    ) -> storage_pb2.ClaimPartitionResponse:
        broker = (request.broker_id, request.incarnation)
        try:
            answer: storage_pb2.ClaimPartitionResponse = await self._open(
                self._servicer.ClaimPartition, "ClaimPartition", request
            )
        except Fenced:
            self.claims.append(Claim(*broker, request.assignment_version, None))
            raise
        self.claims.append(Claim(*broker, request.assignment_version, answer.broker_epoch))
        return answer


class SimulatedBroker:
    """One broker process."""

    def __init__(self, broker_id: str) -> None:
        self.broker_id = broker_id
        self.process = Process()
        self.client_wires: dict[Wire, None] = {}
        self.link: BrokerWire
        self.components: BrokerComponents
        self.service: BrokerService
        self.topics: TopicService

    @property
    def holds(self) -> PartitionLink:
        return self.components.links[0]


class SimulatedBrokers(SimulatedCluster):
    """The cluster with several brokers; `hurt` also moves the partition between them."""

    def __init__(self, data_dir: Path, clock: SimulatedClock, chance: random.Random) -> None:
        super().__init__(data_dir, clock, chance)
        self.claims: list[Claim] = []
        """The answers to claims, in the order in which brokers got them."""
        self._brokers = [SimulatedBroker(each) for each in _IDS]
        self._assigned = Assignment(1, dict.fromkeys(range(PARTITIONS), _IDS[0]))
        self._disturbed: Callable[[str], None] = lambda _what: None

    # --- brokers -------------------------------------------------------------------------------

    async def start_broker(self) -> None:
        """All of them; the first one is to hold the partition."""
        for each in self._brokers:
            self._start(each)
        self._components, self._topics = self._brokers[0].components, self._brokers[0].topics
        self._broker = self._brokers[0].process

    def _start(self, broker: SimulatedBroker) -> None:
        broker.process = Process()
        broker.link = BrokerWire(self._storage_service, self._storage, self.clock, self.chance)
        broker.link.claims = self.claims
        settings = BrokerSettings(
            broker_id=broker.broker_id,
            listen=_MEMBERS[broker.broker_id].address,
            partitions=PARTITIONS,
            cluster_id=CLUSTER_ID,
            client_timeout_ms=CLIENT_TIMEOUT_MS,
        )
        link: Any = broker.link
        node = StorageNode("storage", link)
        components, timers = build_components(settings, [node], self.clock)
        probe = "probe"
        setattr(components.holders, probe, _without_grpc)
        for each in components.links.values():
            each.address = settings.listen
        clients = UnaryClients(
            components.directory, components.settlements, components.subscriptions
        )
        broker.components, broker.topics = components, TopicService(components)
        broker.service = BrokerService(components, clients, self.chance.getrandbits(40))
        running = [node.link.run(), *(each.run() for each in components.links.values())]
        running += [timer.run() for timer in timers]
        for work in (*running, components.cleanup.run(), self._expire(broker.service)):
            broker.process.spawn(work)
        broker.process.spawn(self._notify(broker))
        components.assignments.follow(View(_MEMBERS, self._assigned))

    async def _notify(self, broker: SimulatedBroker) -> None:
        """As a running broker does: its clients learn where the partition is."""
        holder = ""
        while True:
            broker.components.links_changed.clear()
            before, holder = holder, broker.holds.holder_address
            if holder not in ("", before):
                broker.service.partition_moved(broker.holds)
            self._disturbed(f"{broker.broker_id} is {broker.holds.state.value}")
            await broker.components.links_changed.wait()

    async def _kill(self, broker: SimulatedBroker) -> None:
        broker.link.cut()
        for wire in list(broker.client_wires):
            wire.cut()
        broker.client_wires.clear()
        await broker.process.kill()

    async def kill_broker(self) -> None:
        for each in self._brokers:
            await self._kill(each)

    async def start_storage(self) -> None:
        await super().start_storage()
        for each in self._brokers:
            if hasattr(each, "link"):
                each.link.reach(self._storage_service, self._storage)

    async def kill_storage(self) -> None:
        for each in self._brokers:
            each.link.interrupt()
        await super().kill_storage()

    async def ready(self) -> None:
        async with self._hurting:
            await self._settled()

    def remembered(self) -> dict[str, int]:
        kept: dict[str, int] = {}
        for each in self._brokers:
            self._components = each.components
            found = super().remembered()
            kept.update({f"{each.broker_id}: {what}": count for what, count in found.items()})
        return kept

    # --- faults --------------------------------------------------------------------------------

    async def hurt(self, chance: random.Random, disturbed: Callable[[str], None]) -> None:
        """One fault at a time."""
        async with self._hurting:
            what = chance.choice(FAULTS)
            self._disturbed = disturbed
            disturbed(f"{what} fails")
            if what == "move":
                await self._assign(chance, chance.choice(_IDS))
            elif what == "flush":
                await self._flush(chance)
            elif what == "broker":
                await self._restart_one(chance)
            elif what == "storage":
                await self.kill_storage()
                await self.clock.sleep_ms(chance.randint(0, DOWN_MS_MAX))
                await self.start_storage()
            elif what == "link":
                chance.choice(self._brokers).link.interrupt()
            else:
                await self._fail_a_commit(chance)
            await self._settled()
            disturbed(f"{what} is mended")

    async def _assign(self, chance: random.Random, holder: str) -> None:
        """Every broker learns it at another time: until then, it goes by what it knew before."""
        version = self._assigned.version + 1
        self._assigned = Assignment(version, dict.fromkeys(range(PARTITIONS), holder))
        await self._show(chance, self._assigned, self._brokers)

    async def _flush(self, chance: random.Random) -> None:
        """Two assignments get one version. The registry moves on once it learns that."""
        version = self._assigned.version + 1
        one, other = chance.sample(_IDS, 2)
        split = chance.randint(1, BROKERS - 1)
        brokers = chance.sample(self._brokers, BROKERS)
        for holder, who in ((one, brokers[:split]), (other, brokers[split:])):
            forked = Assignment(version, dict.fromkeys(range(PARTITIONS), holder))
            await self._show(chance, forked, who)
        self._assigned = Assignment(version, dict.fromkeys(range(PARTITIONS), one))
        await self.clock.sleep_ms(chance.randint(0, VIEW_DELAY_MS_MAX))
        await self._assign(chance, chance.choice(_IDS))

    async def _show(
        self, chance: random.Random, assignment: Assignment, brokers: Sequence[SimulatedBroker]
    ) -> None:
        async def later(broker: SimulatedBroker, delay_ms: int) -> None:
            await self.clock.sleep_ms(delay_ms)
            broker.components.assignments.follow(View(_MEMBERS, assignment))

        delays = [chance.randint(0, VIEW_DELAY_MS_MAX) for _ in brokers]
        await asyncio.gather(*map(later, brokers, delays))

    async def _restart_one(self, chance: random.Random) -> None:
        """A broker dies, and another one may get its partition before it is back."""
        dead = chance.choice(self._brokers)
        await self._kill(dead)
        if chance.random() < 0.5:
            version = self._assigned.version + 1
            holder = chance.choice([each for each in _IDS if each != dead.broker_id])
            self._assigned = Assignment(version, dict.fromkeys(range(PARTITIONS), holder))
            alive = [each for each in self._brokers if each is not dead]
            await self._show(chance, self._assigned, alive)
        await self.clock.sleep_ms(chance.randint(0, DOWN_MS_MAX))
        self._start(dead)

    async def _settled(self) -> None:
        """Until the broker that is assigned holds the partition, and no other does."""
        while not all(map(self._is_settled, self._brokers)):
            await self.clock.sleep_ms(1)

    def _is_settled(self, broker: SimulatedBroker) -> bool:
        if broker.broker_id == self._assigned.holders[0]:
            return broker.holds.connected.is_set()
        return broker.holds.state is LinkState.AWAY

    # --- clients -------------------------------------------------------------------------------

    def stub(self) -> Wire:
        return self._wire_to(self._asked())

    def wire(self, servicer: Any) -> Wire:
        """Of the first broker."""
        return Wire(servicer, self._brokers[0].process, self.clock, self.chance)

    def _wire_to(self, broker: SimulatedBroker) -> Wire:
        wire = Wire(broker.service, broker.process, self.clock, self.chance)
        broker.client_wires[wire] = None
        return wire

    def _asked(self) -> SimulatedBroker:
        holding = [each for each in self._brokers if each.holds.connected.is_set()]
        if holding and self.chance.random() < _KNOWS_HOLDER:
            return holding[-1]
        return self.chance.choice(self._brokers)
