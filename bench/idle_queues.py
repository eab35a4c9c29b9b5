"""Benchmark `idle-queues`: lite queues used once, then idle; then a second, different set.

A real cluster, driven over sessions: each queue gets a message, which a group consumes and
acknowledges; then automatic cleanup unloads the queue. It measures the cost of an operation with
few and with many queues, in alternation with a cluster that never has more than a few; then the
memory left in each process, and the latency of the first message to a cold queue.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import reduce
from random import Random
from typing import Final

from bench.harness.benchmark import Bench, Result, benchmark, once
from bench.harness.broker import (
    TOPIC,
    Broker,
    Stopwatch,
    ack_all,
    broker_of,
    publish_each,
    take,
)
from bench.harness.cluster import memory_of, running_cluster
from bench.harness.figures import percentile
from bench.harness.usage import unshared_bytes
from tests.support.session import Session
from tidemark.api.broker.v1.message_pb2 import Message, MessageBatch
from tidemark.api.broker.v1.topic_pb2 import TopicSettings
from tidemark.local.cluster import SERVICES, ServiceName

FEW: Final = 1000
COST_RATIO_MAX: Final = 1.3
"""The cost of an operation with many queues, relative to that with few."""

GROWTH_BYTES_MAX: Final = 64
"""Unshared memory per process that a queue of the second set may leave behind."""

COLD_MIN: Final = 10_000
"""Messages per second, one to each of many cold queues."""

COLD_P99_RATIO_MAX: Final = 10
"""Latency of the first message to a cold queue, relative to a warm one; p99 of both."""

_CHUNK_QUEUES = 1000
_SESSIONS = 4
_WARM_QUEUES = 10
_MESSAGE_BYTES = 100
_MB = 1e6


@benchmark("idle-queues", "a million queues used once, then idle, over sessions: memory and costs")
async def idle_queues(bench: Bench) -> None:
    queues = bench.many_queues
    sizes = Sizes(
        idle_after_ms=bench.size(full=500, quick=200),
        cycles=min(queues, FEW, bench.size(full=1000, quick=250)),
        publishes=min(queues, bench.size(full=1000, quick=150)),
        cold_queues=min(queues, bench.size(full=10_000, quick=1000)),
    )
    bench.settings |= {
        "queues": queues,
        "idle_after_ms": sizes.idle_after_ms,
        "message_bytes": _MESSAGE_BYTES,
        "cycles_per_round": sizes.cycles,
        "single_publishes_per_round": sizes.publishes,
        "cold_queues_per_round": sizes.cold_queues,
    }
    async with AsyncExitStack() as opened:
        few, many = [
            Queues(await _start(bench, opened, name, sizes), sizes, bench.random)
            for name in ("few", "many")
        ]
        await few.use_once("first", min(FEW, queues))
        first = await _first_set(bench, few, many, queues)
        second = await many.use_once("second", queues)
        sets = {f"first {queues:,} queues": first, f"second {queues:,} queues": second}
        bench.tables.append([each.pace(name) for name, each in sets.items()])
        bench.tables.append([row for name, each in sets.items() for row in each.memory(name)])
        if not bench.quick:  # with few queues the caches are still growing
            for service in SERVICES:
                name = f"second {queues:,} queues: bytes left by each in {service}"
                bench.at_most(name, second.left_bytes(service), GROWTH_BYTES_MAX)
        await _cold_beside_warm(bench, many)


async def _first_set(bench: Bench, few: "Queues", many: "Queues", queues: int) -> "Used":
    """Use the first set, and measure at each power of ten."""
    levels = [level for level in (FEW * 10**power for power in range(1, 4)) if level <= queues]
    if queues not in levels:
        levels.append(queues)
    parts = []
    for level in levels:
        parts.append(await many.use_once("first", level))
        names = (f"{FEW:,} queues, beside {level:,}", f"{level:,} queues")
        results = await bench.measure(dict(zip(names, (few.cycle, many.cycle), strict=True)))
        for figure in ("cpu_us_per_cycle", "us_per_cycle"):
            base, cost = (results[name][figure] for name in names)
            ratio = cost.over(base).median
            bench.at_most(f"{level:,} queues / {FEW:,}: {figure}", ratio, COST_RATIO_MAX)
    return reduce(Used.then, parts)


async def _cold_beside_warm(bench: Bench, many: "Queues") -> None:
    name = "first message to a queue, one at a time"
    results = await bench.measure({name: many.publish_singly})
    ratio = results[name]["cold_p99_us"].over(results[name]["warm_p99_us"]).median
    bench.at_most("cold / warm publish, p99", ratio, COLD_P99_RATIO_MAX)
    name = "one message to each of many queues"
    results = await bench.measure({name: many.publish_to_many})
    if not bench.quick:  # a short burst does not keep all processes busy
        cold_per_s = results[name]["cold_per_s"].median
        bench.at_least("one message to each of many cold queues, per second", cold_per_s, COLD_MIN)


async def _start(bench: Bench, opened: AsyncExitStack, name: str, sizes: "Sizes") -> Broker:
    cluster = await opened.enter_async_context(running_cluster(bench.directory / name))
    settings = TopicSettings(idle_after_ms=sizes.idle_after_ms)
    return await opened.enter_async_context(broker_of(cluster, settings))


Memory = Mapping[ServiceName, int]
"""Unshared bytes of each process."""


@dataclass(frozen=True, slots=True)
class Used:
    """How a set of queues was used once and unloaded."""

    queues: int
    used_s: float
    unload_s: float
    before: Memory
    peak: Memory
    after: Memory

    def then(self, other: "Used") -> "Used":
        """Both, one after the other; work in between is included."""
        peak = {name: max(self.peak[name], other.peak[name]) for name in SERVICES}
        return Used(
            self.queues + other.queues,
            self.used_s + other.used_s,
            self.unload_s + other.unload_s,
            self.before,
            peak,
            other.after,
        )

    def left_bytes(self, service: ServiceName) -> float:
        """Memory that each queue has left behind."""
        return (self.after[service] - self.before[service]) / self.queues

    def pace(self, name: str) -> Result:
        figures = {"cycles_per_s": self.queues / self.used_s, "unloaded_after_s": self.unload_s}
        return once(name, figures)

    def memory(self, name: str) -> list[Result]:
        return [
            once(
                f"{name}: {service}",
                {
                    "before_mb": self.before[service] / _MB,
                    "peak_mb": self.peak[service] / _MB,
                    "after_mb": self.after[service] / _MB,
                    "left_bytes_per_queue": self.left_bytes(service),
                },
            )
            for service in SERVICES
        ]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of one round."""

    idle_after_ms: int
    cycles: int
    publishes: int
    cold_queues: int


class Queues:
    """The queues of one cluster; all are idle between two calls."""

    def __init__(self, broker: Broker, sizes: Sizes, random: Random) -> None:
        self._broker = broker
        self._sizes = sizes
        self._random = random
        self._used: dict[str, int] = {}
        self._batch = MessageBatch(messages=[Message(payload=random.randbytes(_MESSAGE_BYTES))])

    async def use_once(self, wave: str, queues: int) -> Used:
        """Publish to and consume from unused queues of a wave, up to that many in total."""
        cluster = self._broker.cluster
        before = await memory_of(cluster)
        begin = self._used.get(wave, 0)
        stopwatch = Stopwatch()
        # Shared by all tasks.
        chunks = _chunks([_name(wave, number) for number in range(begin, queues)])
        async with AsyncExitStack() as opened:
            sessions = [
                await opened.enter_async_context(self._broker.session(f"{wave}-{number}"))
                for number in range(_SESSIONS)
            ]
            await asyncio.gather(*(self._walk(session, chunks) for session in sessions))
            used_s = stopwatch.elapsed_s()
            peak = {service: unshared_bytes(cluster.pid(service)) for service in SERVICES}
        await self._broker.until_unloaded()
        unload_s = stopwatch.elapsed_s() - used_s
        self._used[wave] = queues
        return Used(queues - begin, used_s, unload_s, before, peak, await memory_of(cluster))

    async def cycle(self) -> dict[str, float]:
        """Publish, consume and acknowledge in some idle queues, then let them go idle."""
        names = self._some(self._sizes.cycles)
        cpu_begin_ns = self._broker.cpu_ns()
        async with self._broker.session("cycle") as session:
            stopwatch = Stopwatch()
            await self._consume_one_each(session, names)
            elapsed_s = stopwatch.elapsed_s()
        await self._broker.until_unloaded()
        cpu_ns = self._broker.cpu_ns() - cpu_begin_ns
        return {
            "us_per_cycle": elapsed_s * 1e6 / len(names),
            "cpu_us_per_cycle": cpu_ns / 1000 / len(names),
        }

    async def publish_singly(self) -> dict[str, float]:
        """Alternate between a message to an idle queue and one to a loaded queue."""
        cold, warm = self._some(self._sizes.publishes), self._some(_WARM_QUEUES)
        cold_ns, warm_ns = [], []
        async with self._broker.session("single") as session:
            await publish_each(session, warm, self._batch)
            for number, name in enumerate(set(cold) - set(warm)):
                cold_ns.append(await self._publish_one(session, name))
                warm_ns.append(await self._publish_one(session, warm[number % len(warm)]))
        await self._broker.until_unloaded()
        return {
            f"{kind}_p{percent}_us": percentile(times_ns, percent) / 1000
            for kind, times_ns in (("cold", cold_ns), ("warm", warm_ns))
            for percent in (50, 99)
        }

    async def publish_to_many(self) -> dict[str, float]:
        """A message to each of many idle queues, and again while they are loaded."""
        names = self._some(self._sizes.cold_queues)
        async with self._broker.session("many") as session:
            stopwatch = Stopwatch()
            await publish_each(session, names, self._batch)
            cold_s = stopwatch.elapsed_s()
            await publish_each(session, names, self._batch)
            warm_s = stopwatch.elapsed_s() - cold_s
        await self._broker.until_unloaded()
        return {"cold_per_s": len(names) / cold_s, "warm_per_s": len(names) / warm_s}

    async def _publish_one(self, session: Session, name: str) -> int:
        begin_ns = time.perf_counter_ns()
        await session.publish(name, self._batch)
        return time.perf_counter_ns() - begin_ns

    async def _walk(self, session: Session, chunks: Iterator[Sequence[str]]) -> None:
        for names in chunks:
            await self._consume_one_each(session, names)

    async def _consume_one_each(self, session: Session, names: Sequence[str]) -> None:
        consumer = session.open_consumer("group")
        await publish_each(session, names, self._batch)
        await consumer.subscribe(*names)
        await ack_all(session, await take(consumer, len(names)))
        consumer.close()

    def _some(self, count: int) -> list[str]:
        """Random queues of the first set: a cache holds them only if it holds all."""
        drawn = self._random.sample(range(self._used["first"]), count)
        return [_name("first", number) for number in drawn]


def _chunks(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), _CHUNK_QUEUES):
        yield names[start : start + _CHUNK_QUEUES]


def _name(wave: str, number: int) -> str:
    return f"{TOPIC}/{wave}-{number:07}"
