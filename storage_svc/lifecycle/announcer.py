"""The announcer: reports to lifecycle that a partition was opened, and sends wake-ups (L4, L7).

One announcer per partition, so that one without an answer delays no other. A call that fails is
repeated after a growing pause, unless a sweep has made it unnecessary.
"""

import logging
import random
from contextlib import suppress

from storage_svc.partition.partition import Partition
from tidemark.api.lifecycle.v1.lifecycle_pb2 import AnnouncePartitionRequest, WakePartitionRequest
from tidemark.api.lifecycle.v1.lifecycle_pb2_grpc import LifecycleServiceStub
from tidemark.clock import Clock
from tidemark.errors import TidemarkError
from tidemark.rpc.channel_pool import ChannelPool
from tidemark.telemetry import counter

ANSWER_MS_MAX = 5_000
"""How long a call waits for a lifecycle service that is starting or unreachable."""

RETRY_MS_MIN = 50
RETRY_MS_MAX = 2_000
ANNOUNCE_AGAIN_MS = 1_000
"""An announcement was accepted but no sweep has ended since: the replica may be gone."""

_log = logging.getLogger(__name__)
_failures = counter(
    "tidemark.storage.lifecycle_unreachable", description="Calls that lifecycle did not answer"
)


class Announcer:
    """Calls lifecycle on behalf of one partition. `run` does so until cancelled."""

    def __init__(
        self,
        partition: Partition,
        channels: ChannelPool,
        lifecycle_address: str,
        storage_address: str,
        clock: Clock,
    ) -> None:
        self._partition = partition
        self._channels = channels
        self._lifecycle_address = lifecycle_address
        self._storage_address = storage_address
        self._clock = clock
        self._opening_id = f"{random.getrandbits(64):016x}"
        self._retry_ms = RETRY_MS_MIN

    async def run(self) -> None:
        while True:
            wait_ms = await self.run_once()
            with suppress(TimeoutError):
                await self._clock.wait_for(self._partition.lifecycle.wakeup_pending.wait(), wait_ms)

    async def run_once(self) -> int | None:
        """Send pending calls; returns how long to wait for a wake-up, None for no limit."""
        self._partition.lifecycle.wakeup_pending.clear()
        due_ms = self._partition.lifecycle.wakeups.take()
        try:
            if self._partition.awaits_sweep:
                await self._announce()
                self._retry_ms = RETRY_MS_MIN
                return ANNOUNCE_AGAIN_MS
            if due_ms is not None:
                await self._wake(due_ms)
        except (TidemarkError, TimeoutError) as error:
            if due_ms is not None:
                self._partition.lifecycle.wakeups.put_back(due_ms)
            return self._failed(error)
        self._retry_ms = RETRY_MS_MIN
        return None

    async def _announce(self) -> None:
        """A sweep follows at once, and finds everything that is due."""
        stub = LifecycleServiceStub(await self._channels.to(self._lifecycle_address))
        announcement = AnnouncePartitionRequest(
            partition=self._partition.number,
            storage_address=self._storage_address,
            opening_id=self._opening_id,
        )
        call = stub.AnnouncePartition(announcement, wait_for_ready=True)
        await self._clock.wait_for(call, ANSWER_MS_MAX)

    async def _wake(self, due_ms: int) -> None:
        holder = self._partition.lifecycle.lease.holder(self._clock.monotonic_ms())
        address = self._lifecycle_address if holder is None else holder.address
        stub = LifecycleServiceStub(await self._channels.to(address))
        wake = WakePartitionRequest(
            partition=self._partition.number, in_ms=max(0, due_ms - self._partition.now_ms())
        )
        call = stub.WakePartition(wake, wait_for_ready=True)
        await self._clock.wait_for(call, ANSWER_MS_MAX)

    def _failed(self, error: Exception) -> int:
        _failures.add(1)
        _log.info(
            "lifecycle was not reached",
            extra={"partition": self._partition.number, "why": str(error) or "no answer"},
        )
        wait_ms, self._retry_ms = self._retry_ms, min(2 * self._retry_ms, RETRY_MS_MAX)
        return wait_ms
