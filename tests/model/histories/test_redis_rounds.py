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
from tidemark.api.broker.v1 import broker_pb2
from tidemark.api.storage.v1.storage_pb2 import DescribeStorageRequest
from tidemark.api.storage.v1.storage_pb2_grpc import StorageServiceStub
from tidemark.errors import TidemarkError
from tidemark.rpc import from_status, open_channel

SEED: Final = 20_261_118
PARTITIONS: Final = 2
PACE: Final = Pace(
    steps=500,
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
    async with redis_processes(tmp_path, "replicated", PARTITIONS) as cluster:
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

    async def force(self) -> int:
        """Promote a replica that lacks commits which were answered; returns how many."""
        valkeys = self._cluster.valkeys
        replica = await asyncio.to_thread(valkeys.replica_of, self._key)
        await asyncio.to_thread(valkeys.cut_off, replica)
        for _ in range(self._chance.randint(1, 5)):
            await self.publish()
        answered = await asyncio.to_thread(valkeys.read_number, self._key, "sequence")
        await asyncio.to_thread(valkeys.promote, replica)
        return answered - await asyncio.to_thread(valkeys.read_number, self._key, "sequence")

    async def faults(self) -> list[str]:
        address = self._cluster.processes.address("storage")
        async with open_channel(address) as channel:
            described = await StorageServiceStub(channel).DescribeStorage(DescribeStorageRequest())
        return [fault.reason for each in described.held for fault in each.faults]

    async def until_reported(self) -> None:
        """Ask for what is lost until it is reported; nothing is answered until then."""

        async def is_reported() -> bool:
            with pytest.raises(TidemarkError):
                await self.publish()
            return "DATA_LOST" in await self.faults()

        await until(is_reported)


@pytest.mark.timeout(0)
async def test_every_forced_loss_of_local_commits_is_reported(seeds: range, tmp_path: Path) -> None:
    """S9: the partition serves nothing of what is left until an operator decides."""
    async with redis_processes(tmp_path, "local", partitions=1) as cluster:
        for number, seed in enumerate(seeds, 1):
            losses = Losses(cluster, random.Random(seed), f"{TOPIC}/{seed}")
            await losses.until_published()

            lost = await losses.force()
            assert lost > 0, "nothing was lost"
            await losses.until_reported()

            print(f"local, round {number}, seed {seed}: {lost} commits lost, DATA_LOST", flush=True)
            await asyncio.to_thread(cluster.valkeys.until_whole)
            await cluster.processes.restart("storage")
