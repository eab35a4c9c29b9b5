"""The cost of loading one idle queue among a thousand and among a million.

Each queue holds a message, and a group that has settled an earlier one. Both partitions are filled,
closed and reopened, so that they are read from disk tables, as after a restart. Queues are chosen
at random, so that caches behave as in production.
"""

import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from bench.harness.benchmark import Bench
from bench.harness.bodies import random_body
from bench.harness.figures import percentile
from bench.harness.partition import TOPIC, ask, open_partition
from storage_svc.operations.loading import Materialize, Materialized, UnloadOutcome, Unmaterialize
from storage_svc.operations.publish import Append
from storage_svc.operations.reserve import Reserve
from storage_svc.operations.settle import Settle
from storage_svc.partition.partition import Partition
from storage_svc.queue.reservation import Ending

FEW: Final = 1000
COST_RATIO_MAX: Final = 1.3
"""The cost of one queue of many, relative to one of a few."""

_GROUP = "group"
_FRAME_QUEUES = 1000


async def measure_idle(bench: Bench) -> None:
    many, loads = bench.many_queues, bench.size(full=2000, quick=200)
    bench.settings |= {"queues": many, "loads_per_round": loads}
    body = random_body(bench.random, 2)
    async with AsyncExitStack() as opened:
        idle = {}
        for queues in (FEW, many):
            directory = bench.directory / f"idle-{queues}"
            await _fill(directory, queues, body)
            partition = await opened.enter_async_context(open_partition(directory))
            idle[queues] = IdleQueues(partition, queues, loads, bench.random)
        names = {queues: f"load one of {queues:,} idle queues" for queues in idle}
        results = await bench.measure({names[queues]: idle[queues].measure for queues in idle})
    few, large = (results[names[queues]] for queues in (FEW, many))
    ratio = large["p50_us"].over(few["p50_us"]).median
    bench.at_most(f"load one of {many:,} / one of {FEW:,}, p50", ratio, COST_RATIO_MAX)


@dataclass(frozen=True, slots=True)
class IdleQueues:
    """A partition with queues that are all idle between two rounds."""

    partition: Partition
    queues: int
    loads: int
    random: Random

    async def measure(self) -> dict[str, float]:
        times_ns = [await self._load_one() for _ in range(self.loads)]
        return {
            "mean_us": sum(times_ns) / len(times_ns) / 1000,
            "p50_us": percentile(times_ns, 50) / 1000,
            "p99_us": percentile(times_ns, 99) / 1000,
        }

    async def _load_one(self) -> int:
        name = _name(self.random.randrange(self.queues))
        begin_ns = time.perf_counter_ns()
        (loaded,) = await self.partition.submit([Materialize(name)])
        elapsed_ns = time.perf_counter_ns() - begin_ns
        assert isinstance(loaded, Materialized), loaded
        assert loaded.was_cold
        assert await ask(self.partition, [Unmaterialize(name)]) == [UnloadOutcome.EVICTED]
        return elapsed_ns


async def _fill(directory: Path, queues: int, body: bytes) -> None:
    """Append two messages to every queue; a group reserves and settles the first."""
    async with open_partition(directory) as partition:
        for names in _frames(queues):
            await ask(partition, [Append(name, 2, body) for name in names])
            reserved = await ask(partition, [Reserve(name, _GROUP, 1) for name in names])
            receipts = [slice_.receipt for each in reserved for slice_ in each.slices]
            assert len(receipts) == len(names)
            await ask(partition, [Settle(receipt, Ending.ACK) for receipt in receipts])
            unloaded = await ask(partition, [Unmaterialize(name) for name in names])
            assert set(unloaded) == {UnloadOutcome.EVICTED}


def _frames(queues: int) -> Iterator[list[str]]:
    for start in range(0, queues, _FRAME_QUEUES):
        yield [_name(number) for number in range(start, min(start + _FRAME_QUEUES, queues))]


def _name(number: int) -> str:
    return f"{TOPIC}/{number:07}"
