"""The buffer of a subscription: deliveries that have arrived and wait to be handed out.

Any number of tasks take from it, message by message or in batches. They are served in the order in
which they asked, and each message is handed out once (K2), after the broker has confirmed it (K1).
It settles nothing.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from tidemark.client.consume.delivery import Delivery, DeliveryBatch
from tidemark.clock import Clock

T = TypeVar("T")


class Supply(Protocol):
    """Where deliveries come from."""

    def check_open(self) -> None:
        """Raise once nothing more will arrive."""

    def wanted(self) -> None:
        """A task waits: for a message, or for the confirmation of its hand-out."""

    def served(self) -> None:
        """A task that waited has its message."""


class Buffer:
    """Batches in the order of their arrival; of the first, some messages may be handed out."""

    def __init__(self, clock: Clock, supply: Supply) -> None:
        self._clock = clock
        self._supply = supply
        self._batches: deque[DeliveryBatch] = deque()
        self._changed = asyncio.Event()
        self._turn = asyncio.Lock()
        """Held by the task that is served next; the others queue for it in order."""
        self.messages = 0
        """How many messages are here and were not handed out."""
        self.last_taken_ms, self.last_taken = clock.monotonic_ms(), 1
        """When messages were taken last, and how many at once."""
        self.waiting_for_one = self.waiting_for_batch = 0
        """How many tasks wait for a message, and for a batch."""

    @property
    def first(self) -> DeliveryBatch | None:
        return self._batches[0] if self._batches else None

    # --- taking --------------------------------------------------------------------------------

    async def next_delivery(self) -> Delivery:
        """The next message."""
        if not (self.waiting_for_one or self.waiting_for_batch):
            delivery = self._take_one()
            if delivery is not None:
                return delivery
        self.waiting_for_one += 1
        try:
            return await self._wait_for(self._take_one)
        finally:
            self.waiting_for_one -= 1

    async def next_batch(self) -> DeliveryBatch:
        """The next batch; the rest of it, where some of its messages were handed out."""
        if not (self.waiting_for_one or self.waiting_for_batch):
            batch = self._take_batch()
            if batch is not None:
                return batch
        self.waiting_for_batch += 1
        try:
            return await self._wait_for(self._take_batch)
        finally:
            self.waiting_for_batch -= 1

    async def _wait_for(self, take: Callable[[], T | None]) -> T:
        """Take when it is this task's turn.

        Nothing is awaited between the last wait and taking: a cancelled task has taken nothing.
        """
        if not self._batches and self._turn.locked():
            self._supply.wanted()
        async with self._turn:
            waited = False
            while (taken := take()) is None:
                self._supply.check_open()
                self._supply.wanted()
                waited = True
                self._changed.clear()
                await self._changed.wait()
            if waited:
                self._supply.served()
            return taken

    def _take_one(self) -> Delivery | None:
        """A message, if one is here that may be handed out now. Every message passes here."""
        while self._batches:
            batch = self._batches[0]
            now_ms = self._clock.monotonic_ms()
            if batch.deadline_ms <= now_ms:
                self._drop_first()  # it ran out while it waited
                continue
            index = batch.handed_out
            if index >= batch.allowed and not batch.hand_outs.allow(batch):
                return None
            batch.handed_out = index + 1
            self.messages -= 1
            self.last_taken_ms, self.last_taken = now_ms, 1
            if index + 1 == batch.end:
                self._batches.popleft()
            return Delivery(batch, index)
        return None

    def _take_batch(self) -> DeliveryBatch | None:
        while self._batches:
            batch = self._batches[0]
            now_ms = self._clock.monotonic_ms()
            if batch.deadline_ms <= now_ms:
                self._drop_first()
                continue
            if not batch.hand_outs.allow_rest(batch):
                return None
            self._batches.popleft()
            taken = batch.end - batch.handed_out
            batch.first = batch.handed_out
            batch.handed_out = batch.end
            self.messages -= taken
            self.last_taken_ms, self.last_taken = now_ms, taken
            return batch
        return None

    def _drop_first(self) -> None:
        batch = self._batches.popleft()
        self.messages -= batch.end - batch.handed_out

    # --- filling -------------------------------------------------------------------------------

    def add(self, batches: Sequence[DeliveryBatch]) -> None:
        """Add batches that have arrived together."""
        self._batches.extend(batches)
        self.messages += sum([batch.count for batch in batches])
        self._changed.set()

    def wake_up(self) -> None:
        """Let the waiting tasks check again for messages, and whether more will arrive."""
        self._changed.set()

    def remove(self, chosen: Callable[[DeliveryBatch], bool]) -> list[DeliveryBatch]:
        """Take batches out; those of their messages that were handed out are not concerned."""
        removed = [batch for batch in self._batches if chosen(batch)]
        if removed:
            self._batches = deque(batch for batch in self._batches if not chosen(batch))
            self.messages -= sum(batch.end - batch.handed_out for batch in removed)
        return removed

    def remove_last(self, messages: int) -> list[tuple[DeliveryBatch, int]]:
        """Take messages out, the last first; returns each batch and the first one taken of it.

        Those of exclusive queues stay: no other consumer may have them, and their order is kept.
        """
        removed: list[tuple[DeliveryBatch, int]] = []
        for batch in reversed(self._batches):
            taken = min(messages, batch.end - batch.handed_out)
            if taken and not batch.epoch:
                messages -= taken
                self.messages -= taken
                batch.end -= taken
                removed.append((batch, batch.end))
        if removed:
            self._batches = deque(each for each in self._batches if each.handed_out < each.end)
        return removed
