"""Owner checks: reads the owner of an exclusive queue from storage when this broker may be wrong.

That is after a link comes back under a takeover whose result was lost, when storage refuses the
epoch of a reserve, and when storage has lost commits. It never takes or ends ownership itself.
"""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from broker_svc.consume.consumer import FeedKey
from broker_svc.exclusive.evictions import RESYNC_REQUIRED, Evictions
from broker_svc.exclusive.ownership import Ownerships
from tidemark.errors import TidemarkError


class OwnerChecks:
    """Checks run as separate tasks, one at a time per queue."""

    def __init__(self, ownerships: Ownerships, evictions: Evictions) -> None:
        self._ownerships = ownerships
        self._evictions = evictions
        self._tasks: set[asyncio.Task[None]] = set()

    def link_up(self, partition: int) -> None:
        """Read the result of takeovers that the link lost."""
        for key in self._ownerships.unresolved(partition):
            self._start(self._resolve(key))

    def check_owner(self, key: FeedKey, epoch: int) -> None:
        """A reserve of the owner was refused: its queue or its group may have been deleted."""
        self._start(self._check(key, epoch))

    def commits_lost(self, partition: int) -> None:
        """Queues of a partition may have earlier owners again: clients confirm their ownership."""
        for key in self._ownerships.of_partition(partition):
            self._start(self._forget(key))

    def _start(self, check: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(check)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _resolve(self, key: FeedKey) -> None:
        queue = self._ownerships.get(key)
        async with queue.lock():
            with suppress(TidemarkError):  # the link broke again; the next one tries
                await self._ownerships.resolve(queue)

    async def _check(self, key: FeedKey, epoch: int) -> None:
        queue = self._ownerships.get(key)
        async with queue.lock():
            with suppress(TidemarkError):  # the next reserve is refused again
                lost_by = await self._ownerships.lost(queue, epoch)
                if lost_by is not None:
                    self._evictions.end_all(queue, lost_by.client_id, RESYNC_REQUIRED)

    async def _forget(self, key: FeedKey) -> None:
        queue = self._ownerships.get(key)
        async with queue.lock():
            owner = self._ownerships.forget(queue)
            if owner is not None:
                self._evictions.end_all(queue, owner.client_id, RESYNC_REQUIRED)
