"""The benchmark of storage: it runs, against a real partition and a real process, and reports."""

import json
import subprocess
import sys
from pathlib import Path

REPORT_KEYS = {"name", "machine", "versions", "settings", "results", "bars"}
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


def test_the_storage_benchmark_runs_and_writes_its_report(tmp_path: Path) -> None:
    """Whether its bars hold says nothing on a machine that runs tests."""
    file = tmp_path / "storage.json"
    options = ["--quick", "--queues", "2000", "--no-bars"]

    finished = subprocess.run(
        [sys.executable, "-m", "bench", "storage", *options, "--json", file, "--dir", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )

    assert finished.returncode == 0, finished.stderr
    report = json.loads(file.read_text())
    assert set(report) == REPORT_KEYS
    assert report["settings"]["queues"] == 2000
    figures = {result["name"]: set(result["figures"]) for result in report["results"]}
    cells = [f"{run}, {queues}" for run in RUNS for queues in QUEUES]
    variants = ("Tidemark", "bare RocksDB", "bare fdatasync")
    assert figures == {
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
    assert [(bar["name"], bar["limit"]) for bar in report["bars"]] == [
        ("1,000 a run, 1 queue: appends / bare RocksDB", 0.5),
        ("1,000 a run, 100 queues: appends / bare RocksDB", 0.5),
        ("1,000 a run, 10,000 queues: appends / bare RocksDB", 0.5),
        ("load one of 2,000 / one of 1,000, p50", 1.3),
        ("one message to each of 2,000 queues, idle: per second", 10_000),
    ]
    assert list(tmp_path.iterdir()) == [file]  # nothing else is left behind
