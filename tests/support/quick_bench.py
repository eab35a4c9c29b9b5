"""The quick form of a benchmark, run as its users run it, and what is in its report."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

REPORT_KEYS = {"name", "machine", "versions", "settings", "results", "bars"}


def run_quickly(name: str, directory: Path, *options: str) -> dict[str, Any]:
    """The report of a quick run that leaves nothing else behind."""
    file = directory / "report.json"
    fixed = ["--quick", "--no-bars", "--json", str(file), "--dir", str(directory)]
    finished = subprocess.run(
        [sys.executable, "-m", "bench", name, *fixed, *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert list(directory.iterdir()) == [file]
    report: dict[str, Any] = json.loads(file.read_text())
    assert set(report) == REPORT_KEYS
    assert report["name"] == name
    return report


def figures_of(report: dict[str, Any]) -> dict[str, set[str]]:
    return {result["name"]: set(result["figures"]) for result in report["results"]}


def bars_of(report: dict[str, Any]) -> list[tuple[str, float]]:
    return [(bar["name"], bar["limit"]) for bar in report["bars"]]
