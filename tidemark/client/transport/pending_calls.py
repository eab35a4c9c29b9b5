"""Waiting for answers: who asked for what, by the number of the question.

It sends nothing and has no timeout: an answer comes, or everybody is told why none will.
"""

import asyncio
from typing import Generic, TypeVar

from tidemark.errors import TidemarkError

T = TypeVar("T")


class Waiting(Generic[T]):
    """Those who wait for an answer, by the number of what they asked."""

    def __init__(self) -> None:
        self._futures: dict[int, asyncio.Future[T]] = {}

    def expect(self, request_id: int) -> "asyncio.Future[T]":
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._futures[request_id] = future
        return future

    def answer(self, request_id: int, result: T) -> bool:
        """Whether somebody waited for it."""
        future = self._futures.pop(request_id, None)
        if future is not None and not future.done():
            future.set_result(result)
        return future is not None

    def fail(self, error: TidemarkError) -> None:
        futures, self._futures = self._futures, {}
        for future in futures.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # looked at: whoever asked may be gone
