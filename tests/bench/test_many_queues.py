"""The benchmark of many queues: it runs against real clusters and a real Valkey, and reports.

Whether its bars hold says nothing on a machine that runs tests. That every message arrives and is
acknowledged, the benchmark waits for itself.
"""

from itertools import product
from pathlib import Path

from tests.support.quick_bench import bars_of, figures_of, run_quickly

CHECKOUT = Path(__file__).parents[2]


def test_the_benchmark_of_many_queues_runs_and_reports(tmp_path: Path) -> None:
    report = run_quickly("many-queues", tmp_path, "--against", str(CHECKOUT))

    queues = ("1", "8", "64", "1,000")
    checkouts = ("tidemark", "against")
    common = {"cycles_per_s", "cpu_us", "client_cpu_us"}
    services = {"broker_cpu_us", "storage_cpu_us", "commits", "frames"}
    assert figures_of(report) == {
        **{
            f"{checkout}, partitions: {partitions}, queues: {count}": common | services
            for checkout, partitions, count in product(checkouts, (1, 4, 16, 64), queues)
        },
        **{f"valkey, queues: {count}": common | {"valkey_cpu_us"} for count in queues},
    }
    assert report["settings"]["against"] == str(CHECKOUT)
    assert bars_of(report) == [
        ("64 queues: tidemark / valkey", 0.5),
        ("64 queues: CPU with 64 partitions / with 1", 1.25),
        ("64 queues: CPU / that of the other checkout", 0.5),
        ("1,000 queues: tidemark / valkey", 0.6),
    ]


def test_the_benchmark_of_a_million_queues_runs_and_reports(tmp_path: Path) -> None:
    report = run_quickly("many-queues-million", tmp_path)

    used = {"cpu_us", "client_cpu_us", "broker_cpu_us", "storage_cpu_us"}
    steps = {"publishers_s", "subscribe_s", "cycles_s", "unsubscribe_s"}
    assert figures_of(report) == {"10,000 queues": {"queues_per_s", "a_million_s", *used, *steps}}
