"""`python -m bench NAME [--quick] [--json [FILE]]`, or `--list`. Exits with 1 if a bar fails."""

import argparse
import asyncio
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Final

from rich.console import Console

from bench.harness.benchmark import BENCHMARKS, Bench, json_report
from bench.harness.machine import file_system
from bench.harness.tables import show

MODULES: Final = (
    "bench.rpc.benchmark",
    "bench.storage.benchmark",
    "bench.idle_queues",
    "bench.expiry",
    "bench.preempt",
    "bench.cycle.benchmark",
    "bench.many_queues.benchmark",
    "bench.many_queues.million",
    "bench.members",
    "bench.failover.benchmark",
    "bench.stalls",
    "bench.sweep.benchmark",
    "bench.retention",
    "bench.retention_cost",
    "bench.retention_idle",
    "bench.tracing.benchmark",
)
"""The modules that register benchmarks when imported."""

_STDOUT: Final = Path("-")


def main(arguments: list[str] | None = None) -> int:
    for module in MODULES:
        import_module(module)
    options = _parser().parse_args(arguments)
    to_stdout = options.json == _STDOUT  # the tables go elsewhere, so that it can be parsed
    width = None if sys.stdout.isatty() else 160
    console = Console(width=width, highlight=False, stderr=to_stdout)
    if options.list:
        for each in BENCHMARKS.values():
            console.print(f"{each.name:<16} {each.summary}")
        return 0
    with tempfile.TemporaryDirectory(prefix="tidemark-bench-", dir=options.dir) as directory:
        bench = Bench(
            name=options.name,
            directory=Path(directory),
            quick=options.quick,
            seed=options.seed,
            queues=options.queues,
            engine=options.engine,
            against=options.against,
            progress=_Progress(),
        )
        asyncio.run(_run(bench))
        show(bench, console)
        if to_stdout:
            print(json_report(bench))
        elif options.json is not None:
            options.json.write_text(json_report(bench) + "\n")
    failed = not all(bar.holds for bar in bench.bars)
    return 1 if failed and not options.no_bars else 0


class _Progress:
    """A line per step on standard error, with the seconds since the start."""

    def __init__(self) -> None:
        self._began_ns = time.perf_counter_ns()

    def __call__(self, step: str) -> None:
        elapsed_s = (time.perf_counter_ns() - self._began_ns) // 1_000_000_000
        print(f"{elapsed_s:>5} s  {step}", file=sys.stderr, flush=True)


async def _run(bench: Bench) -> None:
    await BENCHMARKS[bench.name].run(bench)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Runs one benchmark.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("name", nargs="?", choices=sorted(BENCHMARKS), help="the benchmark to run")
    what.add_argument("--list", action="store_true", help="list the benchmarks")
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer rounds")
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=_STDOUT,
        metavar="FILE",
        help="write the report to this file as well, or only to standard output",
    )
    parser.add_argument(
        "--engine",
        choices=("rocksdb", "redis"),
        default="rocksdb",
        help="storage: the engine to measure (%(default)s)",
    )
    parser.add_argument(
        "--no-bars", action="store_true", help="exit with 0 even if a bar does not hold"
    )
    parser.add_argument(
        "--queues", type=int, metavar="N", help="number of queues for benchmarks with many queues"
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="PATH",
        help="many-queues: also measure the services and the client of this checkout",
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of random choices")
    parser.add_argument(
        "--dir", type=Path, default=_disk(), help="directory for data (%(default)s)"
    )
    return parser


def _disk() -> Path:
    """The directory for temporary files, unless it is in memory, where a sync costs nothing."""
    temporary = Path(tempfile.gettempdir())
    return Path.cwd() if file_system(temporary) == "tmpfs" else temporary


if __name__ == "__main__":
    sys.exit(main())
