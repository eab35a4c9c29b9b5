"""The benchmark of gRPC itself: it runs and reports."""

from pathlib import Path

from tests.support.quick_bench import figures_of, run_quickly


def test_the_rpc_benchmark_runs_and_writes_its_report(tmp_path: Path) -> None:
    report = run_quickly("rpc", tmp_path)

    latency = {"p50_us", "p99_us", "client_cpu_us"}
    assert figures_of(report) == {
        "unary, 1 hop": latency | {"echo_cpu_us"},
        "unary, 2 hops": latency | {"echo_cpu_us", "forwarder_cpu_us"},
        "stream, 1 hop": latency | {"echo_cpu_us"},
        "stream, 2 hops": latency | {"echo_cpu_us", "forwarder_cpu_us"},
        "write and fdatasync": latency,
    }
