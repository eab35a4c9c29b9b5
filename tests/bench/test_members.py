"""The benchmark of several members: it runs against real clusters, and reports."""

from pathlib import Path

from tests.support.quick_bench import bars_of, figures_of, run_quickly


def test_the_benchmark_of_members_runs_and_reports(tmp_path: Path) -> None:
    """S8: what several brokers and storage nodes cost."""
    report = run_quickly("members", tmp_path)

    figures = {"messages_per_s", "cpu_us", "storage_cpu_us", "broker_cpu_us", "lifecycle_cpu_us"}
    assert figures_of(report) == {"1 + 1": figures, "3 + 3": figures}
    assert bars_of(report) == [("CPU per message, 3 + 3 / 1 + 1", 1.25)]
