"""An environment of a Spark user: PySpark, `pyspark-tidemark` and what the two require, no more.

The package is built and installed as users do it. Its requirements are linked from the environment
of the tests, so that nothing is downloaded; what they do not name is not there.
"""

import asyncio
import re
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path
from typing import Final

from tests.support.repository import ROOT

PACKAGE: Final = "pyspark-tidemark"
_NAMESPACES: Final = ("google",)
"""Directories that several distributions share."""


class ReaderEnvironment:
    """A virtual environment in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.python = directory / "bin" / "python"

    @property
    def _packages(self) -> Path:
        (found,) = self._directory.glob("lib/python*/site-packages")
        return found

    async def create(self) -> None:
        await _run("-m", "venv", "--without-pip", str(self._directory))
        source = self._directory / "source"  # a build leaves files beside its source
        shutil.copytree(ROOT / "pyspark_tidemark", source, ignore=_is_built)
        await _run(
            *("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"),
            "--no-index",
            *("--disable-pip-version-check", "--no-compile"),
            *("--target", str(self._packages), str(source)),
        )
        shutil.rmtree(source)
        for each in _with_requirements({"pyspark", *self.requirements()}):
            self._link(each)

    def requirements(self) -> set[str]:
        """The names of the distributions that the installed package requires."""
        return set(_required(self._installed()))

    def modules(self) -> set[str]:
        """The top-level modules of the installed package."""
        files = self._installed().files or ()
        return {file.parts[0] for file in files if not file.parts[0].endswith(".dist-info")}

    def _installed(self) -> Distribution:
        (found,) = distributions(name=PACKAGE, path=[str(self._packages)])
        return found

    def _link(self, required: Distribution) -> None:
        linked = set()
        for file in required.files or ():
            depth = 2 if file.parts[0] in _NAMESPACES else 1
            if file.parts[0] != "..":
                linked.add(Path(*file.parts[:depth]))
        for each in linked:
            link = self._packages / each
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(str(required.locate_file(each)))


def _is_built(_: str, names: list[str]) -> list[str]:
    return [name for name in names if name in ("__pycache__", "build") or "egg-info" in name]


def _with_requirements(names: set[str]) -> list[Distribution]:
    """Installed distributions, with all that they require in turn."""
    found: dict[str, Distribution] = {}
    waiting = sorted(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = distribution(name)
            waiting += _required(found[name])
    return list(found.values())


def _required(of: Distribution) -> Iterator[str]:
    """The names of requirements, without those of extras."""
    for requirement in of.requires or ():
        name = re.match(r"[\w.-]+", requirement)
        if name is not None and "extra ==" not in requirement:
            yield name[0]


async def _run(*arguments: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    shown, _ = await process.communicate()
    assert process.returncode == 0, shown.decode()
