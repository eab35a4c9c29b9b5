"""Benchmark `sweep`: the cost of sweeps, lateness of messages, and isolation of partitions.

Each of its three parts is a module, and can be run alone.
"""

from bench.harness.benchmark import Bench, benchmark
from bench.sweep.cost import measure_cost
from bench.sweep.isolation import measure_isolation
from bench.sweep.lateness import measure_lateness


@benchmark("sweep", "the three below, one after the other")
async def sweep(bench: Bench) -> None:
    await measure_cost(bench)
    await measure_lateness(bench)
    await measure_isolation(bench)


@benchmark("sweep-cost", "a sweep with nothing, some and much due, over few and many messages")
async def cost(bench: Bench) -> None:
    await measure_cost(bench)


@benchmark("sweep-lateness", "how late 100 000 scheduled messages arrive")
async def lateness(bench: Bench) -> None:
    await measure_lateness(bench)


@benchmark("sweep-isolation", "the others, while the reads of one partition fail or stall")
async def isolation(bench: Bench) -> None:
    await measure_isolation(bench)
