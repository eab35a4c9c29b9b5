"""Cleanup: unloads idle queues from storage and drops their records here (I3, I4, I6).

The automatic path checks queues whose idle window has elapsed; the direct call is a diagnostic that
asks storage about any queue. Both apply the same guards and have the same closed outcomes. A broken
link is UNAVAILABLE, never an outcome.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from functools import partial

from broker_svc.idle.tracking import QueueKey, TrackedQueue, Tracking
from broker_svc.links.partition_link import PartitionLink
from broker_svc.links.unanswered_operations import Answer
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.clock import Clock
from tidemark.errors import NotOwner, TidemarkError
from tidemark.rpc.statuses import from_status
from tidemark.telemetry import counter

CANDIDATES_PER_PASS_MAX = 1000
PASS_MS_MAX = 1_000
"""How long the next pass waits for this one: an unresponsive partition delays no other."""

_log = logging.getLogger(__name__)


class EvictionOutcome(Enum):
    """The outcome of an attempt to unload a queue. Closed (I4)."""

    NOT_TRACKED = "NOT_TRACKED"
    ACTIVE = "ACTIVE"
    NOT_IDLE_ENOUGH = "NOT_IDLE_ENOUGH"
    PENDING_SETTLEMENTS = "PENDING_SETTLEMENTS"
    HAS_DELIVERIES = "HAS_DELIVERIES"
    EVICTED = "EVICTED"
    NOT_PRESENT = "NOT_PRESENT"
    NOT_MATERIALIZED = "NOT_MATERIALIZED"
    HAS_INFLIGHT = "HAS_INFLIGHT"
    RACE_LOST = "RACE_LOST"


_evictions = counter(
    "tidemark.broker.evictions",
    "Attempts to unload a queue, by outcome",
    zeros=[{"outcome": outcome.value} for outcome in EvictionOutcome],
)
_UNLOADED = (
    EvictionOutcome.EVICTED,
    EvictionOutcome.NOT_PRESENT,
    EvictionOutcome.NOT_MATERIALIZED,
)


class Cleanup:
    """Unloads idle queues. `run` serves the automatic path until cancelled."""

    def __init__(
        self, links: Mapping[int, PartitionLink], tracking: Tracking, clock: Clock
    ) -> None:
        self._links = links
        self._tracking = tracking
        self._clock = clock

    async def run(self) -> None:
        passes: set[asyncio.Task[list[EvictionOutcome]]] = set()
        try:
            while True:
                await self._until_candidate()
                one = asyncio.create_task(self.run_once())
                passes.add(one)
                one.add_done_callback(passes.discard)
                with suppress(TimeoutError):
                    await self._clock.wait_for(asyncio.wait({one}), PASS_MS_MAX)
        finally:
            for each in passes:
                each.cancel()

    async def run_once(self) -> list[EvictionOutcome]:
        """Try every candidate whose idle window has elapsed."""
        now_ms = self._clock.monotonic_ms()
        due = self._tracking.take_candidates(now_ms, CANDIDATES_PER_PASS_MAX)
        outcomes = await asyncio.gather(*(self._clean(queue) for queue in due))
        return [outcome for outcome in outcomes if outcome is not None]

    async def evict(self, key: QueueKey) -> EvictionOutcome:
        """The direct call: applies the guards, and asks storage about untracked queues."""
        while True:
            queue = self._tracking.find(key)
            if queue is None:
                outcome = _outcome_of(await self._ask_storage(key))
            else:
                outcome = await self._try(queue)
            if outcome is not EvictionOutcome.NOT_TRACKED:
                _evictions.add(1, {"outcome": outcome.value})
                return outcome

    async def _clean(self, queue: TrackedQueue) -> EvictionOutcome | None:
        """The automatic path: a queue that was not unloaded is checked again after another
        window."""
        outcome = None
        try:
            outcome = await self._try(queue)
        except NotOwner:
            self._tracking.forget(queue)  # another broker holds the partition now
            return None
        except TidemarkError as error:
            _log.info("not unloaded", extra={"queue": queue.lmq_name, "why": error.reason})
        if outcome is EvictionOutcome.NOT_IDLE_ENOUGH:
            self._tracking.watch(queue, queue.idle_since_ms + queue.idle_after_ms)
        elif outcome not in (*_UNLOADED, EvictionOutcome.ACTIVE, EvictionOutcome.NOT_TRACKED):
            self._tracking.watch(queue, self._clock.monotonic_ms() + queue.idle_after_ms)
        _evictions.add(1, {"outcome": "none" if outcome is None else outcome.value})
        return outcome

    async def _try(self, queue: TrackedQueue) -> EvictionOutcome:
        while queue.cleaning is not None:
            await asyncio.shield(queue.cleaning)
        if self._tracking.find(queue.key) is not queue:
            return EvictionOutcome.NOT_TRACKED
        guard = self._guard(queue)
        if guard is not None:
            return guard
        # No lease is granted from here until the answer (see activity_leases.py). The answer ends
        # the cleanup, not the caller, because a direct call may be cancelled before it arrives.
        queue.cleaning = asyncio.get_running_loop().create_future()
        answer = self._ask_storage(queue.key)
        answer.add_done_callback(partial(self._answered, queue))
        return _outcome_of(await asyncio.shield(answer))

    def _answered(self, queue: TrackedQueue, answer: Answer) -> None:
        try:
            if answer.exception() is None and _has_unloaded(answer.result()):
                queue.loading = None
                self._tracking.forget(queue)
        finally:
            cleaning, queue.cleaning = queue.cleaning, None
            assert cleaning is not None, "one cleanup at a time"
            cleaning.set_result(None)

    def _guard(self, queue: TrackedQueue) -> EvictionOutcome | None:
        if queue.leases:
            return EvictionOutcome.ACTIVE
        if self._clock.monotonic_ms() - queue.idle_since_ms < queue.idle_after_ms:
            return EvictionOutcome.NOT_IDLE_ENOUGH
        if queue.pending_settlements:
            return EvictionOutcome.PENDING_SETTLEMENTS
        if queue.deliveries:
            return EvictionOutcome.HAS_DELIVERIES
        return None

    def _ask_storage(self, key: QueueKey) -> Answer:
        partition, lmq_name = key
        unmaterialize = exchange_pb2.Unmaterialize(lmq_name=lmq_name)
        return self._links[partition].send(exchange_pb2.Operation(unmaterialize=unmaterialize))

    async def _until_candidate(self) -> None:
        while True:
            self._tracking.earlier_candidate.clear()
            due_ms = self._tracking.next_candidate_ms()
            now_ms = self._clock.monotonic_ms()
            if due_ms is not None and due_ms <= now_ms:
                return
            timeout_ms = None if due_ms is None else due_ms - now_ms
            try:
                await self._clock.wait_for(self._tracking.earlier_candidate.wait(), timeout_ms)
            except TimeoutError:
                return


def _outcome_of(result: exchange_pb2.OperationResult) -> EvictionOutcome:
    """The outcome in storage's answer; raises its error."""
    if result.HasField("error"):
        raise from_status(result.error)
    name = topic_pb2.EvictionOutcome.Name(result.unmaterialize.outcome)
    return EvictionOutcome(name.removeprefix("EVICTION_OUTCOME_"))


def _has_unloaded(result: exchange_pb2.OperationResult) -> bool:
    return not result.HasField("error") and _outcome_of(result) in _UNLOADED
