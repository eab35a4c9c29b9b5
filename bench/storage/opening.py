"""Opening a partition with very many open reservations: its cost must not grow with them."""

import time
from typing import Final

from bench.harness.benchmark import Bench
from bench.harness.bodies import random_body
from bench.harness.partition import TOPIC, ask, open_partition
from bench.harness.valkey import engines_of
from storage_svc.operations.publish import Append
from storage_svc.operations.reserve import Reserve

OPEN_MS_MAX: Final = 1_000

_PER_QUEUE: Final = 1_000
_HOUR_MS: Final = 60 * 60 * 1000


async def measure_opening(bench: Bench) -> None:
    queues = bench.size(full=1_000, quick=2)
    reservations = queues * _PER_QUEUE
    bench.settings |= {"engine": bench.engine, "reservations": reservations}
    body = random_body(bench.random, _PER_QUEUE)
    async with engines_of(bench, "opening") as (engines, _):
        async with open_partition(bench.directory, engines) as partition:
            for number in range(queues):
                name = f"{TOPIC}/{number}"
                await ask(partition, [Append(name, _PER_QUEUE, body)])
                one = Reserve(name, "group", 1, visibility_ms=_HOUR_MS)
                await ask(partition, [one] * _PER_QUEUE)

        async def open_again() -> dict[str, float]:
            began_ns, began_cpu_ns = time.perf_counter_ns(), time.process_time_ns()
            async with open_partition(bench.directory, engines) as partition:
                took_ns = time.perf_counter_ns() - began_ns
                cpu_ns = time.process_time_ns() - began_cpu_ns
                assert partition.reservations == reservations
            return {"open_ms": took_ns / 1e6, "cpu_ms": cpu_ns / 1e6}

        name = f"opening with {reservations:,} reservations"
        results = await bench.measure({name: open_again})
    bench.at_most(f"{name}, ms", results[name]["open_ms"].median, OPEN_MS_MAX)
