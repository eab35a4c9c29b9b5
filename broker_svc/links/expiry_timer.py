"""The expiry timer of a partition: makes storage expire what is due (V1).

Storage keeps the deadlines, reports the next one, and expires what is due with every commit. The
timer only causes a commit when nothing else does, at intervals of 10 ms at least. A failed expiry
is retried.
"""

import asyncio

from broker_svc.links.partition_link import PartitionLink
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.clock import Clock
from tidemark.errors import TidemarkError

FINEST_MS = 10
RETRY_MS = 50


class ExpiryTimer:
    """The timer of one partition. `run` serves it until cancelled."""

    def __init__(self, link: PartitionLink, clock: Clock) -> None:
        self._link = link
        self._clock = clock
        self._due_ms: int | None = None
        self._changed = asyncio.Event()

    def next_deadline(self, in_ms: int | None) -> None:
        """Storage reported its next deadline; None if there is none."""
        self._due_ms = None if in_ms is None else self._clock.monotonic_ms() + in_ms
        self._changed.set()

    async def run(self) -> None:
        while True:
            await self._until_due()
            await self.run_once()

    async def run_once(self) -> None:
        """Expire what is due now, and try again soon unless storage reports its next deadline."""
        self._changed.clear()
        operation = exchange_pb2.Operation(expire_due=exchange_pb2.ExpireDue())
        wait_ms = FINEST_MS
        try:
            await self._link.call(operation)
        except TidemarkError:
            wait_ms = RETRY_MS
        if not self._changed.is_set():
            self._due_ms = self._clock.monotonic_ms() + wait_ms

    async def _until_due(self) -> None:
        while True:
            now_ms = self._clock.monotonic_ms()
            if self._due_ms is not None and self._due_ms <= now_ms:
                return
            timeout_ms = None if self._due_ms is None else self._due_ms - now_ms
            self._changed.clear()
            try:
                await self._clock.wait_for(self._changed.wait(), timeout_ms)
            except TimeoutError:
                return
