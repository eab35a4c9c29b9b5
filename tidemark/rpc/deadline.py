"""The time that a call has left: the caller's deadline, or the server's default for unary calls.

Handlers use `remaining_ms(context)`, for example to end a long poll in time. gRPC enforces the
caller's deadline; this module enforces the default for calls without one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextvars import Context, ContextVar
from typing import Any, Final, TypeVar, cast

import grpc

from tidemark.clock import Clock
from tidemark.errors import DeadlineExceeded

UNARY_DEADLINE_MS_DEFAULT: Final = 60_000
"""Deadline of unary calls without one."""

T = TypeVar("T")


class _Limited:
    """A call under the default deadline."""

    __slots__ = ("at_ms", "clock", "expired", "task")

    def __init__(self, task: asyncio.Task[Any], clock: Clock, at_ms: int) -> None:
        self.task = task
        self.clock = clock
        self.at_ms = at_ms
        self.expired = False

    def remaining_ms(self) -> int:
        return max(self.at_ms - self.clock.monotonic_ms(), 0)

    def expire(self) -> None:
        self.expired = True
        self.task.cancel()


# Every call runs in its own task, hence in its own context.
_limited: ContextVar[_Limited | None] = ContextVar("tidemark_default_deadline", default=None)


def remaining_ms(context: grpc.aio.ServicerContext[Any, Any]) -> int | None:
    """Milliseconds until the deadline; None for a call without one, such as a stream."""
    remaining_s = _remaining_s(context)
    if remaining_s is not None:
        return int(remaining_s * 1000)
    call = _limited.get()
    return None if call is None else call.remaining_ms()


def has_deadline(context: grpc.aio.ServicerContext[Any, Any]) -> bool:
    """Whether the caller set a deadline."""
    return _remaining_s(context) is not None


class DefaultDeadline:
    """Ends calls that run for longer than `limit_ms`.

    All calls have the same limit, so they expire in the order in which they began, and a single
    watcher sleeps until the first of them is due. A timer per call would cost more than everything
    else around the call.
    """

    def __init__(self, clock: Clock, limit_ms: int) -> None:
        self._clock = clock
        self._limit_ms = limit_ms
        self._calls: dict[_Limited, None] = {}
        self._watcher: asyncio.Task[None] | None = None

    async def enforce(self, answer: Awaitable[T]) -> T:
        """The response of a handler; raises DeadlineExceeded."""
        task = asyncio.current_task()
        assert task is not None
        call = _Limited(task, self._clock, self._clock.monotonic_ms() + self._limit_ms)
        _limited.set(call)
        self._calls[call] = None
        if self._watcher is None:
            # In its own context, or it would keep the context of the first call alive.
            self._watcher = asyncio.create_task(self._watch(), context=Context())
        try:
            return await answer
        except asyncio.CancelledError:
            if not call.expired or task.uncancel() > 0:
                raise  # cancelled for another reason
            detail = f"not finished within the default of {self._limit_ms} ms"
            raise DeadlineExceeded(detail) from None
        finally:
            self._calls.pop(call, None)

    def close(self) -> None:
        """Stop the watcher; running calls are no longer limited."""
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None

    async def _watch(self) -> None:
        while self._calls:
            first = next(iter(self._calls))
            if remaining_ms := first.remaining_ms():
                await self._clock.sleep_ms(remaining_ms)
            else:
                del self._calls[first]
                first.expire()
        self._watcher = None


def _remaining_s(context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
    return cast("float | None", context.time_remaining())  # None without a deadline
