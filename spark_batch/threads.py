"""Blocking work in threads that do not delay the end of the process."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import TypeVar, cast

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Run blocking work in a thread that does not delay the end of the process.

    asyncio joins its own threads on exit, and starting Spark takes longer than a stop may take.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def set_outcome(value: T | None, error: Exception | None) -> None:
        if result.cancelled():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(cast("T", value))

    def run() -> None:
        value, failure = None, None
        try:
            value = work()
        except Exception as error:
            failure = error
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(set_outcome, value, failure)

    Thread(target=run, daemon=True).start()
    return await result
