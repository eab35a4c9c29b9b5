"""Benchmark `many-queues`: one message to each of many queues, beside Valkey Streams.

A round sends one message to each queue over one client connection, delivers and acknowledges it.
Clusters with different numbers of partitions and Valkey take turns. `--against PATH` adds clusters
that run the code of another checkout.
"""

from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Final

from bench.harness.benchmark import Bench, Result, benchmark
from bench.many_queues.sides import TOTAL, Side, tidemark_side, valkey_side

ROUNDS: Final[Mapping[int, int]] = {1: 64, 8: 48, 64: 24, 1000: 4}
"""Rounds per measurement, by the number of queues."""

PARTITIONS: Final = (1, 4, 16, 64)
PARTITIONS_DEFAULT: Final = 4

OVER_VALKEY_MIN: Final[Mapping[int, float]] = {64: 0.5, 1000: 0.6}
"""Required speed relative to Valkey Streams, by the number of queues."""

PARTITIONS_COST_MAX: Final = 1.25
OVER_BEFORE_MAX: Final = 0.5

_VALKEY = "valkey"
_QUEUES = 64
"""The number of queues for which the CPU time has bars."""


@benchmark("many-queues", "one message to each of many queues, over 1 to 64 partitions")
async def many_queues(bench: Bench) -> None:
    bench.settings |= {"rounds_per_measurement": _rounds(bench)}
    if bench.against is not None:
        bench.settings["against"] = str(bench.against)
    async with AsyncExitStack() as opened:
        sides = await _open_sides(bench, opened)
        for queues, rounds in _rounds(bench).items():
            for side in sides.values():
                await side.prepare(queues)
            results = await bench.measure(
                {
                    _cell(name, queues): partial(side.measure, queues, rounds)
                    for name, side in sides.items()
                }
            )
            _hold(bench, queues, {name: results[_cell(name, queues)] for name in sides})


def _rounds(bench: Bench) -> dict[int, int]:
    return {queues: bench.size(full=full, quick=full // 4) for queues, full in ROUNDS.items()}


async def _open_sides(bench: Bench, opened: AsyncExitStack) -> dict[str, Side]:
    sides: dict[str, Side] = {}
    for partitions in PARTITIONS:
        for name, checkout in ((_ours(partitions), None), (_before(partitions), bench.against)):
            if name == _before(partitions) and checkout is None:
                continue
            directory = bench.directory / name.replace(" ", "-")
            sides[name] = await opened.enter_async_context(
                tidemark_side(directory, partitions, checkout)
            )
    sides[_VALKEY] = await opened.enter_async_context(valkey_side(bench.directory / _VALKEY))
    return sides


def _ours(partitions: int) -> str:
    return f"tidemark {partitions}"


def _before(partitions: int) -> str:
    return f"against {partitions}"


def _cell(side: str, queues: int) -> str:
    name, _, partitions = side.partition(" ")
    system = f"{name}, partitions: {partitions}" if partitions else name
    return f"{system}, queues: {queues:,}"


def _hold(bench: Bench, queues: int, results: Mapping[str, Result]) -> None:
    ours = results[_ours(PARTITIONS_DEFAULT)]
    if queues in OVER_VALKEY_MIN:
        speed = ours["cycles_per_s"].over(results[_VALKEY]["cycles_per_s"])
        limit = OVER_VALKEY_MIN[queues]
        bench.at_least(f"{queues:,} queues: tidemark / valkey", speed.median, limit)
    if queues != _QUEUES:
        return
    fewest, most = (results[_ours(each)] for each in (min(PARTITIONS), max(PARTITIONS)))
    growth = most[TOTAL].over(fewest[TOTAL]).median
    bench.at_most(
        f"{queues} queues: CPU with {max(PARTITIONS)} partitions / with {min(PARTITIONS)}",
        growth,
        PARTITIONS_COST_MAX,
    )
    before = results.get(_before(PARTITIONS_DEFAULT))
    if before is not None:
        share = ours[TOTAL].over(before[TOTAL]).median
        bench.at_most(f"{queues} queues: CPU / that of the other checkout", share, OVER_BEFORE_MAX)
