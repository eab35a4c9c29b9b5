"""The benchmark of retention: it runs, against a real storage and PostgreSQL, and reports."""

from pathlib import Path

import pytest

from bench.harness.postgres import find_postgres, running_postgres
from tests.support.quick_bench import bars_of, figures_of, run_quickly


def test_the_retention_benchmark_runs_and_writes_its_report(tmp_path: Path) -> None:
    """Whether its bars hold says nothing on a machine that runs tests."""
    report = run_quickly("retention", tmp_path, "--queues", "20")

    assert report["settings"]["due_per_pass"] == 2000
    assert report["settings"]["postgres"]
    assert figures_of(report).keys() >= {
        "quiet pass",
        "pass beside publishing",
        "warm pass, one batch due",
        "publishing beside plan",
        "publishing beside apply",
        "nothing due",
        "one message per queue",
    }
    limits = dict(bars_of(report))
    assert limits["publish p99, beside apply / beside plan"] == 2
    assert limits["worst publish beside apply, ms"] == 50


@pytest.mark.skipif(find_postgres() is None, reason="no PostgreSQL on this machine")
def test_a_postgres_of_its_own_answers_and_is_gone_afterwards() -> None:
    programs = find_postgres()
    assert programs is not None

    with running_postgres(programs) as postgres:
        answer = postgres.run("select 6 * 7")
        directory = Path(postgres.run("show data_directory"))
        with pytest.raises(RuntimeError, match="nonsense"):
            postgres.run("select nonsense")

    assert answer == "42"
    assert not directory.exists()


def test_the_benchmark_of_the_cost_of_passes_runs_and_writes_its_report(tmp_path: Path) -> None:
    """P3: a bar for each way in which a pass has little to do, and for what publishing pays."""
    report = run_quickly("retention-cost", tmp_path, "--queues", "200")

    assert dict(bars_of(report)) == {
        "nothing due, storage CPU ms per pass": 50,
        "empty cluster, CPU s per pass": 1,
        "many topics, median s more": 2,
        "first message, publishers opened: with / without the index": 1.03,
        "first message, bare frames: with / without the index": 1.03,
        "another message: with / without the index": 1.03,
    }
    assert figures_of(report).keys() >= {
        "another message, without / without: control",
        "in storage, first message, with / without the index",
    }
