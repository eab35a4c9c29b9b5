"""The meaning of a failed commit: the fault of its partition, and the answer to callers. Pure."""

from typing import NamedTuple

from storage_svc.engines.engine import EngineDataLost, EngineFenced
from storage_svc.partition.health import FaultReason
from tidemark.errors import CommitOutcomeUnknown, DataCorrupt, PartitionFaulty, TidemarkError


class Failure(NamedTuple):
    """A failed commit."""

    reason: FaultReason
    answer: TidemarkError


def failure_of(partition: int, error: Exception) -> Failure:
    """The fault that an error of a commit stands for."""
    if isinstance(error, DataCorrupt):
        return Failure(FaultReason.DATA_CORRUPT, error)
    if isinstance(error, EngineFenced):
        taken = PartitionFaulty(f"another storage node has taken partition {partition}")
        return Failure(FaultReason.TAKEN_OVER, taken)
    if isinstance(error, EngineDataLost):
        lost = PartitionFaulty(f"partition {partition} has lost commits: {error}")
        return Failure(FaultReason.DATA_LOST, lost)
    if isinstance(error, CommitOutcomeUnknown):
        unknown = CommitOutcomeUnknown(f"a commit of partition {partition} failed")
        return Failure(FaultReason.COMMIT_FAILED, unknown)
    # It broke before the commit: nothing was stored, so a repeat is safe.
    broken = PartitionFaulty(f"partition {partition} failed to apply a frame")
    return Failure(FaultReason.COMMIT_FAILED, broken)
