"""The input of `tidemark publish`: arguments, lines of files or stdin, and whole files, as runs.

Lines that one read returns form one run, so a slow pipe is published line by line and a fast one in
large runs, without a timer. This module sends nothing.
"""

import asyncio
import os
import sys
import threading
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from tidemark import limits
from tidemark.errors import MessageTooLarge

STDIN: Final = Path("-")

_RUN_MESSAGES_MAX: Final = 1000
_RUN_BYTES_MAX: Final = 1024 * 1024
_READ_BYTES: Final = 256 * 1024


def runs_of(payloads: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Payloads in order, in runs of a size that suits one call."""
    run: list[bytes] = []
    run_bytes = 0
    for payload in payloads:
        if run and (len(run) == _RUN_MESSAGES_MAX or run_bytes + len(payload) > _RUN_BYTES_MAX):
            yield run
            run, run_bytes = [], 0
        run.append(payload)
        run_bytes += len(payload)
    if run:
        yield run


async def lines_of(source: Path) -> AsyncGenerator[list[bytes]]:
    """The lines of a file or of stdin without their ends; each item holds those of one read."""
    rest = b""
    async for chunk in _chunks(source):
        *lines, rest = (rest + chunk).split(b"\n")
        _check_size(len(rest) - 1)  # it may end with a carriage return
        if lines:
            yield [line.removesuffix(b"\r") for line in lines]
    if rest:
        yield [rest]


async def whole(source: Path) -> bytes:
    """The contents of a file or of stdin."""
    contents = bytearray()
    async for chunk in _chunks(source):
        contents += chunk
        _check_size(len(contents))
    return bytes(contents)


def total_bytes(sources: Sequence[Path]) -> int | None:
    """The total size of the sources; None if it is not known beforehand."""
    if STDIN in sources or not all(source.is_file() for source in sources):
        return None
    return sum(source.stat().st_size for source in sources)


def _check_size(size: int) -> None:
    """Refuse a message before it is complete: its input may be endless."""
    if size > limits.MESSAGE_BYTES_MAX:
        raise MessageTooLarge(f"a payload has at most {limits.MESSAGE_BYTES_MAX} bytes")


async def _chunks(source: Path) -> AsyncGenerator[bytes]:
    """Read in a thread, at most one chunk ahead.

    It is a daemon thread, because a read from a terminal may never return.
    """
    loop = asyncio.get_running_loop()
    descriptor = (
        sys.stdin.fileno() if source == STDIN else os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    )
    chunks: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    wanted = threading.Semaphore(2)
    over = False

    def read() -> None:
        try:
            while wanted.acquire() and not over:
                chunk: bytes | OSError
                try:
                    chunk = os.read(descriptor, _READ_BYTES)
                except OSError as error:
                    chunk = error
                loop.call_soon_threadsafe(chunks.put_nowait, chunk)
                if not chunk or isinstance(chunk, OSError):
                    return
        except RuntimeError:  # the loop is closed
            pass
        finally:
            if source != STDIN:
                os.close(descriptor)

    threading.Thread(target=read, daemon=True).start()
    try:
        while chunk := await chunks.get():
            if isinstance(chunk, OSError):
                raise chunk
            yield chunk
            wanted.release()
    finally:
        over = True
        wanted.release()
