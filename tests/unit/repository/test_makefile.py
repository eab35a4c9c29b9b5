"""What `make` would do on a machine with nothing installed."""

import os
import subprocess

from tests.support.repository import ROOT


def planned(*arguments: str) -> str:
    """The commands, printed and not run, as if nothing had been made before."""
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", *arguments],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"]},  # noqa: TID251 - not the flags of a make that runs tests
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout


def test_running_the_services_waits_for_no_spark() -> None:
    """S6, R11: `tidemark up` has it installed beside them, unless retention is off."""
    commands = planned("run", "ARGS=--no-retention").splitlines()

    assert not any("requirements/spark.txt" in line for line in commands)
    assert any("requirements/base.txt: what the services need, 80 MB" in line for line in commands)
    assert commands[-2:] == [
        "exec .venv/bin/tidemark up \\",
        "\t--retention-setup 'env -u MAKEFLAGS make --silent .venv/.spark' --no-retention",
    ]


def test_what_is_downloaded_is_named_with_its_size() -> None:
    """S6."""
    assert (
        "Installing requirements/spark.txt: PySpark and Java for retention, 520 MB to download"
        in planned(".venv/.spark")
    )
