"""Ctrl-C: the first lets a command release its messages; one a second later ends it at once.

asyncio's own handling lets a second signal interrupt the clean-up with a traceback, and some
senders, such as `timeout`, deliver every signal twice.
"""

import asyncio
import os
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final

from tidemark.clock import SystemClock

_PATIENCE_MS: Final = 1000


def run(work: Coroutine[Any, Any, None], exit_code: int) -> None:
    """Run to the end; on Ctrl-C, clean up and raise KeyboardInterrupt."""
    clock = SystemClock()
    interrupted_ms: int | None = None

    async def supervise() -> None:
        task = asyncio.ensure_future(work)

        def interrupt() -> None:
            nonlocal interrupted_ms
            if interrupted_ms is None:
                interrupted_ms = clock.monotonic_ms()
                task.cancel()
            elif clock.monotonic_ms() - interrupted_ms > _PATIENCE_MS:
                os._exit(exit_code)

        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupt)
        await task

    try:
        asyncio.run(supervise())
    except asyncio.CancelledError:
        if interrupted_ms is None:
            raise
    if interrupted_ms is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process is exiting
        raise KeyboardInterrupt


@contextmanager
def immediate() -> Iterator[None]:
    """During a prompt, Ctrl-C raises KeyboardInterrupt at once."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
