"""Waking a loop that follows a registry when a member has changed something."""

import asyncio
from contextlib import suppress

from tidemark.clock import Clock
from tidemark.errors import RegistryUnavailable
from tidemark.registry.protocol import Registry


async def wake_on_changes(
    registry: Registry, wake: asyncio.Event, clock: Clock, again_ms: int
) -> None:
    """Until cancelled; a registry that is away is listened to again after `again_ms`."""
    while True:
        with suppress(RegistryUnavailable):
            async for _ in registry.changes():
                wake.set()
        await clock.sleep_ms(again_ms)
