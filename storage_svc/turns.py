"""Turns of the event loop: long work is done in parts, with the work of others in between.

Reads of the embedded engine never suspend, so that nothing else runs in the process, in no
partition, until a coroutine gives way by itself.
"""

from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

from tidemark.clock import SystemClock

TURN_OPERATIONS_MAX = 64
"""Operations on messages that one turn applies, at some 10 to 40 microseconds each."""

_CLOCK = SystemClock()  # gives way also where a test moves time by hand

T = TypeVar("T")


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
