"""The benchmark of tracing: it runs against real clusters and reports.

Whether its bars hold says nothing on a machine that runs tests.
"""

from pathlib import Path

from tests.support.quick_bench import bars_of, figures_of, run_quickly


def test_the_benchmark_of_tracing_runs_and_reports(tmp_path: Path) -> None:
    """S4."""
    report = run_quickly("tracing", tmp_path)

    variants = ("with tracing", "services alone")
    figures = frozenset({"messages_per_s", "cpu_us_per_message"})
    assert figures_of(report) == dict.fromkeys(("without tracing", *variants), figures)
    assert report["settings"]["spans"] > 0
    assert bars_of(report) == [
        (f"{variant} / without tracing: {figure}", limit)
        for variant in variants
        for figure, limit in (("messages_per_s", 0.95), ("cpu_us_per_message", 1.05))
    ]
