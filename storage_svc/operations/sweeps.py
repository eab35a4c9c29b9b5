"""What sweeps plan, and the outbox."""

from enum import Enum
from typing import NamedTuple


class DeadReason(Enum):
    """Why messages leave a queue for the dead-letter topic, or for good. Stored by value."""

    ATTEMPTS_EXHAUSTED = "attempts_exhausted"
    TIME_TO_LIVE = "time_to_live"
    REJECTED = "rejected"
    MAX_WAIT_TIME = "max_wait_time_eviction"
    REDRIVE = "redrive"


class ExpireReservation(NamedTuple):
    """Expire one reservation, if its deadline is still the one that was read (L8)."""

    queue_id: int
    reservation_id: int
    expected_deadline_ms: int


class Bury(NamedTuple):
    """Take messages away that must not be delivered: to the outbox, or for good.

    ATTEMPTS_EXHAUSTED concerns one slice of one group, TIME_TO_LIVE a whole run in all groups.
    """

    queue_id: int
    group: str
    fairness_key: str
    first_offset: int
    reason: DeadReason
    expected_attempts: int = 0
    expected_dead_deadline_ms: int = 0


class PromoteScheduled(NamedTuple):
    """Give a scheduled run its offsets, if it is due when it was read to be."""

    schedule_id: int
    expected_due_ms: int


class ReadyDelayed(NamedTuple):
    """End the delay of nacked messages, if it is still the one that was read."""

    queue_id: int
    group: str
    start: int
    expected_not_before_ms: int


class OutboxEntry(NamedTuple):
    """A slice on its way to another queue: durable at its source, no longer deliverable there."""

    sequence: int
    destination_lmq_name: str
    destination_partition: int
    messages: int
    body: bytes
    fairness_key: str
    reason: DeadReason
    traceparent: str
    create_time_ms: int
    previous: int = 0  # sequence of the entry before it with the same destination


class AppendFromOutbox(NamedTuple):
    """Append an entry to its destination, if its sequence is above the high-water mark."""

    source_partition: int
    entry: OutboxEntry


class ClearOutbox(NamedTuple):
    """Forget an entry that its destination has."""

    sequence: int


class ActionOutcome(Enum):
    """What became of a planned action."""

    DONE = "DONE"
    STALE = "STALE"


class Acted(NamedTuple):
    """The outcome of an action; one that is refused is answered with its error."""

    outcome: ActionOutcome
    messages: int = 0
