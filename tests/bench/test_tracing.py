"""The benchmark of tracing: it runs against real clusters and reports.

Whether its bars hold says nothing on a machine that runs tests.
"""

from pathlib import Path

from tests.bench.quick_bench import bars_of, figures_of, run_quickly


def test_the_benchmark_of_tracing_runs_and_reports(tmp_path: Path) -> None:
    """S4."""
    report = run_quickly("tracing", tmp_path)

    assert figures_of(report) == {
        "without tracing": {"messages_per_s", "cpu_us_per_message"},
        "with tracing": {"messages_per_s", "cpu_us_per_message"},
    }
    assert report["settings"]["spans"] > 0
    assert bars_of(report) == [
        ("traced / not: messages_per_s", 0.95),
        ("traced / not: cpu_us_per_message", 1.05),
    ]
