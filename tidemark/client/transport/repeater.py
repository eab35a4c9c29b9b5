"""Retries of calls that are safe to repeat.

A call fails at once if a retry cannot help, and with its last error once its time is up. Callers
decide which calls are safe to repeat; this module never does.
"""

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import TypeVar

from tidemark.client.transport.backoff import Backoff, is_transient
from tidemark.clock import Clock, SystemClock
from tidemark.errors import ClientClosed, TidemarkError

T = TypeVar("T")


class Repeater:
    """How long calls are retried, and the waits between two tries."""

    __slots__ = ("_clock", "_random", "_timeout_ms", "_while_unreachable")

    def __init__(
        self,
        timeout_ms: int | None,
        *,
        while_unreachable: bool,
        clock: Clock | None = None,
        random: Random | None = None,
    ) -> None:
        """Without a timeout, a call is made once. `while_unreachable` also retries when no server
        answers; otherwise a call is retried only if a server answered that it cannot serve it
        now."""
        self._timeout_ms = timeout_ms
        self._while_unreachable = while_unreachable
        self._clock = clock or SystemClock()
        self._random = random or Random()

    async def once(self, attempt: Callable[[int | None], Awaitable[T]]) -> T:
        """Make a call once; `attempt` gets the milliseconds it may take."""
        return await _made(attempt(self._timeout_ms))

    async def repeat(
        self, attempt: Callable[[int | None], Awaitable[T]], *, extra_ms: int = 0
    ) -> T:
        """Make a call until it succeeds; each try gets the milliseconds that are left.

        `extra_ms` is the time that the call itself waits, such as the wait of a pull.
        """
        if self._timeout_ms is None:
            return await _made(attempt(None))
        backoff = Backoff(self._random)
        deadline_ms = self._clock.monotonic_ms() + self._timeout_ms + extra_ms
        while True:
            try:
                return await _made(attempt(max(1, deadline_ms - self._clock.monotonic_ms())))
            except TidemarkError as error:
                wait_ms = backoff.next_ms(error.retry_after_ms or 0)
                if not self._helps(error) or self._clock.monotonic_ms() + wait_ms >= deadline_ms:
                    raise
            await self._clock.sleep_ms(wait_ms)

    def _helps(self, error: TidemarkError) -> bool:
        return is_transient(error) and (self._while_unreachable or error.answered)


async def _made(call: Awaitable[T]) -> T:
    """The result of a call. If its channel is closed meanwhile, it raises ClientClosed, instead of
    the CancelledError of gRPC, which would look as if the caller had been cancelled."""
    try:
        return await call
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # the caller itself was cancelled
        raise ClientClosed("the client was closed during the call") from None
