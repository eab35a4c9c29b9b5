"""Benchmark `storage`: appends beside their floors, idle queues by the million, and what they cost.

Its three parts can be run alone; each is the subject of a module of its own.
"""

from bench.frame import Bench, benchmark
from bench.storage_appends import measure_appends
from bench.storage_idle import measure_idle
from bench.storage_millions import measure_millions


@benchmark("storage", "the three below, one after the other")
async def storage(bench: Bench) -> None:
    await measure_appends(bench)
    await measure_idle(bench)
    await measure_millions(bench)


@benchmark("storage-appends", "appends beside bare RocksDB and a bare fdatasync of the same bytes")
async def appends(bench: Bench) -> None:
    await measure_appends(bench)


@benchmark("storage-idle", "loading one idle queue where a thousand exist, and where a million do")
async def idle(bench: Bench) -> None:
    await measure_idle(bench)


@benchmark("storage-millions", "a million queues used once, then another: memory and cold queues")
async def millions(bench: Bench) -> None:
    await measure_millions(bench)
