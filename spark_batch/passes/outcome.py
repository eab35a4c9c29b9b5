"""The outcome of a pass: its removals or planned removals, and its log line (R8).

Importing it needs no PySpark: the scheduler reports passes without it.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from spark_batch.passes.findings import Counts, Finding, describe_failures, explain
from spark_batch.passes.retention_types import (
    ABANDONED_GROUP,
    COMPLETED,
    EXPIRED,
    INACTIVE_QUEUE,
    MAX_WAIT_TIME_EVICTION,
    OLD_RECORDS,
)
from tidemark.settings import RetentionSettings
from tidemark.topics import Topic

_log = logging.getLogger(__name__)


class JobName(StrEnum):
    """The jobs, in start order."""

    METRICS = "metrics"
    RETENTION = "retention"
    EVICTION = "eviction"


class Phase(StrEnum):
    """The progress of a running pass."""

    ASKING = "asking"
    STARTING_SPARK = "starting_spark"
    RUNNING = "running"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a pass is: by the tasks of Spark, and by the rows of its plan once that is made."""

    phase: Phase
    tasks: int = 0
    tasks_done: int = 0
    rows_planned: int = 0
    rows_applied: int = 0


Report = Callable[[Progress], None]
"""Receives the progress of a pass, whenever it changes."""

TYPES: Final[Mapping[JobName, tuple[str, ...]]] = MappingProxyType(
    {
        JobName.RETENTION: (
            EXPIRED,
            COMPLETED,
            INACTIVE_QUEUE,
            OLD_RECORDS,
            ABANDONED_GROUP,
        ),
        JobName.EVICTION: (MAX_WAIT_TIME_EVICTION,),
    }
)
"""The types that the passes of a job apply, in the order of its log line."""

_LINES: Final[Mapping[JobName, str]] = MappingProxyType(
    {
        JobName.RETENTION: "RetentionService: Cleaned up expired_messages=%d "
        "completed_messages=%d inactive_partitions=%d old_metrics=%d abandoned_groups=%d",
        JobName.EVICTION: "EvictionService: Evicted %d messages exceeding max_wait_time",
    }
)


@dataclass(frozen=True, slots=True)
class Pass:
    """The outcome of one pass."""

    pass_id: str
    dry_run: bool
    findings: tuple[Finding, ...]
    duration_ms: int
    failed: Mapping[int, str] = field(default_factory=dict)
    """Partitions that could not be read or cleaned, each with its error."""

    def count(self, *kinds: str) -> int:
        """Messages, queues, groups or records of these types."""
        return sum(each.due for each in self.findings if each.rule in kinds)

    @property
    def counts(self) -> dict[str, int]:
        """Counts by retention type, in the order of the rules."""
        kinds = dict.fromkeys(each.rule for each in self.findings)
        return {kind: self.count(kind) for kind in kinds}


@dataclass(frozen=True, slots=True)
class Found:
    """The findings and removals of a pass, before they are explained."""

    topics: tuple[Topic, ...]
    counts: Counts = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)


def conclude(
    job: JobName,
    pass_id: str,
    dry_run: bool,
    found: Found,
    duration_ms: int,
    settings: RetentionSettings,
) -> Pass:
    """The outcome of a pass that ended; logs the line that operators search for."""
    days = {
        INACTIVE_QUEUE: settings.partition_cleanup_days,
        OLD_RECORDS: settings.metrics_retention_days,
    }
    findings = tuple(explain(found.topics, TYPES[job], found.counts, days))
    if found.failed:
        _log.warning("a %s pass left out partitions: %s", job, describe_failures(found.failed))
    done = Pass(pass_id, dry_run, findings, duration_ms, found.failed)
    if not dry_run:
        _log.info(_LINES[job], *(done.count(kind) for kind in TYPES[job]))
    return done
