"""Pending calls of a session: requests without a result yet, by request id.

Sends nothing and has no timeout: a result arrives, or the session ends and all of them fail.
"""

import asyncio
from functools import partial
from typing import Generic, TypeVar

from tidemark.errors import TidemarkError
from tidemark.rpc.callbacks import Done, complete, pass_on

T = TypeVar("T")


class PendingCalls(Generic[T]):
    """Calls of one kind that wait for their result."""

    def __init__(self) -> None:
        self._calls: dict[int, Done[T]] = {}

    def expect(self, request_id: int) -> "asyncio.Future[T]":
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.call_back(request_id, partial(complete, future))
        return future

    def call_back(self, request_id: int, done: Done[T]) -> None:
        """Call `done` with the result, or with the reason why there is none."""
        self._calls[request_id] = done

    def answer(self, request_id: int, result: T) -> bool:
        """Complete a call; returns whether one was pending under this id."""
        done = self._calls.pop(request_id, None)
        if done is None:
            return False
        pass_on(done, result)
        return True

    def fail(self, error: TidemarkError) -> None:
        calls, self._calls = self._calls, {}
        for done in calls.values():
            pass_on(done, error)
