"""The same clients against three brokers and three storage nodes as processes; only with `--long`.

The brokers share a registry. One of them is killed, stopped gracefully or paused, or a storage node
is killed, one at a time.
"""

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.model.histories.checker import check
from tests.model.histories.history import Delivered, Outcome, Settled
from tests.model.histories.scenario import TOPIC, Pace, record
from tests.model.histories.simulated_brokers import NODES, SPREAD_QUEUES
from tests.support.session import Session
from tests.support.valkey import valkey
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.broker.v1.broker_pb2_grpc import BrokerServiceStub
from tidemark.api.broker.v1.topic_pb2_grpc import TopicServiceStub
from tidemark.clock import SystemClock
from tidemark.errors import Unavailable
from tidemark.local.cluster import LocalCluster
from tidemark.names import partition_of
from tidemark.rpc import open_channel

SEED: Final = 20_261_117
ROUNDS: Final = 20
FAULTS_MAX: Final = 4
"""A fault takes seconds until it is mended."""
PAUSES_MS: Final = (1_000, 5_000)
HOPS_MAX: Final = 5
BROKERS: Final = 3
PACE: Final = Pace(
    steps=250,
    gap_ms_max=160,
    visibility_ms=2_000,
    bound_ms=30_000,
    calm_ms=5_000,
    drain_ms=120_000,
    calm_takeovers=0.0,
)


class RealBrokers:
    """Three brokers and three storage nodes, one of which fails now and then."""

    def __init__(
        self, processes: LocalCluster, stubs: list[BrokerServiceStub], chance: random.Random
    ) -> None:
        self.clock = SystemClock()
        self.partitions = NODES
        self.faults: Counter[str] = Counter()
        self._processes = processes
        self._stubs = stubs
        self._chance = chance
        self._hurting = asyncio.Lock()

    def place(self, queue: str) -> str:
        """The partition of the queue: its broker is where it is asked for."""
        return str(partition_of(queue, NODES))

    async def connect(self, client_id: str, place: str) -> Session:
        """With the broker that holds the partition, wherever it is asked for first."""
        address = self._processes.address(self._chance.choice(self._brokers))
        for _ in range(HOPS_MAX):
            session = await self.clock.wait_for(Session.open(address, client_id), 5_000)
            await self.clock.sleep_ms(20)  # the notices come with the welcome
            moved = [each for each in session.go_aways if each.partition == int(place)]
            if not moved:
                return session
            await session.abort()
            address = moved[-1].address or address
        raise Unavailable("the partition is moving")

    def stub(self, place: str) -> BrokerServiceStub:
        return self._chance.choice(self._stubs)

    @property
    def _brokers(self) -> list[str]:
        return self._processes.services_of("broker")

    async def hurt(self, chance: random.Random, disturbed: Callable[[str], None]) -> None:
        async with self._hurting:
            if self.faults.total() >= FAULTS_MAX:
                return
            what = chance.choice(["kill", "kill", "stop", "pause", "storage"])
            self.faults[what] += 1
            kind = "storage" if what == "storage" else "broker"
            name = chance.choice(self._processes.services_of(kind))
            disturbed(f"{name}: {what}")
            if what == "pause":
                pid = self._processes.pid(name)
                os.kill(pid, signal.SIGSTOP)
                await self.clock.sleep_ms(chance.randint(*PAUSES_MS))
                os.kill(pid, signal.SIGCONT)
                await self._processes.wait_healthy([name])
            else:
                if what != "stop":
                    await self._processes.kill(name)
                await self._processes.restart(name)
            disturbed(f"{name} runs again")

    async def ready(self) -> None:
        async with self._hurting:
            await self._processes.wait_healthy()


@asynccontextmanager
async def real_brokers(directory: Path, chance: random.Random) -> AsyncIterator[RealBrokers]:
    async with AsyncExitStack() as opened:
        registry = opened.enter_context(valkey(directory / "valkey"))
        processes = LocalCluster(
            directory / "data",
            partitions=NODES,
            brokers=BROKERS,
            storages=NODES,
            registry_url=registry.connection_url,
            log_dir=directory / "logs",
        )
        await opened.enter_async_context(processes)
        channels = [
            await opened.enter_async_context(open_channel(processes.address(name)))
            for name in processes.services_of("broker")
        ]
        settings = topic_pb2.TopicSettings(subscription=topic_pb2.SUBSCRIPTION_KIND_EXCLUSIVE)
        await TopicServiceStub(channels[0]).CreateTopic(
            topic_pb2.CreateTopicRequest(name=TOPIC, settings=settings)
        )
        yield RealBrokers(processes, [BrokerServiceStub(each) for each in channels], chance)


@pytest.mark.timeout(0)
async def test_brokers_that_fail_and_hand_over_break_no_rule(
    pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    """E1, E7, E8, E9, E10, C5, S8: 20 rounds, or as many as `--histories` asks for."""
    if not pytestconfig.getoption("--long"):
        pytest.skip("takes minutes: make test-histories")
    for number in range(pytestconfig.getoption("--histories") or ROUNDS):
        seed = SEED + number
        chance = random.Random(seed)
        async with real_brokers(tmp_path / str(seed), chance) as cluster:
            history = await record(cluster, chance, PACE, SPREAD_QUEUES)

        violations = check(history.events, PACE.bound_ms)
        outcomes = Counter(each.outcome for each in history.events if isinstance(each, Settled))
        delivered = sum(isinstance(each, Delivered) for each in history.events)
        print(f"seed {seed}: {delivered} delivered, {dict(cluster.faults)}", dict(outcomes))
        if violations:
            print(history, *violations, sep="\n")
        assert not violations
        assert outcomes[Outcome.ACCEPTED]
        assert delivered
