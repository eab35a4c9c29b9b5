"""Three brokers over three storage nodes as simulated processes, and a registry without trust.

Its views reach each broker at another time, and a registry that was flushed gives one version
twice, with different holders. Every node holds one partition, and fails while the others serve.
Clients ask the holder as a rule, and sometimes any broker.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final

from broker_svc.api.broker_service import BrokerService
from broker_svc.api.topic_service import TopicService
from broker_svc.api.unary_clients import UnaryClients
from broker_svc.app import build_components
from broker_svc.components import BrokerComponents
from broker_svc.links.link_state import LinkState
from broker_svc.links.storage_nodes import StorageNode
from storage_svc.engines.engine import Identity
from tests.model.histories.claims import Claim
from tests.model.histories.scenario import TOPIC, Disturb
from tests.model.histories.simulated_cluster import (
    CLIENT_TIMEOUT_MS,
    CLUSTER_ID,
    DOWN_MS_MAX,
    SimulatedCluster,
)
from tests.model.histories.simulated_storage import SimulatedNode
from tests.model.histories.simulated_time import Process, SimulatedClock
from tests.model.histories.wires import Wire
from tidemark.api.storage.v1 import storage_pb2
from tidemark.errors import Fenced
from tidemark.names import partition_of
from tidemark.registry.protocol import Assignment, Member, View
from tidemark.settings import BrokerSettings

BROKERS: Final = 3
NODES: Final = 3
"""And as many partitions: each node holds the one of its number."""
NODE_FAULTS: Final = ("storage", "slow", "cut off", "link", "commit")
FAULTS: Final = ("move", "move", "move", "flush", "broker", *NODE_FAULTS)
VIEW_DELAY_MS_MAX: Final = 300
SLOW_MS_MAX: Final = 120
_KNOWS_HOLDER: Final = 0.85
"""How often a client asks the broker that holds the partition, and not any."""
_IDS: Final = [f"broker-{number}" for number in range(BROKERS)]
_MEMBERS: Final = {each: Member(each, f"{each}:1", incarnation=0) for each in _IDS}


def _queue_in(partition: int) -> str:
    names = (f"{TOPIC}/{number}" for number in count())
    return next(name for name in names if partition_of(name, NODES) == partition)


SPREAD_QUEUES: Final = tuple(map(_queue_in, range(NODES)))
"""One in every partition."""


def _without_grpc(address: str) -> None:
    """Stands for a probe: no simulated broker can be called at an address."""


class BrokerWire(Wire):
    """From a broker to a storage node; records the answers to its claims."""

    claims: list[Claim]

    async def ClaimPartition(
        self, request: storage_pb2.ClaimPartitionRequest
    ) -> storage_pb2.ClaimPartitionResponse:
        try:
            answer: storage_pb2.ClaimPartitionResponse = await self._open(
                self._servicer.ClaimPartition, "ClaimPartition", request
            )
        except Fenced:
            self._record(request, None)
            raise
        self._record(request, answer.broker_epoch)
        return answer

    def _record(self, request: storage_pb2.ClaimPartitionRequest, epoch: int | None) -> None:
        broker = (request.broker_id, request.incarnation)
        claim = Claim(*broker, request.assignment_version, epoch, request.partition)
        self.claims.append(claim)


class SimulatedBroker:
    """One broker process."""

    def __init__(self, broker_id: str) -> None:
        self.broker_id = broker_id
        self.process = Process()
        self.client_wires: dict[Wire, None] = {}
        self.wires: list[BrokerWire] = []
        """To the storage nodes."""
        self.components: BrokerComponents
        self.service: BrokerService
        self.topics: TopicService

    def holds(self, partition: int) -> bool:
        return self.components.links[partition].connected.is_set()


class SimulatedBrokers(SimulatedCluster):
    """The cluster with several brokers and nodes; `hurt` also moves partitions between brokers."""

    def __init__(self, data_dir: Path, clock: SimulatedClock, chance: random.Random) -> None:
        super().__init__(data_dir, clock, chance)
        self.partitions = NODES
        self.claims: list[Claim] = []
        """The answers to claims, in the order in which brokers got them."""
        self._nodes_by_number = [
            SimulatedNode(data_dir / str(number), Identity(CLUSTER_ID, number, NODES), clock)
            for number in range(NODES)
        ]
        self._brokers = {each: SimulatedBroker(each) for each in _IDS}
        self._assigned = Assignment(1, dict.fromkeys(range(NODES), _IDS[0]))

    async def start(self) -> None:
        """The first broker holds everything, and makes the topic; then the partitions spread."""
        await super().start()
        holders = {number: self.chance.choice(_IDS) for number in range(NODES)}
        await self._assign(self.chance, holders)
        await self.ready()

    # --- brokers -------------------------------------------------------------------------------

    async def start_broker(self) -> None:
        """All of them."""
        for each in self._brokers.values():
            self._start(each)
        first = self._brokers[_IDS[0]]
        self._components, self._topics, self._broker = first.components, first.topics, first.process

    def _start(self, broker: SimulatedBroker) -> None:
        broker.process = Process()
        broker.wires = [
            BrokerWire(each.service, each.process, self.clock, self.chance)
            for each in self._nodes_by_number
        ]
        settings = BrokerSettings(
            broker_id=broker.broker_id,
            listen=_MEMBERS[broker.broker_id].address,
            partitions=NODES,
            cluster_id=CLUSTER_ID,
            client_timeout_ms=CLIENT_TIMEOUT_MS,
        )
        nodes: list[StorageNode] = []
        for number, wire in enumerate(broker.wires):
            wire.claims = self.claims
            stub: Any = wire
            nodes.append(StorageNode(f"storage-{number}", stub))
        components, timers = build_components(settings, nodes, self.clock)
        probe = "probe"
        setattr(components.holders, probe, _without_grpc)
        for link in components.links.values():
            link.address = settings.listen
        clients = UnaryClients(
            components.directory, components.settlements, components.subscriptions
        )
        broker.components, broker.topics = components, TopicService(components)
        broker.service = BrokerService(components, clients, self.chance.getrandbits(40))
        running = [each.link.run() for each in nodes]
        running += [each.run() for each in components.links.values()]
        running += [timer.run() for timer in timers]
        for work in (*running, components.cleanup.run(), self._expire(broker.service)):
            broker.process.spawn(work)
        broker.process.spawn(self._notify(broker))
        components.assignments.follow(View(_MEMBERS, self._assigned))

    async def _notify(self, broker: SimulatedBroker) -> None:
        """As a running broker does: its clients learn where the partitions are."""
        links = broker.components.links
        holders = dict.fromkeys(links, "")
        states: dict[int, tuple[LinkState, bool]] = {}
        while True:
            broker.components.links_changed.clear()
            for number, link in links.items():
                before, holders[number] = holders[number], link.holder_address
                if link.holder_address not in ("", before):
                    broker.service.partition_moved(link)
                state = (link.state, link.connected.is_set())
                if states.get(number) != state and self._disturbed is not None:
                    what = f"{broker.broker_id} is {link.state.value}"
                    self._disturbed(what, [SPREAD_QUEUES[number]])
                states[number] = state
            await broker.components.links_changed.wait()

    async def _kill(self, broker: SimulatedBroker) -> None:
        for wire in (*broker.wires, *broker.client_wires):
            wire.cut()
        broker.client_wires.clear()
        await broker.process.kill()

    async def kill_broker(self) -> None:
        for each in self._brokers.values():
            await self._kill(each)

    async def ready(self) -> None:
        async with self._hurting:
            await self._settled()

    def remembered(self) -> dict[str, int]:
        kept: dict[str, int] = {}
        for each in self._brokers.values():
            self._components = each.components
            found = super().remembered()
            kept.update({f"{each.broker_id}: {what}": number for what, number in found.items()})
        return kept

    # --- storage nodes -------------------------------------------------------------------------

    async def start_storage(self) -> None:
        for each in self._nodes_by_number:
            await each.start()

    async def kill_storage(self) -> None:
        for each in self._nodes_by_number:
            await each.kill()

    async def _restart_node(self, chance: random.Random, node: SimulatedNode) -> None:
        wires = self._wires_to(node)
        for wire in wires:
            wire.interrupt()
        await node.kill()
        await self.clock.sleep_ms(chance.randint(0, DOWN_MS_MAX))
        await node.start()
        for wire in wires:
            wire.reach(node.service, node.process)

    def _wires_to(self, node: SimulatedNode) -> list[BrokerWire]:
        return [each.wires[node.partition] for each in self._brokers.values()]

    # --- faults --------------------------------------------------------------------------------

    async def hurt(self, chance: random.Random, disturbed: Disturb) -> None:
        """One fault at a time; that of a node, and a move, concern the queues of one partition."""
        async with self._hurting:
            what = chance.choice(FAULTS)
            number = chance.randrange(NODES)
            queues = ("",) if what in ("flush", "broker") else (SPREAD_QUEUES[number],)
            self._disturbed = disturbed
            disturbed(f"{what} fails", queues)
            if what == "move":
                await self._assign(chance, {number: chance.choice(_IDS)})
            elif what == "flush":
                await self._flush(chance)
            elif what == "broker":
                await self._restart_one(chance)
            else:
                await self._hurt_node(chance, what, self._nodes_by_number[number])
            await self._settled()
            disturbed(f"{what} is mended", queues)

    async def _hurt_node(self, chance: random.Random, what: str, node: SimulatedNode) -> None:
        if what == "storage":
            await self._restart_node(chance, node)
        elif what == "slow":
            for wire in self._wires_to(node):
                wire.slow_ms = SLOW_MS_MAX
            # Not longer: its start and its end excuse what is late, and they must be near.
            await self.clock.sleep_ms(chance.randint(0, DOWN_MS_MAX))
            for wire in self._wires_to(node):
                wire.slow_ms = 0
        elif what == "cut off":
            await self._cut_off(chance, node)
        elif what == "link":
            chance.choice(self._wires_to(node)).interrupt()
        else:
            await self._fail_a_commit(chance, node.disk)

    async def _cut_off(self, chance: random.Random, node: SimulatedNode) -> None:
        """From the broker that is to hold its partition; another one may get that meanwhile."""
        holder = self._assigned.holders[node.partition]
        wire = self._brokers[holder].wires[node.partition]
        wire.cut()
        if chance.random() < 0.5:
            await self._assign(chance, {node.partition: _other_than(holder, chance)})
        await self.clock.sleep_ms(chance.randint(0, DOWN_MS_MAX))
        wire.mend()

    async def _assign(self, chance: random.Random, moves: Mapping[int, str]) -> None:
        """Every broker learns it at another time: until then, it goes by what it knew before."""
        self._assigned = self._moved(moves)
        await self._show(chance, self._assigned, list(self._brokers.values()))

    def _moved(self, moves: Mapping[int, str]) -> Assignment:
        return Assignment(self._assigned.version + 1, {**self._assigned.holders, **moves})

    async def _flush(self, chance: random.Random) -> None:
        """Two assignments get one version. The registry moves on once it learns that."""
        numbers = chance.sample(range(NODES), chance.randint(1, NODES))
        one = self._moved({number: chance.choice(_IDS) for number in numbers})
        other = self._moved({each: _other_than(one.holders[each], chance) for each in numbers})
        split = chance.randint(1, BROKERS - 1)
        brokers = chance.sample(list(self._brokers.values()), BROKERS)
        await self._show(chance, one, brokers[:split])
        await self._show(chance, other, brokers[split:])
        self._assigned = one
        await self.clock.sleep_ms(chance.randint(0, VIEW_DELAY_MS_MAX))
        await self._assign(chance, {number: chance.choice(_IDS) for number in numbers})

    async def _show(
        self, chance: random.Random, assignment: Assignment, brokers: Sequence[SimulatedBroker]
    ) -> None:
        async def later(broker: SimulatedBroker, delay_ms: int) -> None:
            await self.clock.sleep_ms(delay_ms)
            broker.components.assignments.follow(View(_MEMBERS, assignment))

        delays = [chance.randint(0, VIEW_DELAY_MS_MAX) for _ in brokers]
        await asyncio.gather(*map(later, brokers, delays))

    async def _restart_one(self, chance: random.Random) -> None:
        """A broker dies, and others may get its partitions before it is back."""
        dead = self._brokers[chance.choice(_IDS)]
        await self._kill(dead)
        if chance.random() < 0.5:
            left = [n for n, holder in self._assigned.holders.items() if holder == dead.broker_id]
            self._assigned = self._moved({n: _other_than(dead.broker_id, chance) for n in left})
            alive = [each for each in self._brokers.values() if each is not dead]
            await self._show(chance, self._assigned, alive)
        await self.clock.sleep_ms(chance.randint(0, DOWN_MS_MAX))
        self._start(dead)

    async def _settled(self) -> None:
        """Until the brokers that are assigned hold the partitions, and no others do."""
        while not all(map(self._is_settled, self._brokers.values())):
            await self.clock.sleep_ms(1)

    def _is_settled(self, broker: SimulatedBroker) -> bool:
        return all(
            broker.holds(number)
            if self._assigned.holders[number] == broker.broker_id
            else link.state is LinkState.AWAY
            for number, link in broker.components.links.items()
        )

    # --- clients -------------------------------------------------------------------------------

    def place(self, queue: str) -> str:
        number = partition_of(queue, NODES)
        holding = [each.broker_id for each in self._brokers.values() if each.holds(number)]
        if holding and self.chance.random() < _KNOWS_HOLDER:
            return holding[-1]
        return self.chance.choice(_IDS)

    def stub(self, place: str) -> Wire:
        broker = self._brokers[place]
        wire = Wire(broker.service, broker.process, self.clock, self.chance)
        broker.client_wires[wire] = None
        return wire

    def wire(self, servicer: Any) -> Wire:
        """Of the first broker."""
        return Wire(servicer, self._broker, self.clock, self.chance)


def _other_than(broker_id: str, chance: random.Random) -> str:
    return chance.choice([each for each in _IDS if each != broker_id])
