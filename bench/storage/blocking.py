"""How long scripts of the engine redis hold up the server, which runs nothing else at that time.

Writes and reads of the largest size that one script gets, for each kind of table; a commit of ten
times as many rows, which is cut into pieces; and the deletion of a range. `cpu_ms` is the CPU time
of the server per script, the round trip included. The other times are wall times as the
server logs them, so that other work on the machine counts.
"""

from collections.abc import Awaitable, Callable
from statistics import median
from typing import Final

from bench.harness.benchmark import Bench, once
from bench.harness.figures import percentile
from bench.harness.usage import cpu_ns
from bench.harness.valkey import Server, running_server
from storage_svc.engines.engine import Batch, Identity, Table
from storage_svc.engines.keys import u64, u64x2
from storage_svc.engines.redis.engine import RedisEngine
from storage_svc.engines.redis.layout import KINDS, SCRIPT_US_MAX, WRITE_US

SCRIPT_MS_MAX: Final = 5.0

_LOGGED_US: Final = 100
_VALUE: Final = bytes(range(1, 201))
_TABLES: Final = {
    "point rows": Table.QUEUES,
    "ordered rows": Table.CATALOG,
    "packed rows": Table.RUN_HEADERS,
}


async def measure_blocking(bench: Bench) -> None:
    commits = bench.size(full=100, quick=3)
    bench.settings |= {"script_us": SCRIPT_US_MAX, "commits": commits}
    results = []
    async with running_server(bench.directory / "blocking") as server:
        engine = await server.engines().open(Identity("bench", 0, 1))
        try:
            for name, table in _TABLES.items():
                results += await _of_table(server, engine, name, table, commits)
        finally:
            await engine.close()
    bench.tables.append([once(name, figures) for name, figures in results])
    for name, figures in results:
        bench.at_most(f"{name}: CPU of a script, ms", figures["cpu_ms"], SCRIPT_MS_MAX)


Step = Callable[[], Awaitable[object]]
Measured = tuple[str, dict[str, float]]


async def _of_table(
    server: Server, engine: RedisEngine, name: str, table: Table, commits: int
) -> list[Measured]:
    rows = SCRIPT_US_MAX // WRITE_US[KINDS[table]]

    async def write(first: int, count: int) -> None:
        batch = Batch()
        for number in range(first, first + count):
            batch.put(table, u64x2(number * 7919 % (1 << 40), number), _VALUE)
        await engine.commit(batch)

    async def write_all() -> None:
        for number in range(commits):
            await write(number * rows, rows)

    async def write_large() -> None:
        for number in range(max(1, commits // 10)):
            await write(number * 10 * rows, 10 * rows)

    async def load() -> None:
        for number in range(commits):
            some = range(number * rows, (number + 1) * rows)
            await engine.load(table, [u64x2(each * 7919 % (1 << 40), each) for each in some])

    steps: dict[str, Step] = {
        f"write {rows:,} {name}": write_all,
        f"overwrite {10 * rows:,} {name}": write_large,
        f"load {rows:,} {name}": load,
    }
    if table is not Table.QUEUES:

        async def scan() -> None:
            await engine.scan(table, b"", None, limit=commits * rows)

        async def delete() -> None:
            batch = Batch()
            batch.delete_range(table, u64(0), u64((1 << 64) - 1))
            await engine.commit(batch)

        steps |= {f"scan {rows:,} {name}": scan, f"delete a range of {name}": delete}
    return [(each, await _measured(server, step)) for each, step in steps.items()]


async def _measured(server: Server, step: Step) -> dict[str, float]:
    await server.watch_scripts(_LOGGED_US)
    before_ns = cpu_ns(server.pid)
    await step()
    used_ns = cpu_ns(server.pid) - before_ns
    times_ms = await server.script_times_ms()
    return {
        "scripts": len(times_ms),
        "cpu_ms": used_ns / 1e6 / len(times_ms),
        "median_ms": median(times_ms),
        "p99_ms": percentile(times_ms, 99),
        "longest_ms": max(times_ms),
    }
