"""What `make` would do on a machine with nothing installed."""

import os
import subprocess

from tests.support.repository import ROOT


def make(*arguments: str, **variables: str) -> str:
    """What it prints."""
    done = subprocess.run(
        ["make", *arguments],
        cwd=ROOT,
        # Not the flags of a make that runs tests.
        env={"PATH": os.environ["PATH"], **variables},  # noqa: TID251 - handed on, not read
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout


def planned(*arguments: str) -> str:
    """The commands, printed and not run, as if nothing had been made before."""
    return make("--dry-run", "--always-make", *arguments)


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


def test_installing_spark_writes_its_class_archive() -> None:
    """P4: Java takes less processor time to start with it."""
    assert planned("spark").splitlines()[-1] == ".venv/bin/python -m spark_batch.class_archive"


def test_byte_code_is_kept_also_in_a_container_that_forbids_it() -> None:
    """S6: hundreds of processes would compile all that they import."""
    shown = make(
        "--eval", "shown: ; @env", "shown", PYTHONDONTWRITEBYTECODE="1", PYTHONUNBUFFERED="1"
    ).splitlines()

    assert "PYTHONUNBUFFERED=1" in shown
    assert not any(line.startswith("PYTHONDONTWRITEBYTECODE") for line in shown)
