"""The harness of the benchmarks: its arithmetic, its order of measuring, its report."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Coroutine
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from bench.__main__ import main
from bench.harness.benchmark import BENCHMARKS, Bench, Benchmark, json_report
from bench.harness.figures import Figure, percentile
from bench.harness.machine import file_system
from bench.harness.tables import number
from bench.harness.usage import cpu_ns, trim, unshared_bytes
from tidemark.service.memory import TRIM_SIGNAL, install_memory_trim

REPORT_KEYS = {"name", "machine", "versions", "settings", "results", "bars"}


def counting(measured: list[str], name: str) -> Callable[[], Coroutine[Any, Any, dict[str, float]]]:
    """A round whose figure is how many rounds there were before it."""

    async def measure() -> dict[str, float]:
        measured.append(name)
        return {"turn": float(len(measured))}

    return measure


def test_the_median_and_its_spread_ignore_one_disturbed_round() -> None:
    figure = Figure((10.0, 12.0, 11.0, 900.0, 13.0))

    assert figure.median == 12.0
    assert figure.spread == 1.0


def test_a_ratio_is_taken_round_by_round() -> None:
    """A slow round that slows both sides leaves the ratio as it is."""
    mine, theirs = Figure((2.0, 20.0, 4.0)), Figure((1.0, 10.0, 4.0))

    assert mine.over(theirs).rounds == (2.0, 2.0, 1.0)


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 1), (1, 1), (50, 50), (99, 99), (99.5, 100), (100, 100)]
)
def test_a_percentile_is_one_of_the_values(percent: float, expected: int) -> None:
    shuffled = [*range(51, 101), *range(1, 51)]

    assert percentile(shuffled, percent) == expected


async def test_variants_take_turns_and_the_first_turn_does_not_count(tmp_path: Path) -> None:
    measured: list[str] = []
    bench = Bench(name="turns", directory=tmp_path)

    results = await bench.measure({name: counting(measured, name) for name in "ABC"})

    assert "".join(measured) == "ABC" * 6
    assert results["B"]["turn"].rounds == (5.0, 8.0, 11.0, 14.0, 17.0)


async def test_a_quick_run_has_fewer_rounds_and_smaller_sizes(tmp_path: Path) -> None:
    measured: list[str] = []
    bench = Bench(name="quick", directory=tmp_path, quick=True)

    await bench.measure({"A": counting(measured, "A")})

    assert len(measured) == 3
    assert bench.size(full=1000, quick=10) == 10


def test_the_seed_decides_what_is_drawn(tmp_path: Path) -> None:
    one, same, other = (Bench(name="seed", directory=tmp_path, seed=seed) for seed in (7, 7, 8))

    draws = [bench.random.random() for bench in (one, same, other)]

    assert draws[0] == draws[1] != draws[2]


def test_a_bar_holds_up_to_its_limit(tmp_path: Path) -> None:
    bench = Bench(name="bars", directory=tmp_path)

    bench.at_least("fast enough", 5.0, 5.0)
    bench.at_least("not fast enough", 4.9, 5.0)
    bench.at_most("small enough", 1.3, 1.3)
    bench.at_most("too large", 1.31, 1.3)
    bench.at_most("not measured", float("nan"), 1.3)

    assert [bar.holds for bar in bench.bars] == [True, False, True, False, False]


async def test_the_report_has_the_agreed_shape(tmp_path: Path) -> None:
    bench = Bench(name="shape", directory=tmp_path, settings={"bytes": 100})
    await bench.measure({"A": counting([], "A")})
    bench.at_most("small enough", 1.0, 2.0)

    report = json.loads(json_report(bench))

    assert set(report) == REPORT_KEYS
    assert report["settings"] == {"quick": False, "seed": 1, "rounds": 5, "bytes": 100}
    assert report["results"] == [
        {
            "name": "A",
            "figures": {"turn": {"median": 4.0, "spread": 1.0, "rounds": [2, 3, 4, 5, 6]}},
        }
    ]
    assert report["bars"] == [{"name": "small enough", "value": 1.0, "limit": 2.0, "holds": True}]
    assert report["versions"]["python"].startswith("3.")
    assert report["machine"]["cores"] >= 1


@pytest.mark.parametrize(
    ("options", "exit_code"), [([], 1), (["--no-bars"], 0)], ids=["with bars", "without"]
)
def test_a_bar_that_does_not_hold_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    exit_code: int,
) -> None:
    async def slow(bench: Bench) -> None:
        bench.at_least("fast enough", 1.0, 5.0)

    monkeypatch.setitem(BENCHMARKS, "slow", Benchmark("slow", "Never fast enough.", slow))

    assert main(["slow", "--quick", *options]) == exit_code

    assert "NO" in capsys.readouterr().out


def test_the_list_names_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0

    assert "rpc " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0"), (0.01234, "0.0123"), (9.876, "9.88"), (99.5, "99.5"), (123456.7, "123,457")],
)
def test_numbers_are_shown_with_the_digits_that_count(value: float, shown: str) -> None:
    assert number(value) == shown


def test_the_file_system_is_that_of_the_deepest_mount() -> None:
    assert file_system(Path("/proc/self")) == "proc"


def test_processor_time_of_a_process_can_be_read_from_outside() -> None:
    before = time.process_time_ns()

    seen = cpu_ns(os.getpid())

    assert before <= seen <= time.process_time_ns()


def test_unshared_memory_grows_by_what_is_written_to() -> None:
    """In a process that does nothing else: that of the tests may free memory meanwhile."""
    size = 64_000_000
    program = f"print(flush=True); input(); written = b'x' * {size}; print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=PIPE, stdout=PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        before = unshared_bytes(process.pid)

        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()

        assert unshared_bytes(process.pid) - before > 0.9 * size
        process.kill()


def test_a_trim_on_request_frees_what_is_unreachable() -> None:
    class Node:
        itself: object

    node = Node()
    node.itself = node
    alive = weakref.ref(node)
    before = signal.getsignal(TRIM_SIGNAL)
    gc.disable()
    try:
        del node
        install_memory_trim()
        assert alive() is not None

        signal.raise_signal(TRIM_SIGNAL)

        assert alive() is None
    finally:
        gc.enable()
        signal.signal(TRIM_SIGNAL, before)


async def test_a_process_that_the_signal_would_kill_is_not_sent_it() -> None:
    with pytest.raises(RuntimeError, match="no handler for SIGUSR1"):
        await trim(os.getpid(), "127.0.0.1:1")
