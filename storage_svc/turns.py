"""Turns of the event loop: long work is done in parts, with the work of others in between.

Reads of the embedded engine never suspend, so that nothing else runs in the process, in any
partition, until a coroutine gives way by itself.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextvars import Context
from typing import Any, NamedTuple, TypeAlias, TypeVar

from tidemark.clock import Clock
from tidemark.turns import NEXT_TURN

TURN_OPERATIONS_MAX = 64
"""Operations on messages that one turn applies, at some 10 to 40 microseconds each."""

TURN_RELEASED_MAX = 2_000
"""Entries of a dropped container that one turn frees."""

RELEASE_PAUSE_MS = 5
"""Between two such turns."""

T = TypeVar("T")


Step: TypeAlias = "Callable[[], Step | None]"
"""Does a part of some work and returns the next part, if there is one. It must not raise."""


class Reading(NamedTuple):
    """What the clock shows at one moment."""

    wall_ms: int
    monotonic_ms: int
    monotonic_ns: int


class CommonTurns:
    """Work of many parts of the process that is done in common turns of the event loop: one call of
    the loop for all that asked, whatever their number.

    All do their first step, then all their second, and so on: a processor repeats the same code for
    many much faster than it runs all code for one after the other (ADR 40).
    """

    __slots__ = ("_asked", "_context", "_reading", "_runs")

    def __init__(self) -> None:
        self._asked: list[Step] = []
        self._context = Context()  # of none of those that ask: it has no current span
        self._runs = False
        self._reading: Reading | None = None
        """Of the turn that runs, once a step has asked for it."""

    def ask(self, first: Step) -> None:
        """Do it in the next turn, with the steps that follow."""
        if not self._asked:
            asyncio.get_running_loop().call_soon(self._run, context=self._context)
        self._asked.append(first)

    def read(self, clock: Clock) -> Reading:
        """The time of the turn, which is one moment for all that share it; outside of turns, now.
        All use the same clock."""
        reading = self._reading
        if reading is None:
            reading = Reading(clock.wall_ms(), clock.monotonic_ms(), clock.monotonic_ns())
            if self._runs:
                self._reading = reading
        return reading

    def _run(self) -> None:
        steps, self._asked = self._asked, []
        self._runs = True
        try:
            while steps:
                steps = [following for step in steps if (following := step()) is not None]
        finally:
            self._runs, self._reading = False, None


async def give_way() -> None:
    """Let everything else that is ready run first."""
    await NEXT_TURN


async def in_turns(
    items: Sequence[T], turn_items_max: int = TURN_OPERATIONS_MAX
) -> AsyncIterator[Sequence[T]]:
    """The items in parts, each in a separate turn."""
    for start in range(0, len(items), turn_items_max):
        if start:
            await give_way()
        yield items[start : start + turn_items_max]


def release(containers: "Iterable[dict[Any, Any] | list[Any]]") -> None:
    """Free large containers that nothing uses any more, in separate turns.

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
