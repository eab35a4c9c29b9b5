"""What publishing pays for the index of ages: CPU time with it over CPU time without it.

The difference is a percent or two, and whatever disturbs a frame (another process on the same core,
a collection of garbage) adds several times its CPU time, which never is less than it should be. So
frames are small and many, variants take turns, and the lower quartile of a round is its figure: the
CPU time of the thread that applies, encodes and writes an undisturbed frame. A second partition
without the index is the control: its ratio shows what the measurement can tell apart.
"""

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final
from unittest.mock import patch

from bench import retention_single
from bench.harness.benchmark import Bench, Result
from bench.harness.bodies import random_body
from bench.harness.figures import Figure, percentile
from bench.harness.partition import ask, open_partition
from storage_svc.operations.publish import Append
from storage_svc.operations.topics import PutTopic
from storage_svc.partition.age_journal import AgeJournal
from storage_svc.partition.partition import Partition
from storage_svc.queue.record import QueueRecord
from tidemark.topics import Topic

INDEX_RATIO_MAX: Final = 1.03

_FRAME: Final = 100
_WARM_TURNS: Final = 5
_LOWER_PERCENT: Final = 25
_SAME_QUEUES: Final = 4 * _FRAME
_INDEXED, _PLAIN, _CONTROL = "with the index", "without", "without, again"


async def measure_index(bench: Bench) -> None:
    """Publish frames of first messages, and of further ones, to partitions with and without it."""
    rounds, turns = 2 * bench.rounds, bench.size(full=60, quick=10)
    bench.settings |= {"index_rounds": rounds, "index_turns": turns, "index_frame": _FRAME}
    body = random_body(bench.random, 1)
    number = itertools.count()

    def new_queues() -> list[str]:
        return [f"{retention_single.TOPIC}/{next(number)}" for _ in range(_FRAME)]

    def same_queues() -> list[str]:
        first = next(number) * _FRAME % _SAME_QUEUES
        return [f"{retention_single.TOPIC}/same-{first + at}" for at in range(_FRAME)]

    async with (
        open_partition(bench.directory / "indexed") as indexed,
        open_partition(bench.directory / "plain") as plain,
        open_partition(bench.directory / "control") as control,
    ):
        partitions = {_INDEXED: indexed, _PLAIN: plain, _CONTROL: control}
        for partition in partitions.values():
            topic = Topic(retention_single.TOPIC, retention_single.YOUNG)
            await ask(partition, [PutTopic(topic, create=True)])
        for shape, names in (("first message", new_queues), ("another message", same_queues)):
            bench.progress(f"the index of ages: {shape}, {rounds} rounds")
            taken: dict[str, list[float]] = {variant: [] for variant in partitions}
            with _without_collections():
                await _turns(partitions, names, body, _WARM_TURNS)
                for _ in range(rounds):
                    figures = await _turns(partitions, names, body, turns)
                    for variant, values in figures.items():
                        taken[variant].append(percentile(values, _LOWER_PERCENT))
            _report(bench, shape, {name: Figure(tuple(each)) for name, each in taken.items()})


async def _turns(
    partitions: dict[str, Partition], names: Callable[[], list[str]], body: bytes, turns: int
) -> dict[str, list[float]]:
    """CPU microseconds per message of every frame by variant. The order of a turn rotates."""
    taken: dict[str, list[float]] = {variant: [] for variant in partitions}
    order = list(partitions)
    for _ in range(turns):
        frame = [Append(name, 1, body) for name in names()]
        for variant in order:
            with nullcontext() if variant == _INDEXED else _without_index():
                before_ns = time.thread_time_ns()
                await ask(partitions[variant], frame)
                taken_ns = time.thread_time_ns() - before_ns
            taken[variant].append(taken_ns / 1e3 / _FRAME)
        order = order[1:] + order[:1]
    return taken


def _report(bench: Bench, shape: str, figures: dict[str, Figure]) -> None:
    ratio = figures[_INDEXED].over(figures[_PLAIN])
    control = figures[_CONTROL].over(figures[_PLAIN])
    rows = [
        Result(f"{shape}, {variant}", {"cpu_us_per_message": figure})
        for variant, figure in figures.items()
    ]
    bench.tables.append(rows)
    bench.tables.append(
        [
            Result(f"{shape}, with / without the index", {"ratio": ratio}),
            Result(f"{shape}, without / without: control", {"ratio": control}),
        ]
    )
    bench.at_most(f"{shape}: with / without the index", ratio.median, INDEX_RATIO_MAX)


@contextmanager
def _without_collections() -> Iterator[None]:
    """No garbage is collected meanwhile: it would be charged to the frame that it happens in."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _without_index() -> AbstractContextManager[object]:
    """Commits write nothing to the index, and compare no bounds."""
    return patch.object(AgeJournal, "follow", _follow_nothing)


def _follow_nothing(_ages: AgeJournal, _record: QueueRecord) -> None:
    pass
