"""A shell command that prepares something for a service, such as installing what it needs.

Its output is handed on line by line as it comes. It ends with everything it started when the caller
is cancelled.
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
    """Run it to its end; raises SetupFailed."""
    # A session of its own: Ctrl-C in a terminal reaches only this process, which then ends it.
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
    except ValueError:  # longer than any reader wants
        return b"...\n"


async def _kill(process: Process) -> None:
    """The command, and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
