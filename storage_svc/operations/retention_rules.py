"""The rules of retention that storage applies again: what a pass has planned, and limits (R9)."""

from typing import NamedTuple

from storage_svc.engines import run_rows
from storage_svc.operations.history import RetentionType
from tidemark.topics import TopicSettings

OF_MESSAGES = (
    RetentionType.EXPIRED,
    RetentionType.COMPLETED,
    RetentionType.MAX_WAIT_TIME_EVICTION,
)


class RetentionRow(NamedTuple):
    """One planned deletion, with the state that it expects."""

    queue_id: int = 0
    lmq_name: str = ""
    fairness_key: str = ""
    first_offset: int = 0
    end_offset: int = 0
    before_ms: int = 0
    table: str = ""
    age_ms: int = 0
    group: str = ""
    planned_rows: int = 0
    """Rows of the plan that it stands for, which for messages are runs; 0: not known."""

    @property
    def first_key(self) -> bytes:
        """The key of the header of its first run."""
        return run_rows.run_key_of(self.queue_id, self.fairness_key, self.first_offset)


class Removal(NamedTuple):
    """The removals from one queue."""

    messages: int
    body_bytes: int


def age_limit_s(settings: TopicSettings, kind: RetentionType) -> int:
    """The age from which a rule removes messages of a topic; 0 if it is off."""
    if kind is RetentionType.MAX_WAIT_TIME_EVICTION:
        return settings.max_wait_time_seconds
    if not settings.retention_enabled:
        return 0
    if kind is RetentionType.EXPIRED:
        return settings.retention_seconds
    return settings.completed_retention_seconds
