"""What can be asked of a partition's writer, and what it answers: plain values, no protos.

Operations are tuples, not dataclasses, because one is made per run on the hot path. An operation
that fails is answered with the error itself in place of its result, so that one bad operation never
spoils the frame it came in.
"""

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from storage_svc.ledger import Claim
from storage_svc.reservations import Ending, Span
from tidemark.errors import TidemarkError
from tidemark.topics import Topic

# --- loading and unloading ------------------------------------------------------------------------


class Materialize(NamedTuple):
    """Load a queue; whoever asks tracks it, and will ask to unload it."""

    lmq_name: str
    create: bool = False


class Materialized(NamedTuple):
    """The queue is loaded."""

    queue_id: int
    activity_stamp: int
    was_cold: bool
    created: bool


class Unmaterialize(NamedTuple):
    """Unload a queue that nobody uses. A stamp of 0 stands for whatever it is."""

    lmq_name: str
    expected_activity_stamp: int = 0


class Eviction(Enum):
    """Storage's answer to `Unmaterialize` (I4)."""

    EVICTED = "EVICTED"
    NOT_PRESENT = "NOT_PRESENT"
    NOT_MATERIALIZED = "NOT_MATERIALIZED"
    HAS_INFLIGHT = "HAS_INFLIGHT"
    RACE_LOST = "RACE_LOST"


class KeepHouse(NamedTuple):
    """Unload queues that no broker tracks, forget producers that are gone."""


# --- the hot path ---------------------------------------------------------------------------------


class Append(NamedTuple):
    """Store a run at the end of its queue, which is created if it does not exist."""

    lmq_name: str
    messages: int
    body: bytes
    fairness_key: str = ""
    delay_ms: int = 0
    ttl_ms: int = 0
    traceparent: str = ""
    producer_id: str = ""
    sequence: int = 0
    topic_version: int = 0


class Appended(NamedTuple):
    """The run is on disk."""

    queue_id: int
    first_offset: int
    schedule_id: int = 0
    duplicate: bool = False


class Reserve(NamedTuple):
    """Hand out messages of one queue to one group, which is created if it does not exist."""

    lmq_name: str
    group: str
    messages_max: int
    bytes_max: int = 4 * 1024 * 1024
    visibility_ms: int = 0  # 0: the topic's
    session_id: int = 0
    owner_epoch: int = 0
    strict_bytes: bool = False  # whether a first message beyond the bytes stays where it is


class ReservedSlice(NamedTuple):
    """A run, or a part of one, that is reserved."""

    reservation_id: int
    receipt: bytes
    queue_id: int
    first_offset: int
    messages: int
    body: bytes
    attempt_count: int
    delivery_count: int
    owner_epoch: int
    visibility_ms: int
    publish_time_ms: int
    fairness_key: str
    traceparent: str


class Reserved(NamedTuple):
    """What was handed out; may be nothing."""

    slices: tuple[ReservedSlice, ...]
    more: bool = False


class Settle(NamedTuple):
    """End messages of a reservation; all that are open, if no ranges are given."""

    receipt: bytes
    ending: Ending
    index_ranges: tuple[Span, ...] = ()
    delay_ms: int = 0
    detail: str = ""
    owner_epoch: int = 0


class Extend(NamedTuple):
    """Give a reservation more time, from now; 0 stands for the topic's visibility timeout."""

    receipt: bytes
    visibility_ms: int = 0
    owner_epoch: int = 0


class Settled(NamedTuple):
    """The settlement or extension is on disk."""

    messages: int
    visibility_ms: int = 0


class ExpireDue(NamedTuple):
    """Expire reservations and end delays that are due by partition time, up to a limit."""

    limit: int = 1000


class Expired(NamedTuple):
    """What was due, in messages."""

    messages: int


# --- owners ---------------------------------------------------------------------------------------


class TakeOwnership(NamedTuple):
    """Raise the owner epoch of (group, queue) for a client, revoking what others hold (E9)."""

    lmq_name: str
    group: str
    client_id: str
    start: "Start | None" = None


class ConfirmOwnership(NamedTuple):
    """Compare (client, epoch) with what is stored; changes nothing (E7)."""

    lmq_name: str
    group: str
    client_id: str = ""
    epoch: int = 0


class DropOwnership(NamedTuple):
    """Give ownership up, if (client, epoch) is what is stored."""

    lmq_name: str
    group: str
    client_id: str
    epoch: int


class Ownership(NamedTuple):
    """Who owns (group, queue) after the operation."""

    client_id: str
    epoch: int
    matched: bool
    revoked: tuple[int, ...] = ()


# --- groups and queues ----------------------------------------------------------------------------


class StartAt(Enum):
    """From where a group is to go on."""

    EARLIEST = "earliest"
    LATEST = "latest"
    LAST = "last"
    OFFSET = "offset"


class Start(NamedTuple):
    """A start position; `number` belongs to LAST and OFFSET."""

    at: StartAt
    number: int = 0


class PlaceGroup(NamedTuple):
    """Create a group, or move its progress; without a start it keeps what it has."""

    lmq_name: str
    group: str
    start: Start | None = None
    owner_epoch: int = 0


class GroupPlaced(NamedTuple):
    """The group is there."""

    cursor: int
    created: bool
    revoked: tuple[int, ...] = ()


class RemoveGroup(NamedTuple):
    """Delete a group of a queue."""

    lmq_name: str
    group: str


class RemoveQueue(NamedTuple):
    """Delete a queue with everything in it."""

    lmq_name: str
    expected_queue_id: int = 0


class Purge(NamedTuple):
    """Delete the messages of a queue that no live reservation holds."""

    lmq_name: str


class Unschedule(NamedTuple):
    """Forget a scheduled run that is not yet due."""

    lmq_name: str
    schedule_id: int


class Redrive(NamedTuple):
    """Bring dead letters of a queue back to where they came from, or count them."""

    lmq_name: str
    reason: str = ""
    source_lmq_name: str = ""
    after_ms: int = 0
    before_ms: int = 0
    limit: int = 0
    dry_run: bool = False
    page_token: bytes = b""


class Removed(NamedTuple):
    """What was deleted."""

    messages: int
    body_bytes: int = 0
    skipped: int = 0
    next_token: bytes = b""


# --- the partition and its topics -----------------------------------------------------------------


class ClaimPartition(NamedTuple):
    """Make a broker the owner, under a broker epoch that was never used before."""

    claim: Claim
    held_epoch: int = 0  # of the caller's last claim; 0 for its first


class Claimed(NamedTuple):
    """The claim is durable."""

    broker_epoch: int
    same_incarnation: bool


class ReleaseUnreported(NamedTuple):
    """Release what the owner's incarnation holds and did not report: its answers were lost."""

    held: Mapping[int, int]
    """The reservations of the report, each with its queue."""


class Reported(NamedTuple):
    """The report was taken."""

    released: int
    gone: tuple[int, ...]
    """Reservations of the report that expired, or are not known any more."""


class PutTopic(NamedTuple):
    """Create or change a topic in its home partition."""

    topic: Topic
    create: bool
    expected_version: int = 0


class DropTopic(NamedTuple):
    """Delete a topic in its home partition."""

    name: str


class ApplyTopic(NamedTuple):
    """Bring a version of a topic from its home to this partition."""

    topic: Topic
    deleted: bool = False


class TopicStored(NamedTuple):
    """The topic as this partition has it; None if it is deleted."""

    topic: Topic | None
    version: int


# --- sweeps, outbox and retention -----------------------------------------------------------------


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


Operation = (
    Materialize
    | Unmaterialize
    | KeepHouse
    | Append
    | Reserve
    | Settle
    | Extend
    | ExpireDue
    | TakeOwnership
    | ConfirmOwnership
    | DropOwnership
    | PlaceGroup
    | RemoveGroup
    | RemoveQueue
    | Purge
    | Unschedule
    | Redrive
    | ExpireReservation
    | Bury
    | PromoteScheduled
    | ReadyDelayed
    | AppendFromOutbox
    | ClearOutbox
    | ApplyRetention
    | RecordMetrics
    | ClaimPartition
    | ReleaseUnreported
    | PutTopic
    | DropTopic
    | ApplyTopic
)
Result = (
    Materialized
    | Eviction
    | Appended
    | Reserved
    | Settled
    | Expired
    | Ownership
    | GroupPlaced
    | Removed
    | Acted
    | RetentionApplied
    | Claimed
    | Reported
    | TopicStored
    | TidemarkError
)
