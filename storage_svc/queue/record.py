"""The record of a queue, the rules that it obeys, and the journal that its changes are written to.

Pure: the journal is a protocol, which `partition/journal.py` implements for one commit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from storage_svc.queue.group import Group
from storage_svc.queue.lane import Lane
from storage_svc.queue.reservation import Reservation, Span
from storage_svc.queue.retry import RetryPolicy
from storage_svc.queue.returned import Returned
from storage_svc.queue.run import Run, Slice
from tidemark.topics import ConsumptionRecords, Topic

USE_NOTED_MS = 3_600_000
"""How far the last use of a group that is stored may lie behind: one that is used all the time is
not written for that. Less where groups expire sooner."""


@dataclass(slots=True)
class QueueRecord:
    """The catalog row of a queue; readable without loading the queue."""

    queue_id: int
    lmq_name: str
    create_time_ms: int
    last_activity_ms: int
    next_offset: int = 0
    messages: int = 0
    body_bytes: int = 0
    scheduled: int = 0
    # Lower bounds for the index of ages (`engines/age_rows.py`); 0: there is none.
    waiting_since_ms: int = 0  # publish time of messages that a group has not settled
    settled_since_ms: int = 0  # publish time of messages that every group has settled
    idle_since_ms: int = 0  # last activity of a queue without messages
    groups_since_ms: int = 0  # last use of groups
    # Tables that need not be read when the queue is loaded, because they never held rows of it.
    # Most queues have no fairness keys and nothing given back: they are loaded with one read.
    keyed: bool = False
    returned: bool = False
    reserved: bool = False
    addressed: bool = False  # whether runs for one group alone may be stored
    kept: bool = False  # whether settled runs may be left that retention keeps, or kept once
    unordered: bool = False  # whether a run may be older than one before it in its lane
    paused: bool = False  # whether consumers get nothing, also while the topic is not paused
    groups_apart: bool = False  # whether groups have separate rows, because there were many
    # The rest of the row, decoded when the queue is loaded.
    groups: dict[str, Group] = field(default_factory=dict)
    held: dict[int, Reservation] = field(default_factory=dict)
    """Live reservations that are part of the row."""
    settled: bytes = b""
    """Settled reservations that are part of the row, as they are stored, oldest first."""
    settled_count: int = 0
    settled_rows: tuple[tuple[int, int], ...] = ()
    """Rows of older ones: the reservation id in the key, and how many are still remembered."""
    indexed: tuple[int, int, int, int] = field(default=(0, 0, 0, 0), compare=False)
    """The bounds that have rows in the index; not stored itself."""

    @property
    def bounds(self) -> tuple[int, int, int, int]:
        """The bounds that the index is to have, in the order of its kinds."""
        return (
            self.waiting_since_ms,
            self.settled_since_ms,
            self.idle_since_ms,
            self.groups_since_ms,
        )

    def note_waiting(self, published_ms: int) -> None:
        """A message of this publish time waits."""
        if not 0 < self.waiting_since_ms <= published_ms:
            self.waiting_since_ms = max(1, published_ms)

    def note_settled(self, published_ms: int) -> None:
        """A message of this publish time is settled, and kept."""
        if not 0 < self.settled_since_ms <= published_ms:
            self.settled_since_ms = max(1, published_ms)

    def note_group(self, used_ms: int) -> None:
        """A group was last used then, or later."""
        if not 0 < self.groups_since_ms <= used_ms:
            self.groups_since_ms = max(1, used_ms)


class Journal(Protocol):
    """Records the changes of one commit."""

    def queue_changed(self, record: QueueRecord) -> None: ...
    def group_changed(self, record: QueueRecord, group: Group) -> None: ...
    def group_removed(self, record: QueueRecord, group: Group) -> None: ...
    def lane_moved(self, record: QueueRecord, group: Group, lane: Lane) -> None: ...
    def put_run(self, record: QueueRecord, run: Run, body: bytes) -> None: ...
    def delete_runs(self, record: QueueRecord, runs: Sequence[Run]) -> None: ...
    def put_reservation(self, record: QueueRecord, reservation: Reservation) -> None: ...
    def forget_oldest_settled(self, record: QueueRecord, reservation: Reservation) -> None: ...
    def replace_settled(
        self, record: QueueRecord, gone: Sequence[Reservation], kept: Sequence[Reservation]
    ) -> None: ...
    def unload_settled(self, record: QueueRecord, settled: Sequence[Reservation]) -> None: ...
    def put_deadline(self, record: QueueRecord, reservation: Reservation) -> None: ...
    def delete_deadline(self, record: QueueRecord, reservation: Reservation) -> None: ...
    def put_returned(self, record: QueueRecord, group: Group, returned: Returned) -> None: ...
    def delete_returned(
        self, record: QueueRecord, group: Group, start: int, not_before_ms: int = 0
    ) -> None: ...
    def consumed(self, record: QueueRecord, group: str, span: Span, slice_: Slice) -> None: ...
    def ready(self, record: QueueRecord, group: Group) -> None: ...


class Rules(NamedTuple):
    """The settings of its topic that a queue applies."""

    max_attempts: int = 0
    keeps_settled: bool = False
    weights: Mapping[str, int] = {}
    records_consumption: bool = True
    retry: RetryPolicy = RetryPolicy()
    paused: bool = False
    use_noted_ms: int = USE_NOTED_MS

    @classmethod
    def of(cls, topic: Topic, *, rows_cost_memory: bool = False) -> "Rules":
        settings = topic.settings
        records = settings.consumption_records
        if records is ConsumptionRecords.DEFAULT:
            records = ConsumptionRecords.OFF if rows_cost_memory else ConsumptionRecords.ON
        expiry_ms = 1000 * settings.group_expiry_seconds
        return cls(
            settings.max_attempts,
            settings.retention_enabled,
            settings.fairness_weights,
            records is ConsumptionRecords.ON,
            RetryPolicy.of(settings),
            topic.paused,
            min(USE_NOTED_MS, expiry_ms // 8) if expiry_ms else USE_NOTED_MS,
        )
