"""The benchmark `stalls` runs and reports what it measures."""

from pathlib import Path

from tests.support.quick_bench import figures_of, run_quickly


def test_the_stalls_of_each_step_are_reported_with_their_bars(tmp_path: Path) -> None:
    """P2: the longest turn of the event loop, and the longest wait of another queue."""
    report = run_quickly("stalls", tmp_path)

    figures = figures_of(report)
    bars = {bar["name"] for bar in report["bars"]}
    assert all({"us_per_run", "turn_ms", "wait_ms"} <= each for each in figures.values())
    assert "purge, all waiting: longest wait, ms" in bars
