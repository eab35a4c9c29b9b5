"""The buffer of a subscription: deliveries that have arrived and wait to be handed out.

Any number of tasks take from it, message by message or in batches. They are served in the order in
which they asked, and each message is handed out once (K2). It settles nothing.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from tidemark.client.consume.delivery import Delivery, DeliveryBatch
from tidemark.clock import Clock

T = TypeVar("T")


class Buffer:
    """Batches in the order of their arrival; of the first, some messages may be handed out."""

    def __init__(self, clock: Clock, check_open: Callable[[], None]) -> None:
        self._clock = clock
        self._check_open = check_open
        """Raises once nothing more will arrive."""
        self._batches: deque[DeliveryBatch] = deque()
        self._handed_out = 0
        """How many messages of the first batch."""
        self._changed = asyncio.Event()
        self._turn = asyncio.Lock()
        """Held by the task that is served next; the others queue for it in order."""
        self._waiting = 0

    # --- taking --------------------------------------------------------------------------------

    async def next_delivery(self) -> Delivery:
        """The next message."""
        if self._waiting or not self._has_next():
            return await self._wait_for(self._take_one)
        return self._take_one()

    async def next_batch(self) -> DeliveryBatch:
        """The next batch; the rest of it, where some of its messages were handed out."""
        if self._waiting or not self._has_next():
            return await self._wait_for(self._take_batch)
        return self._take_batch()

    async def _wait_for(self, take: Callable[[], T]) -> T:
        """Take when it is this task's turn.

        Nothing is awaited between the last wait and taking: a cancelled task has taken nothing.
        """
        self._waiting += 1
        try:
            async with self._turn:
                while not self._has_next():
                    self._check_open()
                    self._changed.clear()
                    await self._changed.wait()
                return take()
        finally:
            self._waiting -= 1

    def _has_next(self) -> bool:
        """Whether a message can be handed out; those that waited too long are dropped."""
        while self._batches:
            if self._batches[0].deadline_ms > self._clock.monotonic_ms():
                return True
            self._drop_first()
        return False

    def _take_one(self) -> Delivery:
        batch, index = self._batches[0], self._handed_out
        if index + 1 < batch.count:
            self._handed_out = index + 1
        else:
            self._drop_first()
        return Delivery(batch, index)

    def _take_batch(self) -> DeliveryBatch:
        batch = self._batches[0]
        batch.first = self._handed_out
        self._drop_first()
        return batch

    def _drop_first(self) -> None:
        self._batches.popleft()
        self._handed_out = 0

    # --- filling -------------------------------------------------------------------------------

    def add(self, batch: DeliveryBatch) -> None:
        self._batches.append(batch)
        self._changed.set()

    def check(self) -> None:
        """Let the waiting tasks check whether anything will arrive."""
        self._changed.set()

    def remove(self, chosen: Callable[[DeliveryBatch], bool]) -> list[tuple[DeliveryBatch, int]]:
        """Take batches out; returns each with the number of its messages that were handed out."""
        removed: list[tuple[DeliveryBatch, int]] = []
        kept: deque[DeliveryBatch] = deque()
        handed_out = self._handed_out
        for batch in self._batches:
            if chosen(batch):
                removed.append((batch, handed_out))
            else:
                kept.append(batch)
            handed_out = 0
        if removed and removed[0][0] is self._batches[0]:
            self._handed_out = 0
        self._batches = kept
        return removed
