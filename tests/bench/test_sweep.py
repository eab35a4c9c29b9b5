"""The benchmark of sweeps: it runs against real clusters and reports (L1, L7).

Whether its bars hold says nothing on a machine that runs tests, but for the one that does not
depend on how busy it is: no scheduled message is early. That none is lost and none comes twice,
the benchmark checks itself.
"""

from pathlib import Path

from tests.support.quick_bench import bars_of, figures_of, run_quickly

WELL = "all partitions well"
FAILS = "reads of one partition fail"
STALLS = "reads of one partition take 10 s"


def test_the_benchmark_of_sweeps_runs_and_reports(tmp_path: Path) -> None:
    """L1, L5, L7."""
    report = run_quickly("sweep", tmp_path)

    cost = {"sweep_us", "storage_cpu_us", "broker_cpu_us", "sweeper_cpu_us"}
    late = {"earliest_ms", "late_p50_ms", "late_p99_ms", "latest_ms"}
    cpu = {f"{name}_cpu_us" for name in ("storage", "broker", "lifecycle", "client")}
    cells = [(stored, due) for stored in (1000, 2000, 10_000) for due in (0, 100, 1000)]
    assert figures_of(report) == {
        **{f"{stored:,} stored, {due:,} due": cost for stored, due in cells},
        "2,000 scheduled over 3 s": {"publish_s", *late, *cpu},
        **dict.fromkeys((WELL, FAILS, STALLS), late),
    }
    early = "scheduled: earliest arrival after its time, ms"
    assert bars_of(report) == [
        ("nothing due: 10,000 stored / 1,000, sweep_us", 2),
        ("nothing due: 10,000 stored / 1,000, storage_cpu_us", 2),
        ("scheduled: lateness p99, ms", 200),
        (early, 0),
        (f"{FAILS} / {WELL}: lateness p50", 1.1),
        (f"{STALLS} / {WELL}: lateness p50", 1.1),
    ]
    (never_early,) = [bar for bar in report["bars"] if bar["name"] == early]
    assert never_early["holds"]
