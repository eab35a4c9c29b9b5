"""The benchmark of retention: it runs, against a real storage and PostgreSQL, and reports."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.postgres import find_postgres, running_postgres


def test_the_retention_benchmark_runs_and_writes_its_report(tmp_path: Path) -> None:
    """Whether its bars hold says nothing on a machine that runs tests."""
    file = tmp_path / "retention.json"
    options = ["--quick", "--queues", "20", "--no-bars"]

    finished = subprocess.run(
        [sys.executable, "-m", "bench", "retention", *options, "--json", file, "--dir", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )

    assert finished.returncode == 0, finished.stderr
    report = json.loads(file.read_text())
    assert report["settings"]["due_per_pass"] == 2000
    assert report["settings"]["postgres"]
    names = {result["name"] for result in report["results"]}
    assert names >= {
        "quiet pass",
        "pass beside publishing",
        "warm pass, one batch due",
        "publishing beside plan",
        "publishing beside apply",
    }
    limits = {bar["name"]: bar["limit"] for bar in report["bars"]}
    assert limits["publish p99, beside apply / beside plan"] == 2
    assert limits["worst publish beside apply, ms"] == 50
    assert list(tmp_path.iterdir()) == [file]  # nothing else is left behind


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
