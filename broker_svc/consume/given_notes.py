"""Notes of given messages: storage records their number before a reservation runs out.

A client that works renews its reservations, and every renewal records what the application was
given. For one that has stopped, the broker records it in the last part of the visibility timeout.
An expiry then costs an attempt for what was given, and for nothing else (K1, V2). If the
broker dies before it has recorded them, they cost none.
"""

import asyncio
from collections.abc import Mapping
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Final

from broker_svc.consume.deliveries import Deliveries, HeldDelivery
from broker_svc.links.partition_link import PartitionLink
from broker_svc.links.unanswered_operations import Answer
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.clock import Clock

FINEST_MS: Final = 5
LEAD_MS: Final = 1_000
"""How long before the deadline notes begin, at least: a busy broker has the time to send them."""

NOTES_PER_OPERATION_MAX: Final = 1_000


class GivenNotes:
    """The deliveries of all sessions whose clients report hand-outs. `run` serves them."""

    def __init__(self, links: Mapping[int, PartitionLink], clock: Clock) -> None:
        self._links = links
        self._clock = clock
        self._checks: list[tuple[int, int, Deliveries]] = []
        """When the deliveries of a session are checked next; a later entry may replace one."""
        self._numbers = count()
        self._sooner = asyncio.Event()

    def watch(self, deliveries: Deliveries, held: HeldDelivery) -> None:
        """A delivery of a session was added."""
        due_ms = _due_ms(held)
        if deliveries.check_at_ms is None or due_ms < deliveries.check_at_ms:
            self._check_at(deliveries, due_ms)

    async def run(self) -> None:
        while True:
            now_ms = self._clock.monotonic_ms()
            self.run_once(now_ms)
            self._sooner.clear()
            timeout_ms = max(self._checks[0][0] - now_ms, 1) if self._checks else None
            try:
                await self._clock.wait_for(self._sooner.wait(), timeout_ms)
            except TimeoutError:
                continue

    def run_once(self, now_ms: int) -> None:
        """Note what was given of all reservations that run out soon."""
        while self._checks and self._checks[0][0] <= now_ms:
            due_ms, _, deliveries = heappop(self._checks)
            if deliveries.check_at_ms == due_ms:
                deliveries.check_at_ms = None
                self._check(deliveries, now_ms)

    def _check(self, deliveries: Deliveries, now_ms: int) -> None:
        by_partition: dict[int, list[HeldDelivery]] = {}
        next_ms: int | None = None
        for held in deliveries:
            if held.place is None:
                continue
            due_ms = _due_ms(held)
            if due_ms <= now_ms:
                if held.given_messages != held.noted_messages:
                    by_partition.setdefault(held.queue.partition, []).append(held)
                due_ms = now_ms + max(held.visibility_ms // 8, FINEST_MS)
            next_ms = due_ms if next_ms is None else min(next_ms, due_ms)
        for partition, due in by_partition.items():
            for at in range(0, len(due), NOTES_PER_OPERATION_MAX):
                self._note(partition, due[at : at + NOTES_PER_OPERATION_MAX])
        if next_ms is not None:
            self._check_at(deliveries, next_ms)

    def _check_at(self, deliveries: Deliveries, due_ms: int) -> None:
        deliveries.check_at_ms = due_ms
        heappush(self._checks, (due_ms, next(self._numbers), deliveries))
        if self._checks[0][2] is deliveries:
            self._sooner.set()

    def _note(self, partition: int, due: list[HeldDelivery]) -> None:
        operation = exchange_pb2.Operation()
        operation.renew.keep_deadlines = True
        given = []
        for held in due:
            given.append(held.given_messages)
            operation.renew.held.add(
                receipt=held.receipt, given_messages=given[-1], owner_epoch=held.owner_epoch
            )
        answer = self._links[partition].send(operation)
        answer.add_done_callback(partial(_noted, due, given))


def _due_ms(held: HeldDelivery) -> int:
    return held.deadline_ms - max(held.visibility_ms // 4, LEAD_MS)


def _noted(due: list[HeldDelivery], given: list[int], answer: Answer) -> None:
    """Remember what storage knows. A note that failed is repeated; a refused one is not needed."""
    if answer.exception() is None and not answer.result().HasField("error"):
        for held, messages in zip(due, given, strict=True):
            held.noted_messages = messages
