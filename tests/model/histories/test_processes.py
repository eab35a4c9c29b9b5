"""The same clients against real processes, with `kill -9` of broker and storage in the middle.

Time is real here, so a seed decides what is tried and not what happens. `--long` plays more rounds.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import grpc
import pytest

from tests.model.histories.checker import check
from tests.model.histories.history import Delivered, Outcome, Settled
from tests.model.histories.scenario import TOPIC, Pace, record
from tests.support.session import Session
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.broker.v1.broker_pb2_grpc import BrokerServiceStub
from tidemark.api.broker.v1.topic_pb2_grpc import TopicServiceStub
from tidemark.clock import SystemClock
from tidemark.local.cluster import LocalCluster, ServiceName
from tidemark.rpc import open_channel

SEED: Final = 20_261_116
ROUNDS, ROUNDS_LONG = 1, 10
KILLED: Final[tuple[ServiceName, ...]] = ("broker", "storage")
DOWN_MS_MAX: Final = 200
PACE: Final = Pace(
    steps=250,
    gap_ms_max=80,
    visibility_ms=2_000,
    bound_ms=20_000,
    calm_ms=5_000,
    drain_ms=120_000,
    calm_takeovers=0.0,
)


class RealCluster:
    """Three processes, two of which are killed now and then."""

    def __init__(self, processes: LocalCluster, channel: grpc.aio.Channel) -> None:
        self.clock = SystemClock()
        self.partitions = 1
        self.kills: Counter[str] = Counter()
        self._processes = processes
        self._stub = BrokerServiceStub(channel)
        self._hurting = asyncio.Lock()

    def place(self, queue: str) -> str:
        """Every place is as good."""
        return ""

    async def connect(self, client_id: str, place: str) -> Session:
        return await Session.open(self._processes.address("broker"), client_id)

    def stub(self, place: str) -> BrokerServiceStub:
        return self._stub

    async def hurt(self, chance: random.Random, disturbed: Callable[[str], None]) -> None:
        """At most once each: starting again takes seconds."""
        async with self._hurting:
            names = [each for each in KILLED if not self.kills[each]]
            if not names:
                return
            name = chance.choice(names)
            self.kills[name] += 1
            disturbed(f"{name} is killed")
            await self._processes.kill(name)
            await self.clock.sleep_ms(chance.randint(0, DOWN_MS_MAX))
            await self._processes.restart(name)
            disturbed(f"{name} runs again")

    async def ready(self) -> None:
        async with self._hurting:
            await self._processes.wait_healthy()


@asynccontextmanager
async def real_cluster(directory: Path) -> AsyncIterator[RealCluster]:
    async with AsyncExitStack() as opened:
        processes = LocalCluster(directory / "data", partitions=1, log_dir=directory / "logs")
        await opened.enter_async_context(processes)
        channel = await opened.enter_async_context(open_channel(processes.address("broker")))
        settings = topic_pb2.TopicSettings(subscription=topic_pb2.SUBSCRIPTION_KIND_EXCLUSIVE)
        await TopicServiceStub(channel).CreateTopic(
            topic_pb2.CreateTopicRequest(name=TOPIC, settings=settings)
        )
        yield RealCluster(processes, channel)


@pytest.mark.timeout(0)
async def test_real_processes_that_are_killed_break_no_rule(
    pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    """E1, E7, E8, E9, E10, S2."""
    for number in range(ROUNDS_LONG if pytestconfig.getoption("--long") else ROUNDS):
        seed = SEED + number
        async with real_cluster(tmp_path / str(seed)) as cluster:
            history = await record(cluster, random.Random(seed), PACE)

        violations = check(history.events, PACE.bound_ms)
        if violations:
            print(f"seed {seed}\n{history}", *violations, sep="\n")
        assert not violations
        assert cluster.kills, "time is real: which of them, and when, is chance"
        outcomes = Counter(each.outcome for each in history.events if isinstance(each, Settled))
        assert outcomes[Outcome.ACCEPTED]
        assert any(isinstance(each, Delivered) for each in history.events)
