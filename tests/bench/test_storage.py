"""The benchmark of storage: it runs, against a real partition and a real process, and reports."""

import json
import subprocess
import sys
from pathlib import Path

from tests.support.quick_bench import bars_of, figures_of, run_quickly

RUNS = ("1 a run", "10 a run", "100 a run", "1,000 a run")
QUEUES = ("1 queue", "100 queues", "10,000 queues")
APPENDS = {"commits_per_s", "runs_per_commit", "messages_per_s", "mb_per_s", "cpu_us_per_run"}
MEMORY = {
    "before_mb",
    "peak_mb",
    "after_mb",
    "peak_bytes_per_queue",
    "left_bytes_per_queue",
    "appends_per_s",
    "consumed_per_s",
    "unloaded_per_s",
}
PURGE = {"us_per_message", "turn_ms", "wait_ms", "wait_p99_ms", "appends_beside"}


def test_the_storage_benchmark_runs_and_writes_its_report(tmp_path: Path) -> None:
    """Whether its bars hold says nothing on a machine that runs tests."""
    report = run_quickly("storage", tmp_path, "--queues", "2000")

    assert report["settings"]["queues"] == 2000
    cells = [f"{run}, {queues}" for run in RUNS for queues in QUEUES]
    variants = ("Tidemark", "bare RocksDB", "bare fdatasync")
    assert figures_of(report) == {
        **{f"{cell}: {variant}": APPENDS for cell in cells for variant in variants},
        **{cell: {"of_rocksdb", "of_fdatasync"} for cell in cells},
        "load one of 1,000 idle queues": {"mean_us", "p50_us", "p99_us"},
        "load one of 2,000 idle queues": {"mean_us", "p50_us", "p99_us"},
        "first 2,000 queues": MEMORY,
        "second 2,000 queues": MEMORY,
        "one message to each of 2,000 queues": {"idle_per_s", "loaded_per_s"},
    }
    medians = {
        (result["name"], name): figure["median"]
        for result in report["results"]
        for name, figure in result["figures"].items()
    }
    assert all(medians[f"{cell}: Tidemark", "messages_per_s"] > 0 for cell in cells)
    assert bars_of(report) == [
        ("1,000 a run, 1 queue: appends / bare RocksDB", 0.5),
        ("1,000 a run, 100 queues: appends / bare RocksDB", 0.5),
        ("1,000 a run, 10,000 queues: appends / bare RocksDB", 0.5),
        ("load one of 2,000 / one of 1,000, p50", 1.3),
        ("one message to each of 2,000 queues, idle: per second", 10_000),
    ]


def test_the_benchmark_of_the_redis_engine_runs_and_writes_its_report(tmp_path: Path) -> None:
    """S9: `python -m bench storage --engine redis`, with its bars."""
    report = run_quickly("storage", tmp_path, "--engine", "redis", "--queues", "200")

    cycles = {"messages_per_s", "cpu_us", "server_cpu_us"}
    scripts = {"scripts", "cpu_ms", "median_ms", "p99_ms", "longest_ms"}
    figures = figures_of(report)
    blocking = {name for name in figures if name.endswith(" rows")}
    assert len(blocking) == 13
    assert figures == {
        **dict.fromkeys(("rocksdb", "redis", "bare pipelines"), cycles),
        **dict.fromkeys(blocking, scripts),
        "200 queues": {
            "idle_queue_bytes",
            "ages_bytes",
            "cold_queues_per_s",
            "cold_cpu_us",
            "cold_server_cpu_us",
        },
        "opening with 2,000 reservations": {"open_ms", "cpu_ms"},
        "purge of 2,000 messages": PURGE | {"script_cpu_ms", "script_p99_ms", "script_longest_ms"},
    }
    bars = dict(bars_of(report))
    assert bars["storage CPU per message, redis / rocksdb"] == 1.5
    assert bars["an idle queue, bytes without AGES"] == 350
    assert bars["cold queues/s"] == 5_000
    assert bars["opening with 2,000 reservations, ms"] == 1_000
    assert bars["purge of 2,000 messages: CPU of a script, ms"] == 5
    assert all(bars[f"{name}: CPU of a script, ms"] == 5 for name in blocking)


def test_purges_are_measured_on_rocksdb_as_well(tmp_path: Path) -> None:
    """S9: a purge holds up other queues for at most 5 ms at a time, on each engine."""
    report = run_quickly("storage-purge", tmp_path)

    assert figures_of(report) == {"purge of 2,000 messages": PURGE}
    assert bars_of(report) == [("purge of 2,000 messages: longest wait of another queue, ms", 5)]


def test_a_report_without_a_file_is_all_of_the_standard_output(tmp_path: Path) -> None:
    """S9: the tables go to the standard error, so that the report can be piped."""
    command = [sys.executable, "-m", "bench", "storage-opening", "--quick", "--no-bars"]
    finished = subprocess.run(
        [*command, "--dir", str(tmp_path), "--json"], capture_output=True, text=True, check=True
    )

    assert json.loads(finished.stdout)["name"] == "storage-opening"
