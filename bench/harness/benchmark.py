"""The base of every benchmark: alternating rounds of variants, figures, bars and the report.

A benchmark is an async function that gets a `Bench`: it measures variants in alternation and
compares ratios with bars.
"""

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

from bench.harness.figures import Figure
from bench.harness.machine import machine_facts, versions

ROUNDS: Final = 5
ROUNDS_QUICK: Final = 2

Round = Callable[[], Awaitable[Mapping[str, float]]]
"""Measures one variant once: figures by name, units last (`p50_us`, `messages_per_s`)."""


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one variant."""

    name: str
    figures: Mapping[str, Figure]

    def __getitem__(self, figure: str) -> Figure:
        return self.figures[figure]

    def as_json(self) -> dict[str, object]:
        figures = {
            name: {"median": each.median, "spread": each.spread, "rounds": list(each.rounds)}
            for name, each in self.figures.items()
        }
        return {"name": self.name, "figures": figures}


def once(name: str, figures: Mapping[str, float]) -> Result:
    """The figures of something that happens only once per run."""
    return Result(name, {figure: Figure((value,)) for figure, value in figures.items()})


@dataclass(frozen=True, slots=True)
class Bar:
    """A value and the limit that it must keep."""

    name: str
    value: float
    limit: float
    at_least: bool

    @property
    def holds(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def as_json(self) -> dict[str, object]:
        return {"name": self.name, "value": self.value, "limit": self.limit, "holds": self.holds}


@dataclass(slots=True, kw_only=True)
class Bench:
    """One run of one benchmark."""

    name: str
    directory: Path
    """An empty directory on a real disk, removed after the run."""
    quick: bool = False
    seed: int = 1
    queues: int | None = None
    """The number of queues for `many_queues`, if given."""
    engine: str = "rocksdb"
    """The engine for benchmarks that have several."""
    against: Path | None = None
    """Another checkout to compare with, if given."""
    progress: Callable[[str], None] = lambda _: None
    """Called with the next step of the run, to show it."""
    settings: dict[str, object] = field(default_factory=dict)
    """The settings of the run; the benchmark adds its sizes and counts."""
    tables: list[list[Result]] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    machine: dict[str, object] = field(init=False)
    random: Random = field(init=False)
    rounds: int = field(init=False)

    def __post_init__(self) -> None:
        self.machine = machine_facts(self.directory)  # now, before the run adds load
        self.random = Random(self.seed)
        self.rounds = ROUNDS_QUICK if self.quick else ROUNDS
        self.settings = {
            "quick": self.quick,
            "seed": self.seed,
            "rounds": self.rounds,
            **self.settings,
        }

    def size(self, full: int, quick: int) -> int:
        """A size for a full or a quick run."""
        return quick if self.quick else full

    @property
    def many_queues(self) -> int:
        """The number of queues for measurements with a cost that must not depend on it."""
        return self.queues or self.size(full=1_000_000, quick=10_000)

    async def measure(self, variants: Mapping[str, Round]) -> dict[str, Result]:
        """Measure all variants in turn (A B C, A B C, ...), after one warm-up turn.

        A disturbance of the machine then affects all of them alike.
        """
        for measure in variants.values():
            await measure()
        taken: dict[str, list[Mapping[str, float]]] = {name: [] for name in variants}
        for _ in range(self.rounds):
            for name, measure in variants.items():
                taken[name].append(await measure())
        results = {name: Result(name, _gather(rounds)) for name, rounds in taken.items()}
        self.tables.append(list(results.values()))
        return results

    def at_least(self, name: str, value: float, limit: float) -> None:
        self.bars.append(Bar(name, value, limit, at_least=True))

    def at_most(self, name: str, value: float, limit: float) -> None:
        self.bars.append(Bar(name, value, limit, at_least=False))

    def report(self) -> dict[str, object]:
        """The whole run, as JSON values."""
        return {
            "name": self.name,
            "machine": self.machine,
            "versions": dict(versions()),
            "settings": self.settings,
            "results": [result.as_json() for table in self.tables for result in table],
            "bars": [bar.as_json() for bar in self.bars],
        }


def _gather(rounds: list[Mapping[str, float]]) -> dict[str, Figure]:
    names = rounds[0]
    return {name: Figure(tuple(each[name] for each in rounds)) for name in names}


def json_report(bench: Bench) -> str:
    return json.dumps(bench.report(), indent=2)


Run = Callable[[Bench], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Benchmark:
    name: str
    summary: str
    run: Run


BENCHMARKS: Final[dict[str, Benchmark]] = {}
"""Filled by `benchmark` when benchmark modules are imported."""


def benchmark(name: str, summary: str) -> Callable[[Run], Run]:
    """Register the decorated function under a name; the summary is one line."""

    def register(run: Run) -> Run:
        assert name not in BENCHMARKS, f"two benchmarks are called {name}"
        BENCHMARKS[name] = Benchmark(name, summary, run)
        return run

    return register
