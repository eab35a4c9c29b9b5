"""Benchmark `stalls`: how long work on one large queue holds up everything else in storage.

One partition inside this process. Each step works on a queue of many runs while single messages are
appended to another queue of the partition. Times are CPU times of the event loop's thread, so that
other processes on the machine do not count: the longest turn of the event loop, the longest wait of
an append, and the cost per run, which must not grow with the number of runs.
"""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

from bench.harness.benchmark import Bench, Result, benchmark
from bench.harness.figures import Figure
from bench.harness.partition import TOPIC, ask
from bench.harness.turns import Turns
from storage_svc.engines.engine import Identity
from storage_svc.engines.rocksdb import RocksEngines
from storage_svc.operations.groups import RemoveGroup
from storage_svc.operations.loading import Materialize, Unmaterialize
from storage_svc.operations.publish import Append
from storage_svc.operations.queues import Purge, RemoveQueue
from storage_svc.operations.reserve import Reserve
from storage_svc.operations.settle import Settle
from storage_svc.operations.topics import PutTopic
from storage_svc.partition.partition import Partition
from storage_svc.queue.reservation import Ending
from storage_svc.reads import due_work, tables
from storage_svc.reads.table_filter import TableFilter, TableName
from tidemark.api.broker.v1.message_pb2 import Message, MessageBatch
from tidemark.clock import ManualClock, SystemClock
from tidemark.errors import TidemarkError
from tidemark.service.memory import tune_garbage_collector
from tidemark.topics import Topic, TopicSettings

FEW: Final = 1000
RATIO_MAX: Final = 1.5
"""Cost per run of many runs, relative to that of a few."""
TURN_MS_MAX: Final = 20.0
"""The longest turn of the event loop."""
WAIT_MS_MAX: Final = 5.0
"""The longest wait of another queue while messages are purged."""

_QUEUE: Final = f"{TOPIC}/large"
_OTHER: Final = f"{TOPIC}/other"
_FRAME: Final = 500
_SWEEP_PAGE: Final = 200
_HOUR_MS: Final = 60 * 60 * 1000
_RELEASED_AFTER_S: Final = 2
_BODY: Final = MessageBatch(messages=[Message(payload=b"x" * 100)]).SerializeToString()


class Storage:
    """A partition and a clock that is moved by hand."""

    def __init__(self, directory: Path) -> None:
        self.clock = ManualClock()
        self._engines = RocksEngines(directory)
        self.partition = self._partition()

    def _partition(self) -> Partition:
        return Partition(self._engines, Identity("bench", 0, 1), self.clock)

    async def close(self) -> None:
        """Close the partition, and wait until the memory that it took is free."""
        await self.partition.close()
        self.partition = self._partition()
        await asyncio.sleep(_RELEASED_AFTER_S)

    async def fill(self, runs: int, ttl_ms: int = 0) -> None:
        append = Append(_QUEUE, 1, _BODY, ttl_ms=ttl_ms)
        for _ in range(0, runs, _FRAME):
            await ask(self.partition, [append] * _FRAME)

    async def reserve(self) -> list[bytes]:
        """Receipts of everything that can be handed out."""
        receipts: list[bytes] = []
        reserve = Reserve(_QUEUE, "g", _FRAME, visibility_ms=_HOUR_MS)
        while slices := (await ask(self.partition, [reserve]))[0].slices:
            receipts += [each.receipt for each in slices]
        return receipts

    async def settle(self, receipts: list[bytes], ending: Ending, delay_ms: int = 0) -> None:
        for at in range(0, len(receipts), _FRAME):
            part = receipts[at : at + _FRAME]
            await ask(self.partition, [Settle(each, ending, delay_ms=delay_ms) for each in part])

    async def sweep(self) -> None:
        """A sweep over times to live: its reads and actions."""
        token = b""
        while True:
            kind = due_work.ScanKind.DEAD_DEADLINES
            page = await due_work.scan(self.partition, kind, token, _SWEEP_PAGE)
            if page.due:
                await self.partition.submit([each.action for each in page.due])
            token = page.next_token
            if not token:
                return

    async def scan(self) -> None:
        read = tables.scan(self.partition, TableName.RUNS, TableFilter(), 10_000, SystemClock())
        async for _ in read:
            pass

    async def settled_erasures(self) -> None:
        """Until everything that was removed is gone from the engine."""
        while self.partition.state.erasures:  # noqa: ASYNC110 - the partition erases by itself
            await asyncio.sleep(0.001)


Step = Callable[[Storage], Awaitable[object]]


@asynccontextmanager
async def _opened(directory: Path, **settings: Any) -> AsyncIterator[Storage]:
    storage = Storage(directory)
    await storage.partition.open()
    try:
        topic = Topic(TOPIC, TopicSettings(**settings))
        await ask(storage.partition, [PutTopic(topic, create=True)])
        yield storage
    finally:
        await storage.partition.close()


async def _measured(storage: Storage, runs: int, step: Step) -> dict[str, float]:
    gc.collect()  # garbage of the step before is not part of this one
    turns = Turns()
    longest_wait_ns = 0
    done = asyncio.Event()

    async def append() -> None:
        nonlocal longest_wait_ns
        while not done.is_set():
            begin_ns = time.thread_time_ns()
            with suppress(TidemarkError):  # while it is opened again
                await ask(storage.partition, [Append(_OTHER, 1, _BODY)])
                longest_wait_ns = max(longest_wait_ns, time.thread_time_ns() - begin_ns)
            await asyncio.sleep(0.001)

    appending = asyncio.create_task(append())
    await asyncio.sleep(0.01)
    longest_wait_ns = 0
    with turns.watched():
        begin_ns = time.thread_time_ns()
        await step(storage)
        await storage.settled_erasures()
        cpu_ns = time.thread_time_ns() - begin_ns
    done.set()
    await appending
    return {
        "us_per_run": cpu_ns / 1000 / runs,
        "turn_ms": turns.longest_ns / 1e6,
        "wait_ms": longest_wait_ns / 1e6,
        "gc_ms": turns.collected_ns / 1e6,
    }


async def _steps(directory: Path, runs: int) -> dict[str, dict[str, float]]:
    found = {}
    async with _opened(directory / f"held-{runs}") as storage:
        await storage.fill(runs, ttl_ms=_HOUR_MS)
        receipts = await storage.reserve()
        assert len(receipts) == runs
        await storage.scan()  # the first one imports its encoder
        found["scan, all reserved"] = await _measured(storage, runs, Storage.scan)
        await storage.close()
        found["open and load, all reserved"] = await _measured(storage, runs, _open)
        await storage.clock.advance_ms(_HOUR_MS)
        found["time to live, all reserved"] = await _measured(storage, runs, Storage.sweep)
        found["purge, all reserved"] = await _measured(storage, runs, _purge_reserved)
        found["return all"] = await _measured(
            storage, runs, lambda each: each.settle(receipts, Ending.NACK, delay_ms=_HOUR_MS)
        )
        found["scan, all returned"] = await _measured(storage, runs, Storage.scan)
        found["purge, all returned"] = await _measured(storage, runs, _purge)
    async with _opened(directory / f"waiting-{runs}") as storage:
        await storage.fill(runs)
        found["purge, all waiting"] = await _measured(storage, runs, _purge)
        await storage.fill(runs, ttl_ms=_HOUR_MS)
        await storage.clock.advance_ms(_HOUR_MS)
        found["time to live, all waiting"] = await _measured(storage, runs, Storage.sweep)
        await storage.fill(runs, ttl_ms=_HOUR_MS)
        await storage.reserve()
        found["remove queue, all reserved"] = await _measured(storage, runs, _remove_queue)
    async with _opened(directory / f"kept-{runs}", retention_enabled=True) as storage:
        await storage.fill(runs)
        receipts = await storage.reserve()
        found["acknowledge all"] = await _measured(
            storage, runs, lambda each: each.settle(receipts, Ending.ACK)
        )
        found["unload and load"] = await _measured(storage, runs, _unload)
        found["remove group"] = await _measured(storage, runs, _remove_group)
    return found


async def _purge(storage: Storage) -> None:
    (removed,) = await ask(storage.partition, [Purge(_QUEUE)])
    assert removed.messages, removed


async def _purge_reserved(storage: Storage) -> None:
    (removed,) = await ask(storage.partition, [Purge(_QUEUE)])
    assert not removed.messages, removed


async def _remove_queue(storage: Storage) -> None:
    await ask(storage.partition, [RemoveQueue(_QUEUE)])


async def _remove_group(storage: Storage) -> None:
    await ask(storage.partition, [RemoveGroup(_QUEUE, "g")])


async def _unload(storage: Storage) -> None:
    await ask(storage.partition, [Unmaterialize(_QUEUE)])
    await ask(storage.partition, [Materialize(_QUEUE)])


async def _open(storage: Storage) -> None:
    await storage.partition.open()
    await ask(storage.partition, [Materialize(_QUEUE)])


@benchmark("stalls", "how long work on one large queue holds up storage")
async def stalls(bench: Bench) -> None:
    many = bench.size(full=100_000, quick=5000)
    bench.settings |= {"runs": [FEW, many]}
    tune_garbage_collector()  # as a service does once it has started
    rounds = [
        {runs: await _steps(bench.directory / str(number), runs) for runs in (FEW, many)}
        for number in range(bench.rounds)
    ]
    few, large = (_results([each[runs] for each in rounds], runs) for runs in (FEW, many))
    bench.tables += [list(few.values()), list(large.values())]
    for name, result in large.items():
        ratio = result["us_per_run"].over(few[name]["us_per_run"]).median
        bench.at_most(f"{name}: cost per run, {many:,} / {FEW:,}", ratio, RATIO_MAX)
        longest_ms = max(result["turn_ms"].rounds)
        bench.at_most(f"{name}: longest turn, ms", longest_ms, TURN_MS_MAX)
    for name in ("purge, all waiting", "remove queue, all reserved"):
        bench.at_most(f"{name}: longest wait, ms", large[name]["wait_ms"].median, WAIT_MS_MAX)


def _results(rounds: list[dict[str, dict[str, float]]], runs: int) -> dict[str, Result]:
    """The measurements, by step."""
    return {
        name: Result(
            f"{name}, {runs:,} runs",
            {figure: Figure(tuple(each[name][figure] for each in rounds)) for figure in figures},
        )
        for name, figures in rounds[0].items()
    }
