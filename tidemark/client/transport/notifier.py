"""A notifier: wakes every task that waits for a state change.

Unlike `asyncio.Condition` it has no lock, so notifying needs no await: code that ends something
cannot be cancelled between the change and its notification.
"""

import asyncio
from collections.abc import Callable


class Notifier:
    """Belongs to one event loop; its tasks both notify and wait."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def notify_all(self) -> None:
        """The state has changed: every waiter checks its condition again."""
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

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Return once the condition holds; it is checked after each notification."""
        while not condition():
            await self.wait()
