"""The tables that can be scanned, and which part of one a scan reads. Pure."""

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

from storage_svc.operations.history import RetentionType
from tidemark.names import topic_of


class TableName(Enum):
    """The tables that can be scanned."""

    RUNS = "RUNS"
    GROUPS = "GROUPS"
    QUEUES = "QUEUES"
    HISTORY = "HISTORY"
    MESSAGES_CONSUMED = "MESSAGES_CONSUMED"
    SYSTEM_METRICS = "SYSTEM_METRICS"


class TableFilter(NamedTuple):
    """The part of a table to read; empty values do not restrict it."""

    columns: Sequence[str] = ()
    topic: str = ""
    after_ms: int = 0
    before_ms: int = 0
    lmq_name: str = ""
    prefix: str = ""
    age_ms_min: int = 0
    due_types: frozenset[RetentionType] = frozenset()

    def at(self, now_ms: int) -> "TableFilter":
        """The same filter with its age as a time."""
        if not self.age_ms_min or self.due_types:
            return self
        newest_ms = max(0, now_ms - self.age_ms_min)
        before_ms = min(self.before_ms, newest_ms + 1) if self.before_ms else newest_ms + 1
        return self._replace(before_ms=before_ms, age_ms_min=0)

    def has_time(self, time_ms: int) -> bool:
        return self.after_ms <= time_ms and (not self.before_ms or time_ms < self.before_ms)

    def has_queue(self, lmq_name: str) -> bool:
        return (
            (not self.topic or topic_of(lmq_name) == self.topic)
            and self.lmq_name in ("", lmq_name)
            and lmq_name.startswith(self.prefix)
        )


Row = tuple[Any, ...]
"""The values of a row, in the order of the columns of its table."""
