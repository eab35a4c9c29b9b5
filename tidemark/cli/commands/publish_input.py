"""What is to be published: arguments, lines of files and of stdin, whole files, cut into runs.

Lines are taken as they arrive: what one read brings goes into one run, so that a slow pipe is
published line by line and a fast one in large runs, without a timer. Nothing is sent here.
"""

import asyncio
import os
import sys
import threading
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

STDIN: Final = Path("-")

_RUN_MESSAGES_MAX: Final = 1000
_RUN_BYTES_MAX: Final = 1024 * 1024
_READ_BYTES: Final = 256 * 1024


def runs_of(payloads: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Payloads in their order, as many to a run as one call carries well."""
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
    """The lines of a file or of stdin, without their ends: all that each read completes."""
    rest = b""
    async for chunk in _chunks(source):
        *lines, rest = (rest + chunk).split(b"\n")
        if lines:
            yield [line.removesuffix(b"\r") for line in lines]
    if rest:
        yield [rest]


async def whole(source: Path) -> bytes:
    """Everything in a file or in stdin."""
    return b"".join([chunk async for chunk in _chunks(source)])


def total_bytes(sources: Sequence[Path]) -> int | None:
    """How much there is to read; None if that is not known before."""
    if STDIN in sources or not all(source.is_file() for source in sources):
        return None
    return sum(source.stat().st_size for source in sources)


async def _chunks(source: Path) -> AsyncGenerator[bytes]:
    """Reads in a thread, at most one chunk ahead.

    A daemon thread: a read from a terminal that never returns must not keep the process alive.
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
        except RuntimeError:  # the loop is closed: nobody wants it any more
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
