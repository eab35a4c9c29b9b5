"""Benchmark `storage`: appends and their floors, and millions of idle queues.

Each of its three parts is a module, and can be run alone.
"""

from bench.harness.benchmark import Bench, benchmark
from bench.storage.appends import measure_appends
from bench.storage.idle import measure_idle
from bench.storage.millions import measure_millions
from bench.storage.redis import measure_redis


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


@benchmark("storage-redis", "the engine redis beside RocksDB and bare pipelined commands")
async def shared(bench: Bench) -> None:
    await measure_redis(bench)


@benchmark("storage-millions", "a million queues used once, then another: memory and cold queues")
async def millions(bench: Bench) -> None:
    await measure_millions(bench)
