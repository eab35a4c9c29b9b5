"""The two-million test: a million queues used once, then idle; then a second, different million.

A storage process, driven over its exchanges: each queue gets a message, which a group reserves and
acknowledges; then all queues are unloaded. The second million must leave next to nothing behind in
unshared memory. Then idle queues get one message each, which measures how fast cold queues load.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Final

from bench.harness.benchmark import Bench, Result
from bench.harness.bodies import random_body
from bench.harness.figures import Figure
from bench.harness.storage_link import PARTITIONS, TOPIC, Storage, running_storage
from tidemark.api.broker.v1.topic_pb2 import EVICTION_OUTCOME_EVICTED
from tidemark.api.storage.v1.exchange_pb2 import (
    SETTLE_ACTION_ACK,
    Append,
    Operation,
    Reserve,
    SettleReservation,
    Unmaterialize,
)

GROWTH_BYTES_MAX: Final = 64
"""Unshared memory that a queue of the second million may leave behind."""

COLD_PER_S_MIN: Final = 10_000
"""Cold queues per second that get one message each, per storage process."""

_FRAME_QUEUES = 4000  # over all partitions
_FRAMES_IN_FLIGHT = 4
_GROUP = "group"
_MB = 1e6

Step = Callable[[Sequence[str]], Awaitable[None]]


async def measure_millions(bench: Bench) -> None:
    queues = bench.many_queues
    cold = min(queues, bench.size(full=20_000, quick=2000))
    bench.settings |= {"queues": queues, "partitions": PARTITIONS, "cold_queues_per_round": cold}
    directory = bench.directory / "millions"
    directory.mkdir()
    async with running_storage(directory) as storage:
        driver = Driver(storage, random_body(bench.random, 1), bench.random)
        waves = [await driver.use_once(wave, queues) for wave in ("first", "second")]
        bench.tables.append(waves)

        async def wake() -> dict[str, float]:
            return await driver.wake("first", queues, cold)

        name = f"one message to each of {cold:,} queues"
        results = await bench.measure({name: wake})
    if not bench.quick:  # with few queues the caches are still growing
        growth = waves[-1]["left_bytes_per_queue"].median
        bench.at_most(f"second {queues:,} queues: bytes left by each", growth, GROWTH_BYTES_MAX)
    bench.at_least(f"{name}, idle: per second", results[name]["idle_per_s"].median, COLD_PER_S_MIN)


class Driver:
    """Uses queues of a storage process, many at a time."""

    def __init__(self, storage: Storage, body: bytes, random: Random) -> None:
        self._storage = storage
        self._body = body
        self._random = random

    async def use_once(self, wave: str, queues: int) -> Result:
        """Publish to, consume from and unload every queue of a wave."""
        before_bytes = await self._storage.settled_bytes()
        names = [_name(wave, number) for number in range(queues)]
        append_s = await _over(names, self._append)
        consume_s = await _over(names, self._consume)
        peak_bytes = self._storage.unshared_bytes()
        unload_s = await _over(names, self._unload)
        after_bytes = await self._storage.settled_bytes()
        figures = {
            "appends_per_s": queues / append_s,
            "consumed_per_s": queues / consume_s,
            "unloaded_per_s": queues / unload_s,
            "before_mb": before_bytes / _MB,
            "peak_mb": peak_bytes / _MB,
            "after_mb": after_bytes / _MB,
            "peak_bytes_per_queue": (peak_bytes - before_bytes) / queues,
            "left_bytes_per_queue": (after_bytes - before_bytes) / queues,
        }
        return Result(
            f"{wave} {queues:,} queues", {name: Figure((each,)) for name, each in figures.items()}
        )

    async def wake(self, wave: str, queues: int, count: int) -> dict[str, float]:
        """One message to each of some idle queues, and again while they are loaded."""
        names = [_name(wave, number) for number in self._random.sample(range(queues), count)]
        idle_s = await _over(names, self._append)
        loaded_s = await _over(names, self._append)
        await _over(names, self._unload)
        return {"idle_per_s": count / idle_s, "loaded_per_s": count / loaded_s}

    async def _append(self, names: Sequence[str]) -> None:
        await self._storage.ask(
            names,
            lambda place: Operation(append=Append(lmq_name=names[place], count=1, body=self._body)),
        )

    async def _consume(self, names: Sequence[str]) -> None:
        reserved = await self._storage.ask(
            names,
            lambda place: Operation(
                reserve=Reserve(lmq_name=names[place], group=_GROUP, max_messages=1)
            ),
        )
        receipts = [result.reserve.slices[0].receipt for result in reserved]
        await self._storage.ask(
            names,
            lambda place: Operation(
                settle=SettleReservation(receipt=receipts[place], action=SETTLE_ACTION_ACK)
            ),
        )

    async def _unload(self, names: Sequence[str]) -> None:
        results = await self._storage.ask(
            names, lambda place: Operation(unmaterialize=Unmaterialize(lmq_name=names[place]))
        )
        assert {result.unmaterialize.outcome for result in results} == {EVICTION_OUTCOME_EVICTED}


async def _over(names: Sequence[str], step: Step) -> float:
    """Run one step for all queues, a few frames at a time; returns the seconds."""
    starts = iter(range(0, len(names), _FRAME_QUEUES))

    async def walk() -> None:
        for start in starts:  # shared by all tasks
            await step(names[start : start + _FRAME_QUEUES])

    begin_ns = time.perf_counter_ns()
    await asyncio.gather(*(walk() for _ in range(_FRAMES_IN_FLIGHT)))
    return (time.perf_counter_ns() - begin_ns) / 1e9


def _name(wave: str, number: int) -> str:
    return f"{TOPIC}/{wave}-{number:07}"
