"""Pending calls of a session: requests without a result yet, by request id.

Sends nothing and has no timeout: a result arrives, or the session ends and all of them fail.
"""

import asyncio
from typing import Generic, TypeVar

from tidemark.errors import TidemarkError

T = TypeVar("T")


class PendingCalls(Generic[T]):
    """Calls of one kind that wait for their result."""

    def __init__(self) -> None:
        self._futures: dict[int, asyncio.Future[T]] = {}

    def expect(self, request_id: int) -> "asyncio.Future[T]":
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._futures[request_id] = future
        return future

    def answer(self, request_id: int, result: T) -> bool:
        """Complete a call; returns whether one was pending under this id."""
        future = self._futures.pop(request_id, None)
        if future is not None and not future.done():
            future.set_result(result)
        return future is not None

    def fail(self, error: TidemarkError) -> None:
        futures, self._futures = self._futures, {}
        for future in futures.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks it as retrieved: the caller may be gone
