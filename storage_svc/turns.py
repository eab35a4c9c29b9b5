"""Turns of the event loop: long work is done in parts, with the work of others in between.

Reads of the embedded engine never suspend, so that nothing else runs in the process, in any
partition, until a coroutine gives way by itself.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextvars import Context
from typing import Any, TypeVar

from tidemark.clock import SystemClock

TURN_OPERATIONS_MAX = 64
"""Operations on messages that one turn applies, at some 10 to 40 microseconds each."""

TURN_RELEASED_MAX = 2_000
"""Entries of a dropped container that one turn frees."""

RELEASE_PAUSE_MS = 5
"""Between two such turns."""

_CLOCK = SystemClock()  # gives way also where a test moves time by hand

T = TypeVar("T")


class CommonTurns:
    """Work of many parts of the process that is done in common turns of the event loop: one call of
    the loop for all that asked, whatever their number."""

    __slots__ = ("_asked", "_context")

    def __init__(self) -> None:
        self._asked: list[Callable[[], None]] = []
        self._context = Context()  # of none of those that ask: it has no current span

    def ask(self, work: Callable[[], None]) -> None:
        """Do it in the next turn. It must not raise."""
        if not self._asked:
            asyncio.get_running_loop().call_soon(self._run, context=self._context)
        self._asked.append(work)

    def _run(self) -> None:
        asked, self._asked = self._asked, []
        for work in asked:
            work()


async def give_way() -> None:
    """Let everything else that is ready run first."""
    await _CLOCK.sleep_ms(0)


async def in_turns(
    items: Sequence[T], turn_items_max: int = TURN_OPERATIONS_MAX
) -> AsyncIterator[Sequence[T]]:
    """The items in parts, each in a turn of its own."""
    for start in range(0, len(items), turn_items_max):
        if start:
            await give_way()
        yield items[start : start + turn_items_max]


def release(containers: "Iterable[dict[Any, Any] | list[Any]]") -> None:
    """Free large containers that nothing uses any more, in turns of their own.

    To free a hundred thousand objects at once takes tens of milliseconds.
    """
    large = deque(each for each in containers if len(each) > TURN_RELEASED_MAX)
    if large:
        _release_later(large)


def _release_later(containers: "deque[dict[Any, Any] | list[Any]]") -> None:
    """After a pause: it is not urgent, and everything else is."""
    loop = asyncio.get_running_loop()
    loop.call_later(RELEASE_PAUSE_MS / 1000, _release_some, containers)


def _release_some(containers: "deque[dict[Any, Any] | list[Any]]") -> None:
    container = containers[0]
    if isinstance(container, dict):
        for _ in range(min(TURN_RELEASED_MAX, len(container))):
            container.popitem()
    else:
        del container[-TURN_RELEASED_MAX:]
    if not container:
        containers.popleft()
    if containers:
        _release_later(containers)
