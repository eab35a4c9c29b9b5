"""The clock of this node against that of the servers of its engine.

Partition time follows the clock of the node that has the partition open. On a store that nodes
share, one whose clock is wrong would bring its time into every partition that it takes.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Final

from tidemark.clock import Clock

OFFSET_MS_MAX: Final = 5_000
CHECK_EVERY_MS: Final = 5_000
ASK_AGAIN_MS: Final = 500

_log = logging.getLogger(__name__)


class ClockCheck:
    """Compares the clocks. A server that does not answer proves nothing."""

    def __init__(self, engine_time_ms: Callable[[], Awaitable[int]], clock: Clock) -> None:
        self.offset_ms = 0
        """How far the clock of this node was ahead of the engine's when it was last compared."""
        self._engine_time_ms = engine_time_ms
        self._clock = clock

    @property
    def is_off(self) -> bool:
        return abs(self.offset_ms) > OFFSET_MS_MAX

    async def run_once(self) -> bool:
        """Compare them; returns whether the server has answered."""
        began_ms = self._clock.wall_ms()
        try:
            server_ms = await self._engine_time_ms()
        except OSError as error:
            _log.debug("the time of the engine is not known: %s", error)
            return False
        was_off = self.is_off
        self.offset_ms = (began_ms + self._clock.wall_ms()) // 2 - server_ms
        if self.is_off and not was_off:
            _log.error(
                "the clock of this node is wrong: it takes no partitions",
                extra={"ahead_ms": self.offset_ms, "ahead_ms_max": OFFSET_MS_MAX},
            )
        return True

    async def until_right(self) -> None:
        while not await self.run_once() or self.is_off:
            await self._clock.sleep_ms(ASK_AGAIN_MS)

    async def watch(self, on_off: Callable[[], Awaitable[None]]) -> None:
        """Call `on_off` once when the clocks differ too much, and end then."""
        while not self.is_off:
            await self._clock.sleep_ms(CHECK_EVERY_MS)
            await self.run_once()
        await on_off()
