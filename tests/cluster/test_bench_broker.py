"""The benchmarks of the broker: they run against real clusters and report.

Whether their bars hold says nothing on a machine that runs tests.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

REPORT_KEYS = {"name", "machine", "versions", "settings", "results", "bars"}
SERVICES = ("storage", "broker", "lifecycle")


def run_quickly(name: str, directory: Path) -> dict[str, Any]:
    """The report of a quick run that leaves nothing else behind."""
    file = directory / "report.json"
    options = ["--quick", "--no-bars", "--json", str(file), "--dir", str(directory)]
    finished = subprocess.run(
        [sys.executable, "-m", "bench", name, *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert list(directory.iterdir()) == [file]
    report: dict[str, Any] = json.loads(file.read_text())
    assert set(report) == REPORT_KEYS
    assert report["name"] == name
    return report


def figures_of(report: dict[str, Any]) -> dict[str, set[str]]:
    return {result["name"]: set(result["figures"]) for result in report["results"]}


def bars_of(report: dict[str, Any]) -> list[tuple[str, float]]:
    return [(bar["name"], bar["limit"]) for bar in report["bars"]]


def test_the_benchmark_of_idle_queues_runs_and_reports(tmp_path: Path) -> None:
    report = run_quickly("idle-queues", tmp_path)

    sets = ("first 10,000 queues", "second 10,000 queues")
    memory = {"before_mb", "peak_mb", "after_mb", "left_bytes_per_queue"}
    assert report["settings"]["queues"] == 10_000
    assert figures_of(report) == {
        "1,000 queues, beside 10,000": {"us_per_cycle", "cpu_us_per_cycle"},
        "10,000 queues": {"us_per_cycle", "cpu_us_per_cycle"},
        **{name: {"cycles_per_s", "unloaded_after_s"} for name in sets},
        **{f"{name}: {service}": memory for name in sets for service in SERVICES},
        "first message to a queue, one at a time": {
            "cold_p50_us",
            "cold_p99_us",
            "warm_p50_us",
            "warm_p99_us",
        },
        "one message to each of many queues": {"cold_per_s", "warm_per_s"},
    }
    assert bars_of(report) == [
        ("10,000 queues / 1,000: cpu_us_per_cycle", 1.3),
        ("10,000 queues / 1,000: us_per_cycle", 1.3),
        ("cold / warm publish, p99", 10),
    ]


def test_the_benchmark_of_expiry_runs_and_reports(tmp_path: Path) -> None:
    report = run_quickly("expiry", tmp_path)

    traffic = {"traffic_messages_per_s", "traffic_cpu_us_per_message"}
    quiet = {"quiet_cpu_ms_per_s", "quiet_commits_per_s"}
    assert figures_of(report) == {
        "nothing is open": traffic | quiet,
        "5,000 open, none due": traffic | quiet,
        "5,000 open, some expire": traffic,
        "redelivery": {
            "messages",
            "first_p50_ms",
            "first_p99_ms",
            "late_at_least_p50_ms",
            "late_at_least_p99_ms",
            "late_at_most_p50_ms",
            "late_at_most_p99_ms",
            "earliest_ms",
        },
    }
    assert bars_of(report) == [("redelivery: lateness p99, ms", 100)]


def test_the_benchmark_of_takeovers_runs_and_reports(tmp_path: Path) -> None:
    report = run_quickly("preempt", tmp_path)

    takeovers = {"takeovers_per_s", "cpu_us_per_takeover"}
    marker = {"bytes_per_marker", "left_bytes_per_marker"}
    assert figures_of(report) == {
        "take 100 queues at once": takeovers,
        "take one queue at a time": takeovers,
        "first delivery, old owner stalled": {"p50_ms", "p99_ms"},
        "a client with one marker": marker,
        "a marker of a client with many": marker,
    }
    assert report["bars"] == []
