"""Benchmark `storage`: appends and their floors, and millions of idle queues; with `--engine redis`
the costs of that engine.

Each of its parts is a module, and can be run alone.
"""

from bench.harness.benchmark import Bench, benchmark
from bench.storage.appends import measure_appends
from bench.storage.blocking import measure_blocking
from bench.storage.idle import measure_idle
from bench.storage.millions import measure_millions
from bench.storage.opening import measure_opening
from bench.storage.purge import measure_purge
from bench.storage.redis import measure_redis


@benchmark("storage", "the parts below that concern the engine, one after the other")
async def storage(bench: Bench) -> None:
    if bench.engine == "redis":
        await measure_redis(bench)
        await measure_blocking(bench)
        await measure_opening(bench)
        await measure_purge(bench)
        return
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


@benchmark("storage-opening", "opening a partition with a million reservations (--engine)")
async def opening(bench: Bench) -> None:
    await measure_opening(bench)


@benchmark("storage-purge", "a purge of a million messages beside other queues (--engine)")
async def purge(bench: Bench) -> None:
    await measure_purge(bench)


@benchmark("storage-redis", "the engine redis beside RocksDB and bare pipelined commands")
async def shared(bench: Bench) -> None:
    await measure_redis(bench)


@benchmark("storage-blocking", "how long the scripts of the engine redis hold up the server")
async def blocking(bench: Bench) -> None:
    await measure_blocking(bench)
