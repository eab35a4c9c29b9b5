"""Lifecycle as one partition sees it: the sweep lease, wake-ups to send, and whether it is silent.

Owns the lease, the wake-ups and the alarm (L4, L7). `announcer.py` sends the wake-ups; silence is
shown in the health of the partition.
"""

import asyncio
import logging
from collections.abc import Hashable
from dataclasses import dataclass

from storage_svc.lifecycle.sweep_lease import SweepLease
from storage_svc.lifecycle.wakeups import WakeUps
from storage_svc.partition.health import FaultReason, Health
from tidemark.telemetry import counter

_log = logging.getLogger(__name__)
_silences = counter(
    "tidemark.storage.lifecycle_silences", description="Times that lifecycle fell silent"
)


@dataclass(frozen=True, slots=True)
class SilencePolicy:
    """When lifecycle counts as silent, and whether that is a fault or an alarm."""

    after_ms: int = 0
    """0: never."""
    is_fault: bool = False


NEVER_SILENT = SilencePolicy()


class LifecycleWatch:
    """Lifecycle as one partition sees it."""

    def __init__(self, partition: int, silence: SilencePolicy, monotonic_ms: int) -> None:
        self.lease = SweepLease(monotonic_ms)
        self.wakeups = WakeUps()
        self.wakeup_pending = asyncio.Event()
        """Set when there is a wake-up to send; cleared by the announcer."""
        self._partition = partition
        self._silence = silence

    def due(self, index: Hashable, due_ms: int) -> None:
        """An entry of an index is durable and due at that time."""
        if self.wakeups.added(index, due_ms):
            self.wakeup_pending.set()

    def broker_disconnected(self, index: Hashable, earliest_ms: int | None) -> None:
        """From now on only sweeps scan an index that the broker took care of before."""
        if earliest_ms is not None:
            self.wakeups.scan_begins(index)
            self.due(index, earliest_ms)

    def check_silence(self, health: Health, now_ms: int, monotonic_ms: int) -> bool:
        """Raise or clear the alarm, or fault, of a silent lifecycle; returns whether it changed."""
        silent_ms = monotonic_ms - self.lease.asked_ms
        silent = self._silence.after_ms > 0 and silent_ms > self._silence.after_ms
        if silent == health.has(FaultReason.LIFECYCLE_SILENT):
            return False
        if not silent:
            health.clear(FaultReason.LIFECYCLE_SILENT)
            return True
        _log.error("lifecycle is silent", extra={"partition": self._partition, "ms": silent_ms})
        _silences.add(1)
        detail = f"no sweeper has asked for the lease for {silent_ms} ms"
        alarm = not self._silence.is_fault
        health.add(FaultReason.LIFECYCLE_SILENT, detail, now_ms, alarm=alarm)
        return True
