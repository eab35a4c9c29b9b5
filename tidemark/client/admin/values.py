"""The values that administrative calls return: queues, groups, partitions, sweepers, jobs.

Pure data, built by `admin.admin` and `admin.upkeep` from the answers of services.
Durations are in milliseconds, moments in Unix milliseconds, None is not known.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Queue:
    """One queue; of one that spans several partitions, the identity is that of the first."""

    lmq_name: str
    queue_id: int
    partition: int
    materialized: bool
    messages: int
    bytes: int
    inflight: int
    next_offset: int
    oldest_publish_time_ms: int | None
    last_activity_time_ms: int
    create_time_ms: int
    paused: bool
    """Whether the queue itself is paused: its consumers get no messages."""
    topic_paused: bool
    """Whether its topic is paused, which has the same effect."""


@dataclass(frozen=True, slots=True)
class Group:
    """A consumer group of one queue, in one partition."""

    name: str
    partition: int
    cursor: int
    unsettled: int
    inflight: int
    owner_client_id: str
    owner_epoch: int


@dataclass(frozen=True, slots=True)
class QueueStats:
    """One queue with its groups."""

    queue: Queue
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A stored message, read without reserving it."""

    offset: int
    payload: bytes
    headers: Mapping[str, str]
    publish_time_ms: int
    fairness_key: str
    partition: int


@dataclass(frozen=True, slots=True)
class Eviction:
    """The outcome of an attempt to unload a queue; outcomes are a closed set (I4)."""

    outcome: str
    partitions: Mapping[int, str]

    @property
    def unloaded(self) -> bool:
        """Whether the queue is unloaded now."""
        return self.outcome in ("EVICTED", "NOT_MATERIALIZED")


@dataclass(frozen=True, slots=True)
class Redriven:
    """Dead letters that were moved back, or would be."""

    messages: int
    orphans: int


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """Messages next to each other in a dead-letter queue that died together.

    `reason` is "" and `dead_time_ms` None for messages that were published there.
    """

    partition: int
    first_offset: int
    messages: int
    reason: str
    source_lmq_name: str
    source_offset: int
    group: str
    attempt_count: int
    dead_time_ms: int | None
    detail: str


@dataclass(frozen=True, slots=True)
class DeadLetterCount:
    """Dead letters with the same reason and source."""

    reason: str
    source_lmq_name: str
    messages: int
    oldest_dead_time_ms: int | None


@dataclass(frozen=True, slots=True)
class OutboxEntry:
    """Messages that wait in the outbox of a partition for their destination."""

    partition: int
    destination_lmq_name: str
    sequence: int
    messages: int
    reason: str
    create_time_ms: int
    retry_time_ms: int | None
    """When a destination that refused is tried again."""


@dataclass(frozen=True, slots=True)
class Member:
    """A broker or a storage node of the cluster."""

    kind: str
    """BROKER or STORAGE."""
    id: str
    address: str
    partitions: tuple[int, ...]
    error: str
    """Why the called broker cannot use it; "" if it answers."""
    draining: bool = False
    """Whether a broker is to hold no partitions, because it leaves or was drained."""


@dataclass(frozen=True, slots=True)
class Assigned:
    """The broker that is to hold a partition."""

    broker_id: str
    pinned: bool
    """Whether an operator has moved it there."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The members of the cluster, and the assignment of partitions to brokers."""

    cluster_id: str
    members: tuple[Member, ...]
    assignment_version: int
    """Versions only grow; 0: there is no assignment yet."""
    assigned: Mapping[int, Assigned]
    """By partition. One that another broker holds moves."""
    static_members: bool
    """Whether brokers come from settings and the assignment never changes."""
    registry_error: str
    """Why the registry cannot be used now; "" if it answers, or there is none."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a partition does not serve."""

    reason: str
    detail: str
    since_time_ms: int


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of a partition that an operator confirmed."""

    witnessed_commit: int
    """A commit that was answered and is gone."""
    found_commit: int
    """The last commit that was found."""


@dataclass(frozen=True, slots=True)
class Partition:
    """The unit of storage, placement, ownership and sweeping, with its figures."""

    partition: int
    state: str
    faults: tuple[Fault, ...]
    broker_id: str
    broker_address: str
    broker_epoch: int
    storage_address: str
    queues: int
    materialized_queues: int
    messages: int
    bytes: int
    reservations: int
    commits: int
    published: int
    delivered: int
    acked: int
    link_state: str
    """The link of the called broker to the partition: UP, DOWN, FAULTY or MOVED."""
    link_detail: str
    """Why the link is not up."""
    paused_queues: int
    """Queues that are paused themselves."""
    paused_topics: int
    """Paused topics in the view of the partition: all of the cluster."""
    storage_epoch: int = 0
    """Raised by each opening on a store that storage nodes share; 0 where a node has the data."""


@dataclass(frozen=True, slots=True)
class Sweeper:
    """The sweeper of one partition."""

    partition: int
    state: str
    last_sweep_time_ms: int | None
    last_duration_ms: int
    last_found: int
    last_done: int
    last_stale: int
    next_in_ms: int
    failures: int
    last_error: str


@dataclass(frozen=True, slots=True)
class Job:
    """A job of the scheduler: metrics, retention or eviction."""

    name: str
    state: str
    last_pass_time_ms: int | None
    last_duration_ms: int
    last_counts: Mapping[str, int]
    next_in_ms: int
    last_error: str
    last_pass_id: str
    progress: "PassProgress | None" = None
    """The pass that is running, if any."""
    failed_partitions: Mapping[int, str] = field(default_factory=dict)
    """Partitions that the last pass could not read or clean, each with its error."""


@dataclass(frozen=True, slots=True)
class PassProgress:
    """The progress of a pass: its phase, its Spark tasks so far, and the rows of its plan."""

    phase: str
    running_for_ms: int
    tasks: int
    tasks_done: int
    rows_planned: int = 0
    rows_applied: int = 0

    @property
    def rows_left(self) -> int:
        """Planned rows that are not applied yet."""
        return self.rows_planned - self.rows_applied


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one rule for one topic; `why_not` is the reason why nothing is due."""

    topic: str
    rule: str
    due: int
    why_not: str


@dataclass(frozen=True, slots=True)
class Pass:
    """The counts of a pass, or those that a dry run expects."""

    pass_id: str
    findings: tuple[Finding, ...]
    failed_partitions: Mapping[int, str] = field(default_factory=dict)
    """Partitions that it could not read or clean, each with its error."""


@dataclass(frozen=True, slots=True)
class Removal:
    """One row of the retention history; it outlives its queue."""

    partition: int
    lmq_name: str
    messages: int
    bytes: int
    type: str
    execute_time_ms: int
    pass_id: str
