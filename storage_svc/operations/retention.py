"""Retention, its history, and the figures that are kept."""

from enum import Enum
from typing import NamedTuple


class RetentionType(Enum):
    """What a row of the history counts. Stored by value (R6)."""

    EXPIRED = "expired"
    COMPLETED = "completed"
    MAX_WAIT_TIME_EVICTION = "max_wait_time_eviction"
    INACTIVE_QUEUE = "inactive_queue"
    OLD_RECORDS = "old_records"
    TIME_TO_LIVE = "time_to_live"
    ATTEMPTS_EXHAUSTED = "attempts_exhausted"
    PURGE = "purge"


class RetentionRow(NamedTuple):
    """One planned deletion, with the state that it expects."""

    queue_id: int = 0
    lmq_name: str = ""
    fairness_key: str = ""
    first_offset: int = 0
    end_offset: int = 0
    before_ms: int = 0
    table: str = ""


class ApplyRetention(NamedTuple):
    """Delete planned rows; each is checked again in the commit that deletes it (R9)."""

    pass_id: str
    type: RetentionType
    rows: tuple[RetentionRow, ...]


class RetentionApplied(NamedTuple):
    """What was deleted."""

    messages: int = 0
    body_bytes: int = 0
    queues: int = 0
    stale: int = 0
    more: bool = False


class Measurement(NamedTuple):
    """What the samples of one figure came to."""

    instance: str
    name: str
    samples: int
    least: float
    most: float
    mean: float
    last: float


class RecordMetrics(NamedTuple):
    """Store aggregated figures (R12)."""

    measurements: tuple[Measurement, ...]
