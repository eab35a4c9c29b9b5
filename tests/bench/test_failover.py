"""The benchmark of failovers: it runs against real processes and a real registry, and reports."""

from pathlib import Path

from tests.support.quick_bench import bars_of, figures_of, run_quickly


def test_the_benchmark_of_failovers_runs_and_reports(tmp_path: Path) -> None:
    """S8, S9: how long publishes wait for another broker, storage node or server of the store."""
    report = run_quickly("failover", tmp_path)

    assert figures_of(report) == {
        "broker, SIGTERM": {"longest_ms"},
        "broker, kill -9": {"longest_ms"},
        "broker, SIGSTOP": {"longest_ms"},
        "a broker leaves and joins": {
            "own",
            "moved_by_leave",
            "moved_by_join",
            "loads_differ_by",
        },
        "registry gone": {"published", "refused", "longest_ms"},
        "storage, kill -9": {"longest_ms"},
        "Valkey master, kill -9": {"longest_ms"},
    }
    assert bars_of(report) == [
        ("broker, SIGTERM: p99 ms", 500),
        ("broker, kill -9: p99 ms", 4_000),
        ("broker, SIGSTOP: p99 ms", 6_000),
        ("leave: moves beyond its own partitions", 0),
        ("join: moves", 6),
        ("loads differ by", 1),
        ("registry gone: refused publishes", 0),
        ("storage, kill -9: p99 ms", 7_000),
        ("Valkey master, kill -9: p99 ms", 8_000),
    ]
