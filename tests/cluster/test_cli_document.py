"""Every command that docs/CLI.md shows, typed in a shell against a real cluster."""

import asyncio
import os
import re
import shlex
import signal
import sys
from asyncio.subprocess import PIPE
from dataclasses import dataclass
from pathlib import Path

from tests.support.cli_server import tidemark_command
from tests.support.repository import ROOT
from tidemark.local.cluster import LocalCluster

DOCUMENT = ROOT / "docs" / "CLI.md"
FOLLOWS = "--follow"
"""Such a command goes on until it is interrupted."""


@dataclass(frozen=True)
class Shown:
    """A command of the document, and the output that is shown below it, if any is."""

    command: str
    output: str | None = None


def shown_commands() -> list[Shown]:
    """Blocks marked as `text` show output alone."""
    found = []
    for block in re.findall(r"^```\n(.*?)^```", _without_output(), re.MULTILINE | re.DOTALL):
        if block.startswith("$ "):
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, _, output = part.partition("\n")
                found.append(Shown(command, output))
        else:
            lines = block.replace("\\\n", "").splitlines()
            found += [Shown(line) for line in lines if line]
    return found


def _without_output() -> str:
    return re.sub(r"^```text\n.*?^```\n", "", DOCUMENT.read_text(), flags=re.M | re.DOTALL)


async def type_command(command: str, variables: dict[str, str], directory: Path) -> tuple[int, str]:
    """Its exit code and all that it printed; interrupted once it has printed, if it goes on."""
    process = await asyncio.create_subprocess_exec(
        *("bash", "-o", "pipefail", "-c", command),
        cwd=directory,
        env=variables,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    first = b""
    try:
        if FOLLOWS in command:
            first = await process.stdout.readline()
            os.killpg(process.pid, signal.SIGINT)
        rest = await process.stdout.read()
        return await process.wait(), (first + rest).decode()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def test_every_command_of_the_document_works(cluster: LocalCluster, tmp_path: Path) -> None:
    """S6."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "tidemark").write_text(
        f"""#!/bin/sh
case "$*" in  # a command that is interrupted has to be a process of this shell
  *{FOLLOWS}*) exec {sys.executable} -m tidemark.cli.main "$@" ;;
  *) exec {shlex.join(tidemark_command())} "$@" ;;
esac
"""
    )
    (programs / "tidemark").chmod(0o755)
    for name in ("app.log", "export.txt", "picture.png"):  # the files that the commands publish
        (tmp_path / name).write_text("one\ntwo\n")
    inherited = os.environ  # noqa: TID251 - handed on, not read
    variables = {
        "PATH": f"{programs}:{inherited['PATH']}",
        "HOME": str(tmp_path),
        "TIDEMARK_ADDRESS": cluster.address("broker"),
        "TIDEMARK_STORAGE_ADDRESSES": cluster.storage_addresses,
        "TIDEMARK_LIFECYCLE_ADDRESS": cluster.address("lifecycle"),
    }

    ended = [
        (shown, *await type_command(shown.command, variables, tmp_path))
        for shown in shown_commands()
    ]

    assert len(ended) > 15
    for shown, code, output in ended:
        print(shown.command, code, output, sep="\n")  # shown if the test fails
    assert [
        shown.command
        for shown, code, output in ended
        if (shown.output is None and code != (130 if FOLLOWS in shown.command else 0))
        or (shown.output is not None and output != shown.output)
    ] == []
