"""Appends through a real partition, compared with bare RocksDB and with a bare file.

One closed loop per variant: a frame holds a run for each of many queues, and a few frames are in
flight at any time, so that group commit works as in production. The two bare loops write the same
bodies in commits of the same size.
"""

import asyncio
import itertools
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final

from rocksdict import Cache, Rdict, WriteBatch

from bench.harness.benchmark import Bench, Result, Round
from bench.harness.bodies import MESSAGE_BYTES, random_body
from bench.harness.figures import Figure
from bench.harness.partition import TOPIC, ask, open_partition
from bench.harness.usage import cpu_ns
from storage_svc.engines.engine import Table
from storage_svc.engines.keys import u64x2
from storage_svc.engines.rocksdb import BLOCK_CACHE_BYTES, WRITE_BUFFER_BYTES
from storage_svc.engines.rocksdb_files import Memory, open_database
from storage_svc.operations.loading import Materialize
from storage_svc.operations.publish import Append
from storage_svc.partition.partition import Partition

RUN_MESSAGES: Final = (1, 10, 100, 1000)
QUEUES: Final = (1, 100, 10_000)
FRAMES_IN_FLIGHT: Final = 4
FRAME_RUNS_MAX: Final = 1000
FRAME_BYTES_MAX: Final = 256 * 1024
OF_ROCKSDB_MIN: Final = 0.5
"""Required throughput of appends relative to bare RocksDB, at the longest runs."""

_BODIES = 16  # different ones: equal bodies would compress to nothing


async def measure_appends(bench: Bench) -> None:
    round_ms = bench.size(full=300, quick=20)
    bench.settings |= {
        "append_round_ms": round_ms,
        "frames_in_flight": FRAMES_IN_FLIGHT,
        "frame_bytes_max": FRAME_BYTES_MAX,
        "message_bytes": MESSAGE_BYTES,
    }
    ratios = []
    for messages in RUN_MESSAGES:
        bodies = [random_body(bench.random, messages) for _ in range(_BODIES)]
        async with _floors(bench.directory / "appends") as floors:
            variants: dict[str, Round] = {}
            for queues in QUEUES:
                cell = Cell(floors, messages, queues, bodies, round_ms * 1_000_000)
                await cell.create_queues()
                variants |= cell.variants()
            results = await bench.measure(variants)
        ratios += [_ratios(results, messages, queues) for queues in QUEUES]
    bench.tables.append(ratios)
    for result in ratios[-len(QUEUES) :]:
        value = result["of_rocksdb"].median
        bench.at_least(f"{result.name}: appends / bare RocksDB", value, OF_ROCKSDB_MIN)


@dataclass(frozen=True, slots=True)
class Floors:
    """The targets of the three variants: a partition, a bare RocksDB, a bare file."""

    partition: Partition
    rocksdb: Rdict
    file: FileIO


@asynccontextmanager
async def _floors(directory: Path) -> AsyncIterator[Floors]:
    """Empty targets, removed afterwards, so that no measurement pays for rows of another."""
    memory = Memory(Cache(BLOCK_CACHE_BYTES), WRITE_BUFFER_BYTES)
    async with open_partition(directory / "tidemark") as partition:
        rocksdb = open_database(directory / "rocksdb", memory)  # with the engine's own options
        try:
            with (directory / "synced").open("wb", buffering=0) as file:
                yield Floors(partition, rocksdb, file)
        finally:
            rocksdb.close()
    shutil.rmtree(directory)


class Cell:
    """Runs of one length over one number of queues."""

    def __init__(
        self, floors: Floors, messages: int, queues: int, bodies: list[bytes], round_ns: int
    ) -> None:
        self._floors = floors
        self._messages = messages
        self._names = [f"{TOPIC}/{queues}-{number}" for number in range(queues)]
        self._run_bytes = len(bodies[0])
        self._bodies = itertools.cycle(bodies)
        self._round_ns = round_ns
        self._next_name = itertools.cycle(self._names)
        self._next_row = itertools.count()
        self._frame_runs = max(1, min(queues, FRAME_RUNS_MAX, FRAME_BYTES_MAX // self._run_bytes))
        self._commit_runs = 1
        """The commit size of the bare loops: that of the partition's last round."""

    def variants(self) -> dict[str, Round]:
        name = cell_name(self._messages, len(self._names))
        return {
            f"{name}: Tidemark": self._append,
            f"{name}: bare RocksDB": self._write_rocksdb,
            f"{name}: bare fdatasync": self._write_file,
        }

    async def create_queues(self) -> None:
        for start in range(0, len(self._names), FRAME_RUNS_MAX):
            names = self._names[start : start + FRAME_RUNS_MAX]
            await ask(self._floors.partition, [Materialize(name, create=True) for name in names])

    async def _append(self) -> dict[str, float]:
        partition = self._floors.partition
        commits_before = partition.commits
        stopwatch = Stopwatch(self._round_ns)
        runs = sum(await asyncio.gather(*(self._send(stopwatch) for _ in range(FRAMES_IN_FLIGHT))))
        commits = partition.commits - commits_before
        self._commit_runs = round(runs / commits)
        return self._figures(stopwatch, commits, runs)

    async def _send(self, stopwatch: "Stopwatch") -> int:
        """Send frames one after the other, at least one; returns the number of runs."""
        runs = 0
        while not runs or not stopwatch.over:
            frame = [
                Append(next(self._next_name), self._messages, next(self._bodies))
                for _ in range(self._frame_runs)
            ]
            await ask(self._floors.partition, frame)
            runs += len(frame)
        return runs

    async def _write_rocksdb(self) -> dict[str, float]:
        rocksdb = self._floors.rocksdb
        table = rocksdb.get_column_family_handle(Table.RUN_BODIES)

        def commit(bodies: Iterator[bytes]) -> None:
            batch = WriteBatch(raw_mode=True)
            for body in bodies:
                batch.put(u64x2(len(self._names), next(self._next_row)), body, table)
            rocksdb.write(batch)
            rocksdb.flush_wal(True)

        return self._repeat(commit)

    async def _write_file(self) -> dict[str, float]:
        file = self._floors.file

        def commit(bodies: Iterator[bytes]) -> None:
            file.write(b"".join(bodies))
            os.fdatasync(file)

        return self._repeat(commit)

    def _repeat(self, commit: Callable[[Iterator[bytes]], None]) -> dict[str, float]:
        commits = 0
        stopwatch = Stopwatch(self._round_ns)
        while not commits or not stopwatch.over:
            commit(itertools.islice(self._bodies, self._commit_runs))
            commits += 1
        return self._figures(stopwatch, commits, commits * self._commit_runs)

    def _figures(self, stopwatch: "Stopwatch", commits: int, runs: int) -> dict[str, float]:
        cpu_us = stopwatch.cpu_us
        seconds = stopwatch.seconds
        return {
            "commits_per_s": commits / seconds,
            "runs_per_commit": runs / commits,
            "messages_per_s": runs * self._messages / seconds,
            "mb_per_s": runs * self._run_bytes / seconds / 1e6,
            "cpu_us_per_run": cpu_us / runs,
        }


class Stopwatch:
    """Wall and CPU time since its creation."""

    def __init__(self, until_ns: int) -> None:
        self._cpu_ns = cpu_ns(os.getpid())
        self._begin_ns = time.perf_counter_ns()
        self._end_ns = self._begin_ns + until_ns

    @property
    def over(self) -> bool:
        return time.perf_counter_ns() >= self._end_ns

    @property
    def seconds(self) -> float:
        return (time.perf_counter_ns() - self._begin_ns) / 1e9

    @property
    def cpu_us(self) -> float:
        return (cpu_ns(os.getpid()) - self._cpu_ns) / 1e3


def cell_name(messages: int, queues: int) -> str:
    return f"{messages:,} a run, {queues:,} {'queue' if queues == 1 else 'queues'}"


def _ratios(results: dict[str, Result], messages: int, queues: int) -> Result:
    """Messages per second as a fraction of each floor."""
    name = cell_name(messages, queues)
    mine, rocksdb, file = (
        results[f"{name}: {variant}"]["messages_per_s"]
        for variant in ("Tidemark", "bare RocksDB", "bare fdatasync")
    )
    figures: dict[str, Figure] = {"of_rocksdb": mine.over(rocksdb), "of_fdatasync": mine.over(file)}
    return Result(name, figures)
