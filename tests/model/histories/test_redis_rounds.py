"""Rounds of faults on the engine redis: real processes over three masters and three replicas.

Only with `--redis-rounds N` (`make test-redis-rounds`). Time is real, so a seed decides what is
tried and not what happens. `--seed N` begins with another one.
"""

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from tests.model.histories.checker import check
from tests.model.histories.history import Delivered, Outcome, Published, Settled
from tests.model.histories.redis_processes import RedisProcesses, redis_processes
from tests.model.histories.scenario import TOPIC, Pace, record
from tests.support.local_broker import run_of, until
from tidemark.api.broker.v1 import broker_pb2, topic_pb2
from tidemark.api.broker.v1.topic_pb2_grpc import TopicServiceStub
from tidemark.api.storage.v1.storage_pb2 import DescribeStorageRequest
from tidemark.api.storage.v1.storage_pb2_grpc import StorageServiceStub
from tidemark.errors import TidemarkError
from tidemark.rpc import from_status, open_channel

SEED: Final = 20_261_118
PARTITIONS: Final = 2
STORAGES: Final = 2
PACE: Final = Pace(
    steps=350,
    gap_ms_max=60,
    visibility_ms=10_000,
    bound_ms=60_000,
    calm_ms=1_500,
    drain_ms=120_000,
    calm_takeovers=0.0,
)


@pytest.fixture
def seeds(pytestconfig: pytest.Config) -> range:
    rounds = pytestconfig.getoption("--redis-rounds")
    if not rounds:
        pytest.skip("takes minutes: make test-redis-rounds")
    first = pytestconfig.getoption("--seed") or SEED
    return range(first, first + rounds)


@pytest.mark.timeout(0)
async def test_replicated_commits_survive_every_fault(seeds: range, tmp_path: Path) -> None:
    """S2, S9, E1, E8, E9: every answered publish is delivered, and stays acknowledged."""
    faults: Counter[str] = Counter()
    published = 0
    async with redis_processes(tmp_path, "replicated", PARTITIONS, STORAGES) as cluster:
        for number, seed in enumerate(seeds, 1):
            cluster.new_round()
            queues = tuple(f"{TOPIC}/{seed}-{name}" for name in "abcd")
            history = await record(cluster, random.Random(seed), PACE, queues)

            violations = check(history.events, PACE.bound_ms)
            kinds = Counter(type(each) for each in history.events)
            outcomes = Counter(e.outcome for e in history.events if isinstance(e, Settled))
            faults.update(cluster.faults)
            print(
                f"replicated, round {number}, seed {seed}: {kinds[Published]} published, "
                f"{kinds[Delivered]} delivered, {outcomes[Outcome.ACCEPTED]} settled; "
                f"{', '.join(cluster.faults) or 'no fault'}; {len(violations)} violations",
                flush=True,
            )
            if violations:
                print(history, *violations, sep="\n")
            assert not violations
            published += kinds[Published]
    print(f"replicated: {published} published, {dict(faults)}", flush=True)
    assert published


class Losses:
    """Publishes to the one partition of a cluster, and forces the loss of what was answered."""

    def __init__(self, cluster: RedisProcesses, chance: random.Random, queue: str) -> None:
        self._cluster = cluster
        self._chance = chance
        self._queue = queue
        self._key = cluster.mark_key(0)

    async def publish(self) -> None:
        """One message; raises why it is not answered with success."""
        request = broker_pb2.PublishRequest(client_id="ada", runs=[run_of(self._queue, b"m")])
        (result,) = (await self._cluster.stub("").Publish(request)).results
        if result.HasField("error"):
            raise from_status(result.error)

    async def until_published(self) -> None:
        async def is_published() -> bool:
            try:
                await self.publish()
            except TidemarkError:
                return False
            return True

        await until(is_published)

    async def force(self, *, kill_nodes: bool, kill_master: bool) -> int:
        """Promote a replica that lacks commits which were answered; returns how many."""
        valkeys, processes = self._cluster.valkeys, self._cluster.processes
        storages = processes.services_of("storage")
        replica = await asyncio.to_thread(valkeys.replica_of, self._key)
        master = await asyncio.to_thread(valkeys.master_of, self._key)
        await asyncio.to_thread(valkeys.cut_off, replica)
        for _ in range(self._chance.randint(1, 5)):
            await self.publish()
        if kill_nodes:
            for name in storages:
                await processes.kill(name)
        answered = await asyncio.to_thread(valkeys.read_number, self._key, "sequence")
        if kill_master:
            await asyncio.to_thread(valkeys.kill, master)
        await asyncio.to_thread(valkeys.promote, replica)
        left = await asyncio.to_thread(valkeys.read_number, self._key, "sequence")
        if kill_nodes:
            for name in storages:
                await processes.restart(name)
        if kill_master:
            await asyncio.to_thread(valkeys.start, master)
        return answered - left

    async def faults(self) -> list[str]:
        """The faults of the partition, wherever it is open."""
        found: list[str] = []
        for name in self._cluster.processes.services_of("storage"):
            async with open_channel(self._cluster.processes.address(name)) as channel:
                storage = StorageServiceStub(channel)
                described = await storage.DescribeStorage(DescribeStorageRequest())
            found += [fault.reason for each in described.held for fault in each.faults]
        return found

    async def confirm(self) -> None:
        request = topic_pb2.ConfirmLossRequest(partition=0)

        async def is_confirmed() -> bool:
            try:
                await TopicServiceStub(self._cluster.channel).ConfirmLoss(request)
            except TidemarkError:
                return False
            return True

        await until(is_confirmed)

    async def until_reported(self) -> None:
        """Ask for what is lost until it is reported; nothing is answered until then."""

        async def is_reported() -> bool:
            with pytest.raises(TidemarkError):
                await self.publish()
            return "DATA_LOST" in await self.faults()

        await until(is_reported)


@pytest.mark.timeout(0)
async def test_every_forced_loss_of_local_commits_is_reported(seeds: range, tmp_path: Path) -> None:
    """S9: the partition serves nothing of what is left until an operator confirms it, also where
    all storage nodes are killed before the loss: then the broker is its witness."""
    reported = 0
    async with redis_processes(tmp_path, "local", 1, STORAGES) as cluster:
        for number, seed in enumerate(seeds, 1):
            chance = random.Random(seed)
            losses = Losses(cluster, chance, f"{TOPIC}/{seed}")
            await losses.until_published()

            kill_nodes, kill_master = chance.random() < 0.5, chance.random() < 0.5
            lost = await losses.force(kill_nodes=kill_nodes, kill_master=kill_master)
            assert lost > 0, "nothing was lost"
            await losses.until_reported()

            reported += 1
            killed = [
                *(["storage nodes"] if kill_nodes else []),
                *(["the master"] if kill_master else []),
            ]
            print(
                f"local, round {number}, seed {seed}: {lost} commits lost, "
                f"killed: {' and '.join(killed) or 'nothing'}; DATA_LOST reported",
                flush=True,
            )
            await asyncio.to_thread(cluster.valkeys.until_whole)
            await losses.confirm()
    print(f"local: {reported} of {len(seeds)} forced losses reported", flush=True)
