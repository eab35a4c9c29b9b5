"""Health of a partition: why it does not serve, and since when.

Pure. Reasons come and go independently of each other; the partition serves when none is left.
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


class PartitionState(Enum):
    """Whether a partition serves."""

    STARTING = "STARTING"
    SERVING = "SERVING"
    FAULTY = "FAULTY"


class Fault(NamedTuple):
    """One reason, for people and programs."""

    reason: FaultReason
    detail: str
    since_ms: int


class Health:
    """The faults of one partition."""

    __slots__ = ("_faults",)

    def __init__(self) -> None:
        self._faults: dict[FaultReason, Fault] = {}

    @property
    def state(self) -> PartitionState:
        if not self._faults:
            return PartitionState.SERVING
        if set(self._faults) == {FaultReason.AWAITING_SWEEP}:
            return PartitionState.STARTING
        return PartitionState.FAULTY

    @property
    def faults(self) -> tuple[Fault, ...]:
        return tuple(self._faults.values())

    def add(self, reason: FaultReason, detail: str, now_ms: int) -> None:
        """A fault that lasts keeps the time at which it began."""
        since_ms = self._faults[reason].since_ms if reason in self._faults else now_ms
        self._faults[reason] = Fault(reason, detail, since_ms)

    def clear(self, *reasons: FaultReason) -> None:
        for reason in reasons:
            self._faults.pop(reason, None)

    def refusal(self, partition: int) -> TidemarkError | None:
        """Why no publish is taken; None while the partition serves."""
        if not self._faults:
            return None
        number = str(partition)
        if self.state is PartitionState.STARTING:
            return LifecycleUnavailable(
                f"partition {partition} waits for its first sweep", partition=number
            )
        reasons = ",".join(reason.value for reason in self._faults)
        details = "; ".join(fault.detail for fault in self._faults.values() if fault.detail)
        return PartitionFaulty(
            f"partition {partition} is faulty: {reasons} {details}".rstrip(),
            partition=number,
            reasons=reasons,
        )
