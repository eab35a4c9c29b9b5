"""Health of a partition: why it does not serve, and since when.

Pure. Faults come and go independently of each other; the partition serves when none is left. An
alarm calls for attention but stops nothing: it is listed among the faults and refuses nothing.
"""

from enum import Enum
from typing import NamedTuple

from tidemark.errors import LifecycleUnavailable, PartitionFaulty, TidemarkError


class FaultReason(Enum):
    """Closed; the words are on the wire."""

    AWAITING_SWEEP = "AWAITING_SWEEP"
    SWEEP_FAILED = "SWEEP_FAILED"
    COMMIT_FAILED = "COMMIT_FAILED"
    DATA_CORRUPT = "DATA_CORRUPT"
    LIFECYCLE_SILENT = "LIFECYCLE_SILENT"
    OPEN_FAILED = "OPEN_FAILED"
    RECORD_UNREADABLE = "RECORD_UNREADABLE"
    CLOCK_JUMPED = "CLOCK_JUMPED"
    DATA_LOST = "DATA_LOST"
    TAKEN_OVER = "TAKEN_OVER"


class HealthState(Enum):
    """Whether a partition serves."""

    STARTING = "STARTING"
    SERVING = "SERVING"
    FAULTY = "FAULTY"


class Fault(NamedTuple):
    """One reason, for people and programs."""

    reason: FaultReason
    detail: str
    since_ms: int
    alarm: bool = False


class Health:
    """The faults of one partition."""

    __slots__ = ("_faults", "openings")

    def __init__(self) -> None:
        self._faults: dict[FaultReason, Fault] = {}
        self.openings = 0
        """How often the partition was opened, each time with empty memory."""

    @property
    def state(self) -> HealthState:
        serious = self._serious()
        if not serious:
            return HealthState.SERVING
        if [fault.reason for fault in serious] == [FaultReason.AWAITING_SWEEP]:
            return HealthState.STARTING
        return HealthState.FAULTY

    @property
    def faults(self) -> tuple[Fault, ...]:
        return tuple(self._faults.values())

    def has(self, reason: FaultReason) -> bool:
        return reason in self._faults

    def add(self, reason: FaultReason, detail: str, now_ms: int, *, alarm: bool = False) -> None:
        """A fault that lasts keeps the time at which it began."""
        since_ms = self._faults[reason].since_ms if reason in self._faults else now_ms
        self._faults[reason] = Fault(reason, detail, since_ms, alarm)

    def set_alarm(self, reason: FaultReason, detail: str, now_ms: int) -> bool:
        """Raise an alarm, or clear it with an empty detail; returns whether that changed it."""
        before = self._faults.get(reason)
        if detail:
            self.add(reason, detail, now_ms, alarm=True)
        else:
            self.clear(reason)
        return self._faults.get(reason) != before

    def clear(self, *reasons: FaultReason) -> None:
        for reason in reasons:
            self._faults.pop(reason, None)

    def refusal(self, partition: int) -> TidemarkError | None:
        """Why no publish is taken; None while the partition serves."""
        if not self._faults:
            return None
        serious = self._serious()
        if not serious:
            return None
        number = str(partition)
        if self.state is HealthState.STARTING:
            return LifecycleUnavailable(
                f"partition {partition} waits for its first sweep", partition=number
            )
        reasons = ",".join(fault.reason.value for fault in serious)
        details = "; ".join(fault.detail for fault in serious if fault.detail)
        return PartitionFaulty(
            f"partition {partition} is faulty: {reasons} {details}".rstrip(),
            partition=number,
            reasons=reasons,
        )

    def _serious(self) -> list[Fault]:
        return [fault for fault in self._faults.values() if not fault.alarm]
