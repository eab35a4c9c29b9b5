"""Retention of queues with one message each, which is the common case, and of nothing at all.

The same queues are passed over three times while nothing is due, and then removed in one pass. A
pass is measured as a whole: asking, planning and applying, with Spark warm.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench.harness.benchmark import Bench, once
from bench.harness.bodies import random_body
from bench.harness.partition import ask, open_partition
from bench.harness.usage import cpu_ns, unshared_bytes
from storage_svc.operations.publish import Append
from storage_svc.operations.topics import PutTopic
from tidemark.topics import Topic, TopicSettings

if TYPE_CHECKING:
    from spark_batch.passes.jobs import Jobs

DELETED_PER_S_MIN: Final = 25_000.0
NOTHING_DUE_CPU_MS_MAX: Final = 50.0
MEMORY_MB_MAX: Final = 64.0

TOPIC: Final = "single"
YOUNG: Final = TopicSettings(retention_enabled=True, retention_seconds=86_400)
_OLD: Final = TopicSettings(retention_enabled=True, retention_seconds=1)
_WARM: Final = ("warm-1", "warm-2", "warm-3")
"""Topics of small passes that warm Spark."""
_PASSES = 3
_FRAME = 1000

Limit = Callable[[str, TopicSettings], Awaitable[None]]


async def fill(data: Path, queues: int, bench: Bench) -> None:
    """One message in each queue."""
    body = random_body(bench.random, 1)
    async with open_partition(data) as partition:
        await ask(partition, [PutTopic(Topic(TOPIC, YOUNG), create=True)])
        for name in _WARM:
            await ask(partition, [PutTopic(Topic(name, YOUNG), create=True)])
            await ask(partition, [Append(f"{name}/{n}", 1, body) for n in range(100)])
        for start in range(0, queues, _FRAME):
            numbers = range(start, min(start + _FRAME, queues))
            await ask(partition, [Append(f"{TOPIC}/{n:07}", 1, body) for n in numbers])


async def measure(bench: Bench, jobs: "Jobs", pid: int, queues: int, limit: Limit) -> float:
    """Passes with nothing due, and one with everything due; returns messages deleted per second."""
    bench.progress("one message per queue: Spark gets warm")
    for name in _WARM:
        await limit(name, _OLD)
        await asyncio.to_thread(jobs.retention)
    idle_cpu_ns, idle_s = [], []
    for _ in range(_PASSES):
        before_ns, began = cpu_ns(pid), time.perf_counter()
        done = await asyncio.to_thread(jobs.retention)
        idle_cpu_ns.append(cpu_ns(pid) - before_ns)
        idle_s.append(time.perf_counter() - began)
        assert not sum(done.counts.values()), done.counts
    bench.progress(f"one message per queue: a pass over {queues:,}")
    await limit(TOPIC, _OLD)
    before_ns, before_bytes, peak = cpu_ns(pid), unshared_bytes(pid), 0
    began = time.perf_counter()
    working = asyncio.ensure_future(asyncio.to_thread(jobs.retention))
    while not working.done():
        peak = max(peak, unshared_bytes(pid))
        await asyncio.wait({working}, timeout=0.1)
    elapsed = time.perf_counter() - began
    removed = working.result().counts["expired"]
    assert removed == queues, f"{removed} of {queues} messages were removed"
    cpu_us = (cpu_ns(pid) - before_ns) / 1e3
    rows = [
        once(
            "nothing due",
            {"storage_cpu_ms": max(idle_cpu_ns) / 1e6, "worst_s": max(idle_s), "passes": _PASSES},
        ),
        once(
            "one message per queue",
            {
                "queues": queues,
                "pass_s": elapsed,
                "messages_per_s": queues / elapsed,
                "storage_cpu_us_per_message": cpu_us / queues,
                "grown_mb": max(0, peak - before_bytes) / 1e6,
            },
        ),
    ]
    bench.tables.append(rows)
    nothing_ms = max(idle_cpu_ns) / 1e6
    bench.at_most("nothing due, storage CPU ms per pass", nothing_ms, NOTHING_DUE_CPU_MS_MAX)
    rate = queues / elapsed
    bench.at_least("one message per queue, deleted per second", rate, DELETED_PER_S_MIN)
    grown = max(0, peak - before_bytes) / 1e6
    bench.at_most("one message per queue, MB more of storage", grown, MEMORY_MB_MAX)
    return rate
