"""A notifier: wakes every task that waits for a change of state.

Unlike an `asyncio.Condition` it has no lock, so that notifying is no await: the code that ends
something cannot be cancelled between the change and the notification of it.
"""

import asyncio
from collections.abc import Callable


class Notifier:
    """Belongs to one event loop, whose tasks both notify and wait."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def notify_all(self) -> None:
        """Something has changed: every waiter looks again."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        """Return at the next notification."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    async def wait_for(self, is_so: Callable[[], bool]) -> None:
        """Return once the condition holds; it is looked at after each notification."""
        while not is_so():
            await self.wait()
