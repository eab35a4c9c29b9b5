"""Benchmark `cycle`: publish, deliver and acknowledge with the SDK, beside Redis Streams.

Both sides sync to disk before each response, and both run in the same alternating rounds: frames of
different sizes over one and eight connections, then many tasks that each await single publishes.
`latency` measures one publish at a time.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import product
from typing import Final

from bench.cycle.latency import measure_latency
from bench.cycle.sides import CONNECTIONS, Side, redis_side, tidemark_side
from bench.harness.benchmark import Bench, Result, Round, benchmark

MESSAGE_BYTES: Final = (100, 1000)
FRAMES: Final[Mapping[int, int]] = {1: 640, 10: 640, 100: 320, 1000: 64}
"""Frames per round, by messages per frame."""

BARS: Final[Mapping[int, float]] = {100: 5, 1000: 15}
"""Required speed relative to Redis Streams, by messages per frame."""

TASKS: Final = 256
_PUBLISHES_PER_TASK = 10


@benchmark("cycle", "the two below, one after the other")
async def cycle(bench: Bench) -> None:
    await measure_throughput(bench)
    await measure_latency(bench)


@benchmark("cycle-throughput", "publish, deliver, ack in frames of many sizes, and 256 tasks")
async def throughput(bench: Bench) -> None:
    await measure_throughput(bench)


@benchmark("cycle-latency", "one publish at a time, beside its round trips and its sync")
async def latency(bench: Bench) -> None:
    await measure_latency(bench)


async def measure_throughput(bench: Bench) -> None:
    lanes = bench.size(full=64, quick=8)
    bench.settings |= {"frames_in_flight": lanes, "tasks": TASKS}
    async with AsyncExitStack() as opened:
        sides: dict[str, Side] = {
            "tidemark": await opened.enter_async_context(
                tidemark_side(bench.directory / "tidemark", lanes)
            ),
            "redis": await opened.enter_async_context(redis_side(bench.directory / "redis", lanes)),
        }
        for size, connections in product(MESSAGE_BYTES, CONNECTIONS):
            await _measure_frames(bench, sides, size, connections)
        await _measure_tasks(bench, sides)


async def _measure_frames(
    bench: Bench, sides: Mapping[str, Side], size: int, connections: int
) -> None:
    rounds: dict[str, Round] = {}
    for count, full in FRAMES.items():
        frames = bench.size(full=full, quick=8)
        for name, side in sides.items():
            cycles = _cycles(side, connections, [bytes(size)] * count, frames)
            rounds[_cell(name, count, size, connections)] = cycles
    results = await bench.measure(rounds)
    if size == min(MESSAGE_BYTES) and connections == min(CONNECTIONS):
        for count, times in BARS.items():
            ours, theirs = (results[_cell(name, count, size, connections)] for name in sides)
            _hold(bench, f"{count:,} a frame", ours, theirs, times)


def _cell(name: str, count: int, size: int, connections: int) -> str:
    return f"{name}: {count:,} a frame, {size:,} B, connections: {connections}"


def _hold(bench: Bench, what: str, ours: Result, theirs: Result, times: float) -> None:
    faster = ours["messages_per_s"].over(theirs["messages_per_s"])
    bench.at_least(f"{what}: tidemark / redis", faster.median, times)


def _cycles(side: Side, connections: int, frame: Sequence[bytes], frames: int) -> Round:
    async def measure() -> dict[str, float]:
        begin = time.perf_counter()
        await side.cycle(connections, frame, frames)
        return {"messages_per_s": frames * len(frame) / (time.perf_counter() - begin)}

    return measure


async def _measure_tasks(bench: Bench, sides: Mapping[str, Side]) -> None:
    each = bench.size(full=_PUBLISHES_PER_TASK, quick=1)
    rounds = {
        f"{name}: {TASKS} tasks, single publishes": _singles(side, each)
        for name, side in sides.items()
    }
    ours, theirs = (await bench.measure(rounds)).values()
    _hold(bench, f"{TASKS} tasks", ours, theirs, times=1)


def _singles(side: Side, each: int) -> Round:
    payload = bytes(min(MESSAGE_BYTES))

    async def publish() -> None:
        for _ in range(each):
            await side.publish(payload)

    async def measure() -> dict[str, float]:
        begin = time.perf_counter()
        await asyncio.gather(*(publish() for _ in range(TASKS)))
        return {"messages_per_s": TASKS * each / (time.perf_counter() - begin)}

    return measure
