"""Turns of the event loop, for code that has to be cheap enough for every frame."""

from collections.abc import Awaitable, Iterator
from typing import Final, cast


class _NextTurn:
    __slots__ = ()

    def __await__(self) -> Iterator[None]:
        return iter((None,))  # cheaper than a generator


NEXT_TURN: Final = cast("Awaitable[None]", _NextTurn())
"""Awaited by a task to continue behind everything that is ready now."""
