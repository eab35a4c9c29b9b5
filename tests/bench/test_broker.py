"""The benchmarks of the broker: they run against real clusters and report.

Whether their bars hold says nothing on a machine that runs tests.
"""

from pathlib import Path

from tests.support.quick_bench import bars_of, figures_of, run_quickly

SERVICES = ("storage", "broker", "lifecycle")


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
