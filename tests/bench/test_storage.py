"""The benchmark of storage: it runs, against a real partition and a real process, and reports."""

from pathlib import Path

from tests.support.quick_bench import bars_of, figures_of, run_quickly

RUNS = ("1 a run", "10 a run", "100 a run", "1,000 a run")
QUEUES = ("1 queue", "100 queues", "10,000 queues")
APPENDS = {"commits_per_s", "runs_per_commit", "messages_per_s", "mb_per_s", "cpu_us_per_run"}
MEMORY = {
    "before_mb",
    "peak_mb",
    "after_mb",
    "peak_bytes_per_queue",
    "left_bytes_per_queue",
    "appends_per_s",
    "consumed_per_s",
    "unloaded_per_s",
}


def test_the_storage_benchmark_runs_and_writes_its_report(tmp_path: Path) -> None:
    """Whether its bars hold says nothing on a machine that runs tests."""
    report = run_quickly("storage", tmp_path, "--queues", "2000")

    assert report["settings"]["queues"] == 2000
    cells = [f"{run}, {queues}" for run in RUNS for queues in QUEUES]
    variants = ("Tidemark", "bare RocksDB", "bare fdatasync")
    assert figures_of(report) == {
        **{f"{cell}: {variant}": APPENDS for cell in cells for variant in variants},
        **{cell: {"of_rocksdb", "of_fdatasync"} for cell in cells},
        "load one of 1,000 idle queues": {"mean_us", "p50_us", "p99_us"},
        "load one of 2,000 idle queues": {"mean_us", "p50_us", "p99_us"},
        "first 2,000 queues": MEMORY,
        "second 2,000 queues": MEMORY,
        "one message to each of 2,000 queues": {"idle_per_s", "loaded_per_s"},
    }
    medians = {
        (result["name"], name): figure["median"]
        for result in report["results"]
        for name, figure in result["figures"].items()
    }
    assert all(medians[f"{cell}: Tidemark", "messages_per_s"] > 0 for cell in cells)
    assert bars_of(report) == [
        ("1,000 a run, 1 queue: appends / bare RocksDB", 0.5),
        ("1,000 a run, 100 queues: appends / bare RocksDB", 0.5),
        ("1,000 a run, 10,000 queues: appends / bare RocksDB", 0.5),
        ("load one of 2,000 / one of 1,000, p50", 1.3),
        ("one message to each of 2,000 queues, idle: per second", 10_000),
    ]


def test_the_benchmark_of_the_redis_engine_runs_and_writes_its_report(tmp_path: Path) -> None:
    """S9."""
    report = run_quickly("storage-redis", tmp_path, "--queues", "200")

    cycles = {"messages_per_s", "cpu_us", "server_cpu_us"}
    assert figures_of(report) == {
        **dict.fromkeys(("rocksdb", "redis", "bare pipelines"), cycles),
        "200 queues": {
            "idle_queue_bytes",
            "ages_bytes",
            "cold_queues_per_s",
            "cold_cpu_us",
            "cold_server_cpu_us",
            "open_ms",
        },
    }
