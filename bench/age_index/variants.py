"""Publishing with the index of ages, without it, and without it again: turns, ratios, the report.

The index costs a percent or two, and whatever disturbs a frame (another process on the same core,
a collection of garbage) adds several times that; CPU time never is less than it should be. So
frames are small and many, variants take turns, and the lower quartile of a round is its figure: the
CPU time of an undisturbed frame. The second variant without the index is the control: its ratio
shows the difference that the measurement can distinguish from none.
"""

import gc
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final
from unittest.mock import patch

from bench.harness.benchmark import Bench, Result
from bench.harness.figures import Figure, percentile
from storage_svc.partition.age_journal import AgeJournal
from storage_svc.queue.record import QueueRecord

INDEXED, PLAIN, CONTROL = VARIANTS = ("indexed", "plain-1", "plain-2")
"""Names of the same length, for topics: they are a part of all keys."""

FRAME: Final = 100
"""Messages of one turn, each to a separate queue."""

_WARM_TURNS: Final = 5
_LOWER_PERCENT: Final = 25
_DESCRIBED: Final = {
    INDEXED: "with the index",
    PLAIN: "without",
    CONTROL: "without, again",
}

PublishFrame = Callable[[str], Awaitable[float]]
"""Publishes a frame under a variant. The CPU time in microseconds per message."""


async def compare(
    bench: Bench, shape: str, publish: PublishFrame, *, rounds: int, turns: int
) -> Figure:
    """Publish frames of one shape under all variants, and report them. The ratio of each round."""
    bench.progress(f"the index of ages: {shape}, {rounds} rounds")
    taken: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    with _without_collections():
        await _take_turns(publish, _WARM_TURNS)
        for _ in range(rounds):
            figures = await _take_turns(publish, turns)
            for variant, values in figures.items():
                taken[variant].append(percentile(values, _LOWER_PERCENT))
    figures_of = {variant: Figure(tuple(values)) for variant, values in taken.items()}
    ratio = figures_of[INDEXED].over(figures_of[PLAIN])
    control = figures_of[CONTROL].over(figures_of[PLAIN])
    bench.tables.append(
        [
            Result(f"{shape}, {_DESCRIBED[variant]}", {"cpu_us_per_message": figure})
            for variant, figure in figures_of.items()
        ]
    )
    bench.tables.append(
        [
            Result(f"{shape}, with / without the index", {"ratio": ratio}),
            Result(f"{shape}, without / without: control", {"ratio": control}),
        ]
    )
    return ratio


async def _take_turns(publish: PublishFrame, turns: int) -> dict[str, list[float]]:
    """The figure of every frame by variant. The order of a turn rotates."""
    taken: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    order = VARIANTS
    for _ in range(turns):
        for variant in order:
            taken[variant].append(await publish(variant))
        order = order[1:] + order[:1]
    return taken


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


def without_index() -> AbstractContextManager[object]:
    """Commits of this process write nothing to the index, and compare no bounds."""
    return patch.object(AgeJournal, "follow", _follow_nothing)


def _follow_nothing(_ages: AgeJournal, _records: Iterable[QueueRecord]) -> None:
    pass
