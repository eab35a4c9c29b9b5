"""Brokers whose exchange breaks are suspected in the registry, so that others take over at once.

A broker that is well answers a suspicion with its next beat. One that hands over has unbound its
partitions before its exchange ends, and is not suspected.
"""

import asyncio
import logging
from typing import Final

from tidemark.errors import RegistryUnavailable
from tidemark.registry.protocol import Registry

MEMBERS: Final = "brokers"
"""The kind of members in the registry."""

_log = logging.getLogger(__name__)


class LostBrokers:
    """Reports brokers to a registry, and does not wait for it."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._reporting: set[asyncio.Task[None]] = set()

    def report(self, broker_id: str, incarnation: int) -> None:
        reporting = asyncio.create_task(self._report(broker_id, incarnation))
        self._reporting.add(reporting)
        reporting.add_done_callback(self._reporting.discard)

    async def close(self) -> None:
        for reporting in self._reporting:
            reporting.cancel()
        await asyncio.gather(*self._reporting, return_exceptions=True)

    async def _report(self, broker_id: str, incarnation: int) -> None:
        try:
            await self._registry.suspect(broker_id, incarnation)
        except RegistryUnavailable as error:  # then no broker is replaced anyway
            _log.debug("a lost broker was not reported: %s", error.detail)
        else:
            _log.info("broker suspected", extra={"broker_id": broker_id})
