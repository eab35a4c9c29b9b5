"""Processes that tests find by their parents, and those that they wait for."""

import asyncio
from asyncio.subprocess import Process
from contextlib import suppress
from pathlib import Path

from tidemark.clock import SystemClock

POLL_MS = 50


async def until_listening(process: Process, port: int) -> None:
    """Return once something listens on a port of this machine, or the process has ended."""
    while process.returncode is None:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await SystemClock().sleep_ms(POLL_MS)
        else:
            writer.close()
            return


def child_of(parent: int, word: bytes) -> int | None:
    """The child of a process whose command line contains a word."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            found = int(stat.read_text().rpartition(")")[2].split()[1])
            if found == parent and word in (stat.parent / "cmdline").read_bytes():
                return int(stat.parent.name)
    return None
