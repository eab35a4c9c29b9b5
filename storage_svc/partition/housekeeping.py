"""Housekeeping of a partition: checks of every second, which usually need no commit."""

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from storage_svc.engines.engine import EngineDataLost, EngineFenced
from storage_svc.operations.loading import RunHousekeeping
from storage_svc.operations.partition_time import StampTime
from storage_svc.partition.exchange_events import ConnectedExchanges
from storage_svc.partition.health import FaultReason
from storage_svc.partition.state import PartitionState
from storage_svc.partition.timekeeping import Timekeeping
from tidemark.clock import Clock
from tidemark.errors import TidemarkError

if TYPE_CHECKING:
    from storage_svc.partition.partition import Partition

HOUSEKEEPING_MS: Final = 1000

_log = logging.getLogger(__name__)


class Housekeeping:
    """Keeps the disk, the alarms and the memory of one partition up to date."""

    def __init__(
        self,
        partition: "Partition",
        time: Timekeeping,
        exchanges: ConnectedExchanges,
        clock: Clock,
    ) -> None:
        self.overdue_ms = 0
        """How long the earliest deadline was past at the last look."""
        self._partition = partition
        self._time = time
        self._exchanges = exchanges
        self._clock = clock

    async def run(self) -> None:
        """Look every second, until cancelled, or until the partition is closed: an engine that
        fails may do so in place of a cancellation."""
        while not self._partition.is_closing:
            await self._clock.sleep_ms(HOUSEKEEPING_MS)
            try:
                await self.run_once()
            except Exception as error:  # such as a disk that cannot be read: next time
                number = self._partition.number
                _log.warning("housekeeping failed", extra={"partition": number}, exc_info=error)

    async def run_once(self) -> None:
        """Check the disk and lifecycle, unload idle queues, forget old producers."""
        partition = self._partition
        if not partition.is_open:
            return
        state = partition.state
        try:
            partition.disk.update(await state.engine.free_bytes())
        except (EngineFenced, EngineDataLost):  # the partition recovers from it, and reports it
            return
        if not partition.keeps(state):  # it was closed meanwhile
            return
        now_ms = self._time.now_ms()
        earliest_ms = state.deadlines.earliest_ms()
        self.overdue_ms = 0 if earliest_ms is None else max(0, now_ms - earliest_ms)
        changed = partition.lifecycle.check_silence(
            partition.health, now_ms, self._clock.monotonic_ms()
        )
        changed |= self._time.check()
        if self._check_left_out(state) or changed:
            self._exchanges.health_changed()
        with suppress(TidemarkError):  # closing or recovering: both are reported elsewhere
            if state.deadlines.needs_page:
                await partition.submit([])  # the writer reads it first
            if self._time.is_suspicious and not partition.state.counters.suspended_ms:
                await partition.submit([StampTime()])
            if await self._is_needed(partition.state):
                await partition.submit([RunHousekeeping()])

    def _check_left_out(self, state: PartitionState) -> bool:
        """Raise or clear the alarm of records that cannot be read; returns whether it changed."""
        now_ms, health = self._time.now_ms(), self._partition.health
        state.left_out.forget_old(now_ms)
        return health.set_alarm(FaultReason.RECORD_UNREADABLE, state.left_out.detail, now_ms)

    async def _is_needed(self, state: PartitionState) -> bool:
        """Whether there is anything to unload or forget; usually not, which saves a commit."""
        now_ms = self._time.now_ms()
        if state.handles.untracked(now_ms):
            return True
        return not self._time.is_suspicious and await state.producers.has_old(now_ms)
