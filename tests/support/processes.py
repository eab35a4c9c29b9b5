"""Processes that tests find by their parents."""

from contextlib import suppress
from pathlib import Path


def child_of(parent: int, word: bytes) -> int | None:
    """The child of a process whose command line contains a word."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            found = int(stat.read_text().rpartition(")")[2].split()[1])
            if found == parent and word in (stat.parent / "cmdline").read_bytes():
                return int(stat.parent.name)
    return None
