"""The benchmark of the whole cycle: it runs against a real cluster and a real Valkey, and reports.

Whether its bars hold says nothing on a machine that runs tests. That every message arrives and is
acknowledged, the benchmark waits for itself.
"""

from itertools import product
from pathlib import Path

from tests.support.quick_bench import bars_of, figures_of, run_quickly


def test_the_benchmark_of_the_cycle_runs_and_reports(tmp_path: Path) -> None:
    report = run_quickly("cycle", tmp_path)

    sides = ("tidemark", "redis")
    cells = product(sides, ("1", "10", "100", "1,000"), ("100", "1,000"), (1, 8))
    calls = ("publish", "stream", "unary", "sync")
    assert figures_of(report) == {
        **{
            f"{side}: {count} a frame, {size} B, connections: {connections}": {"messages_per_s"}
            for side, count, size, connections in cells
        },
        **{f"{side}: 256 tasks, single publishes": {"messages_per_s"} for side in sides},
        "one publish at a time, beside two round trips and one sync": {
            *(f"{call}_p50_us" for call in calls),
            *(f"{call}_p99_us" for call in calls),
            "over_floor",
        },
    }
    assert bars_of(report) == [
        ("100 a frame: tidemark / redis", 5),
        ("1,000 a frame: tidemark / redis", 15),
        ("256 tasks: tidemark / redis", 1),
        ("publish / (two stream round trips + sync), p50", 1.5),
    ]
