"""The frame of every benchmark: rounds that alternate between variants, figures, bars, the report.

A benchmark is an async function that gets a `Bench`; it measures variants side by side and holds
ratios against bars. The frame writes the report as JSON and as tables; it knows no benchmark.
"""

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

from bench.figures import Figure
from bench.machine import machine_facts, versions

ROUNDS: Final = 5
ROUNDS_QUICK: Final = 2

Round = Callable[[], Awaitable[Mapping[str, float]]]
"""Measures one variant once: figures by name, units last (`p50_us`, `messages_per_s`)."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one variant came to."""

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
    """What something came to that happens only once in a run."""
    return Result(name, {figure: Figure((value,)) for figure, value in figures.items()})


@dataclass(frozen=True, slots=True)
class Bar:
    """A value that must stay on the right side of a limit."""

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
    """An empty directory on a real disk, gone after the run."""
    quick: bool = False
    seed: int = 1
    queues: int | None = None
    """How many queues `many_queues` are, where somebody has said so."""
    settings: dict[str, object] = field(default_factory=dict)
    """What the benchmark was run with; it adds its own sizes and counts."""
    tables: list[list[Result]] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    machine: dict[str, object] = field(init=False)
    random: Random = field(init=False)
    rounds: int = field(init=False)

    def __post_init__(self) -> None:
        self.machine = machine_facts(self.directory)  # now: the run itself is load
        self.random = Random(self.seed)
        self.rounds = ROUNDS_QUICK if self.quick else ROUNDS
        self.settings = {
            "quick": self.quick,
            "seed": self.seed,
            "rounds": self.rounds,
            **self.settings,
        }

    def size(self, full: int, quick: int) -> int:
        """A count that depends on how much time there is."""
        return quick if self.quick else full

    @property
    def many_queues(self) -> int:
        """For what must not depend on the number of queues."""
        return self.queues or self.size(full=1_000_000, quick=10_000)

    async def measure(self, variants: Mapping[str, Round]) -> dict[str, Result]:
        """Measure all variants in turns (A B C, A B C, ...), after one turn that does not count.

        What disturbs the machine for a while then disturbs all of them alike.
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
        """Everything about the run, ready for JSON."""
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


def write_json(bench: Bench, file: Path) -> None:
    file.write_text(json.dumps(bench.report(), indent=2) + "\n")


Run = Callable[[Bench], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Benchmark:
    name: str
    summary: str
    run: Run


BENCHMARKS: Final[dict[str, Benchmark]] = {}
"""Filled by `benchmark` as the modules of benchmarks are imported."""


def benchmark(name: str, summary: str) -> Callable[[Run], Run]:
    """Register the decorated function under a name; the summary is one line."""

    def register(run: Run) -> Run:
        assert name not in BENCHMARKS, f"two benchmarks are called {name}"
        BENCHMARKS[name] = Benchmark(name, summary, run)
        return run

    return register
