"""Runs a shell command that prepares a service, such as an installation.

Its output is passed on line by line. If the caller is cancelled, the command and all processes that
it started are killed.
"""

import asyncio
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Callable
from contextlib import suppress


class SetupFailed(Exception):
    """The command ended with an error. The text is part of a line, for operators."""


async def run_setup(command: str, show: Callable[[str], None]) -> None:
    """Run the command to its end; raises SetupFailed."""
    # Its own session: Ctrl-C in a terminal reaches only this process, which then kills it.
    process = await asyncio.create_subprocess_shell(
        command, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, start_new_session=True
    )
    try:
        while line := await _line(process):
            show(line.decode("utf-8", "replace").rstrip())
        exit_code = await process.wait()
    finally:
        if process.returncode is None:
            await _kill(process)
    if exit_code:
        raise SetupFailed(f"`{command}` ended with exit code {exit_code}")


async def _line(process: Process) -> bytes:
    assert process.stdout is not None
    try:
        return await process.stdout.readline()
    except ValueError:  # the line is too long
        return b"...\n"


async def _kill(process: Process) -> None:
    """Kill the command and all processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
