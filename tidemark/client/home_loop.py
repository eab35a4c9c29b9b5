"""The event loop that a client belongs to: the one in which it was entered.

Calls from another loop, for example of a second thread, would corrupt its state and hang. They are
refused before they change anything.
"""

import asyncio

from tidemark.errors import InvalidArgument


class HomeLoop:
    """The loop that runs where it is made."""

    __slots__ = ("_loop",)

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def check(self) -> None:
        """Raise in any other loop, and outside of loops."""
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is not self._loop:
            raise InvalidArgument(
                "the client belongs to another event loop; use tidemark.sync from several threads"
            )
