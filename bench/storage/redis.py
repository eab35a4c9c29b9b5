"""The engine `redis` beside RocksDB, and beside bare pipelined commands of the same bytes.

One Valkey on this machine, synced after every commit, and one partition in this process. CPU is
that of the process and that of the server, apart. Memory is the use that the server reports.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.harness.benchmark import Bench, Result
from bench.harness.bodies import random_body
from bench.harness.figures import Figure
from bench.harness.partition import TOPIC, ask, open_partition
from bench.harness.usage import cpu_ns
from bench.harness.valkey import Server, running_server
from storage_svc.engines.engine import Table
from storage_svc.operations.publish import Append
from storage_svc.operations.reserve import Reserve
from storage_svc.operations.settle import Settle
from storage_svc.partition.partition import Partition
from storage_svc.queue.reservation import Ending
from tidemark.service.memory import tune_garbage_collector

FRAME_QUEUES: Final = 100
CPU_RATIO_MAX: Final = 1.5
IDLE_BYTES_MAX: Final = 350
COLD_PER_S_MIN: Final = 5_000

_FRAMES_IN_FLIGHT = 4
_GROUP = "group"
_BASE = "{tidemark/bench/0}:"


async def measure_redis(bench: Bench) -> None:
    cycles = bench.size(full=20, quick=3)
    queues = bench.queues or bench.size(full=100_000, quick=2_000)
    bench.settings |= {"frame_queues": FRAME_QUEUES, "cycles_per_round": cycles, "queues": queues}
    body = random_body(bench.random, 1)
    tune_garbage_collector()  # as a service does once it has started
    async with running_server(bench.directory / "valkey") as server:
        await _measure_cycles(bench, server, body, cycles)
        await server.redis.flushall()
        idle = await _measure_idle(bench.directory, server, body, queues)
        figures = {name: Figure((value,)) for name, value in idle.items()}
        bench.tables.append([Result(f"{queues:,} queues", figures)])
    bench.at_most("an idle queue, bytes without AGES", idle["idle_queue_bytes"], IDLE_BYTES_MAX)
    bench.at_least("cold queues/s", idle["cold_queues_per_s"], COLD_PER_S_MIN)


# --- cycles ---------------------------------------------------------------------------------------


async def _measure_cycles(bench: Bench, server: Server, body: bytes, cycles: int) -> None:
    async with (
        open_partition(bench.directory / "rocksdb") as rocks,
        open_partition(bench.directory, server.engines()) as shared,
    ):

        async def on_rocksdb() -> dict[str, float]:
            return await _cycles(rocks, body, cycles, server.pid)

        async def on_redis() -> dict[str, float]:
            return await _cycles(shared, body, cycles, server.pid)

        async def bare() -> dict[str, float]:
            return await _bare(server, body, cycles)

        results = await bench.measure(
            {"rocksdb": on_rocksdb, "redis": on_redis, "bare pipelines": bare}
        )
    ratio = results["redis"]["cpu_us"].over(results["rocksdb"]["cpu_us"]).median
    bench.at_most("storage CPU per message, redis / rocksdb", ratio, CPU_RATIO_MAX)


async def _cycles(
    partition: Partition, body: bytes, cycles: int, server_pid: int
) -> dict[str, float]:
    """Publish a message to each queue, reserve and settle it."""
    names = [f"{TOPIC}/{number}" for number in range(FRAME_QUEUES)]
    clock = Stopwatch(server_pid)
    for _ in range(cycles):
        await ask(partition, [Append(name, 1, body) for name in names])
        reserved = await ask(partition, [Reserve(name, _GROUP, 1) for name in names])
        await ask(partition, [Settle(each.slices[0].receipt, Ending.ACK) for each in reserved])
    return clock.figures(cycles * FRAME_QUEUES)


async def _bare(server: Server, body: bytes, cycles: int) -> dict[str, float]:
    """The same messages as rows of a hash: written, read and deleted, a pipeline each."""
    clock = Stopwatch(server.pid)
    for _ in range(cycles):
        for command in ("hset", "hget", "hdel"):
            pipe = server.redis.pipeline(transaction=False)
            for number in range(FRAME_QUEUES):
                values = (body,) if command == "hset" else ()
                getattr(pipe, command)("bare", f"{number}", *values)
            await pipe.execute()
    return clock.figures(cycles * FRAME_QUEUES)


class Stopwatch:
    def __init__(self, server_pid: int) -> None:
        self._server_pid = server_pid
        self._cpu_ns = cpu_ns(os.getpid())
        self._server_cpu_ns = cpu_ns(server_pid)
        self._began_ns = time.perf_counter_ns()

    def figures(self, messages: int) -> dict[str, float]:
        seconds = (time.perf_counter_ns() - self._began_ns) / 1e9
        return {
            "messages_per_s": messages / seconds,
            "cpu_us": (cpu_ns(os.getpid()) - self._cpu_ns) / 1e3 / messages,
            "server_cpu_us": (cpu_ns(self._server_pid) - self._server_cpu_ns) / 1e3 / messages,
        }


# --- idle queues ----------------------------------------------------------------------------------


async def _measure_idle(
    directory: Path, server: Server, body: bytes, queues: int
) -> dict[str, float]:
    names = [f"{TOPIC}/{number:010}" for number in range(queues)]
    frames = [names[at : at + FRAME_QUEUES] for at in range(0, queues, FRAME_QUEUES)]
    before = await server.used_bytes()
    async with open_partition(directory, server.engines()) as partition:
        for frame in frames:
            await ask(partition, [Append(name, 1, body) for name in frame])
            reserved = await ask(partition, [Reserve(name, _GROUP, 1) for name in frame])
            await ask(partition, [Settle(each.slices[0].receipt, Ending.ACK) for each in reserved])
    ages = await server.redis.memory_usage(f"{_BASE}{Table.AGES}<", samples=0)
    for table in (Table.CONSUMED, Table.METRICS):  # of messages and time, not of idle queues
        await server.redis.delete(f"{_BASE}{table}<")
    used = await server.used_bytes() - before
    async with open_partition(directory, server.engines()) as partition:
        clock = Stopwatch(server.pid)
        await _publish(partition, frames, body)
        cold = clock.figures(queues)
    return {
        "idle_queue_bytes": (used - ages) / queues,
        "ages_bytes": ages / queues,
        "cold_queues_per_s": cold["messages_per_s"],
        "cold_cpu_us": cold["cpu_us"],
        "cold_server_cpu_us": cold["server_cpu_us"],
    }


async def _publish(partition: Partition, frames: Sequence[Sequence[str]], body: bytes) -> None:
    """A message to each queue, with some frames under way, as brokers have them."""
    left = iter(frames)

    async def walk() -> None:
        for frame in left:  # shared by all tasks
            await ask(partition, [Append(name, 1, body) for name in frame])

    await asyncio.gather(*(walk() for _ in range(_FRAMES_IN_FLIGHT)))
