"""The event loop that a client belongs to: the one in which it was entered.

Calls from another loop, for example of a second thread, would corrupt its state and hang. They are
refused before they change anything.
"""

import asyncio
import os
from threading import get_ident

from tidemark.errors import InvalidArgument

_process_id = os.getpid()


def _forked() -> None:
    global _process_id
    _process_id = os.getpid()


os.register_at_fork(after_in_child=_forked)


class HomeLoop:
    """The loop that runs where it is made."""

    __slots__ = ("_loop", "_process_id", "_thread_id")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread_id = get_ident()
        self._process_id = _process_id

    def check(self) -> None:
        """Raise in any other loop, outside of loops, and after a fork."""
        # A thread runs one loop at a time. `asyncio.get_running_loop` makes a system call (getpid)
        # in Python 3.11, and this is called for every publish and every settlement.
        if (
            get_ident() != self._thread_id
            or not self._loop.is_running()
            or _process_id != self._process_id
        ):
            raise InvalidArgument(
                "the client belongs to another event loop; use tidemark.sync from several threads"
            )
