"""A purge of very many messages, and how long it holds up another queue of its partition.

Each message is a separate run, which makes as many rows as possible. While the rows are erased,
single messages are appended to another queue. Waits and turns are CPU times of the event loop's
thread, and `script_cpu_ms` is the CPU time of the server per script. The other times of scripts are
wall times as the server logs them, so that other work on the machine counts.
"""

import asyncio
import time
from contextlib import suppress
from typing import Final

from bench.harness.benchmark import Bench, once
from bench.harness.bodies import random_body
from bench.harness.figures import percentile
from bench.harness.partition import TOPIC, ask, open_partition
from bench.harness.turns import Turns
from bench.harness.usage import cpu_ns
from bench.harness.valkey import Server, engines_of
from storage_svc.operations.publish import Append
from storage_svc.operations.queues import Purge
from storage_svc.partition.partition import Partition
from tidemark.errors import TidemarkError
from tidemark.service.memory import tune_garbage_collector

WAIT_MS_MAX: Final = 5.0
"""The longest that the purge holds up another queue, or the server, at a time."""

_QUEUE: Final = f"{TOPIC}/large"
_OTHER: Final = f"{TOPIC}/other"
_FRAME: Final = 500
_LOGGED_US: Final = 500
_LOOK_S: Final = 0.05
"""Between looks at the remaining rows: their CPU time counts as wait of the other queue."""


async def measure_purge(bench: Bench) -> None:
    messages = bench.size(full=1_000_000, quick=2_000)
    bench.settings |= {"engine": bench.engine, "purged_messages": messages}
    body = random_body(bench.random, 1)
    tune_garbage_collector()  # as a service does once it has started
    async with (
        engines_of(bench, "purge") as (engines, server),
        open_partition(bench.directory, engines) as partition,
    ):
        for _ in range(0, messages, _FRAME):
            await ask(partition, [Append(_QUEUE, 1, body)] * _FRAME)
        if server is None:
            figures = await _purge(partition, messages, body)
        else:
            await server.watch_scripts(_LOGGED_US)
            await server.redis.config_resetstat()
            before_ns = cpu_ns(server.pid)
            figures = await _purge(partition, messages, body)
            used_ns = cpu_ns(server.pid) - before_ns
            figures |= await _scripts(server, used_ns)
    name = f"purge of {messages:,} messages"
    if server is not None:
        bench.at_most(f"{name}: CPU of a script, ms", figures["script_cpu_ms"], WAIT_MS_MAX)
    bench.tables.append([once(name, figures)])
    bench.at_most(f"{name}: longest wait of another queue, ms", figures["wait_ms"], WAIT_MS_MAX)


async def _scripts(server: Server, used_ns: int) -> dict[str, float]:
    scripts = (await server.redis.info("commandstats"))["cmdstat_evalsha"]["calls"]
    logged_ms = await server.script_times_ms()
    return {
        "script_cpu_ms": used_ns / 1e6 / scripts,
        "script_p99_ms": percentile(logged_ms or [0], 99),
        "script_longest_ms": max(logged_ms, default=0.0),
    }


async def _purge(partition: Partition, messages: int, body: bytes) -> dict[str, float]:
    waits_ns: list[int] = []
    turns = Turns()
    done = asyncio.Event()

    async def append() -> None:
        while not done.is_set():
            begin_ns = time.thread_time_ns()
            await ask(partition, [Append(_OTHER, 1, body)])
            waits_ns.append(time.thread_time_ns() - begin_ns)
            with suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), 0.001)

    with turns.watched():
        began_ns = time.thread_time_ns()
        appending = asyncio.create_task(append())
        (removed,) = await ask(partition, [Purge(_QUEUE)])
        assert removed.messages == messages, removed
        while partition.state.erasures:  # noqa: ASYNC110 - the partition erases by itself
            await asyncio.sleep(_LOOK_S)
        used_ns = time.thread_time_ns() - began_ns
    done.set()
    with suppress(TidemarkError):
        await appending
    return {
        "us_per_message": used_ns / 1000 / messages,
        "turn_ms": turns.longest_ns / 1e6,
        "wait_ms": max(waits_ns) / 1e6,
        "wait_p99_ms": percentile(waits_ns, 99) / 1e6,
        "appends_beside": len(waits_ns),
    }
