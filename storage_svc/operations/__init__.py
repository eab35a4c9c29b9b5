"""What can be asked of a partition's writer, and what it answers: plain values, no protos.

Operations are tuples, not dataclasses, because one is made per run on the hot path. An operation
that fails is answered with the error itself in place of its result, so that one bad operation never
spoils the frame it came in.
"""

from storage_svc.operations.administration import (
    GroupPlaced,
    PlaceGroup,
    Purge,
    Redrive,
    Removed,
    RemoveGroup,
    RemoveQueue,
    Start,
    StartAt,
    Unschedule,
)
from storage_svc.operations.claims import (
    ApplyTopic,
    Claimed,
    ClaimPartition,
    DropTopic,
    PutTopic,
    ReleaseUnreported,
    Reported,
    TopicStored,
)
from storage_svc.operations.hot_path import (
    Append,
    Appended,
    Expired,
    ExpireDue,
    Extend,
    Reserve,
    Reserved,
    ReservedSlice,
    Settle,
    Settled,
)
from storage_svc.operations.loading import (
    Eviction,
    KeepHouse,
    Materialize,
    Materialized,
    Unmaterialize,
)
from storage_svc.operations.owners import ConfirmOwnership, DropOwnership, Ownership, TakeOwnership
from storage_svc.operations.retention import (
    ApplyRetention,
    Measurement,
    RecordMetrics,
    RetentionApplied,
    RetentionRow,
    RetentionType,
)
from storage_svc.operations.sweeps import (
    Acted,
    ActionOutcome,
    AppendFromOutbox,
    Bury,
    ClearOutbox,
    DeadReason,
    ExpireReservation,
    OutboxEntry,
    PromoteScheduled,
    ReadyDelayed,
)
from tidemark.errors import TidemarkError

__all__ = [
    "Acted",
    "ActionOutcome",
    "Append",
    "AppendFromOutbox",
    "Appended",
    "ApplyRetention",
    "ApplyTopic",
    "Bury",
    "ClaimPartition",
    "Claimed",
    "ClearOutbox",
    "ConfirmOwnership",
    "DeadReason",
    "DropOwnership",
    "DropTopic",
    "Eviction",
    "ExpireDue",
    "ExpireReservation",
    "Expired",
    "Extend",
    "GroupPlaced",
    "KeepHouse",
    "Materialize",
    "Materialized",
    "Measurement",
    "Operation",
    "OutboxEntry",
    "Ownership",
    "PlaceGroup",
    "PromoteScheduled",
    "Purge",
    "PutTopic",
    "ReadyDelayed",
    "RecordMetrics",
    "Redrive",
    "ReleaseUnreported",
    "RemoveGroup",
    "RemoveQueue",
    "Removed",
    "Reported",
    "Reserve",
    "Reserved",
    "ReservedSlice",
    "Result",
    "RetentionApplied",
    "RetentionRow",
    "RetentionType",
    "Settle",
    "Settled",
    "Start",
    "StartAt",
    "TakeOwnership",
    "TopicStored",
    "Unmaterialize",
    "Unschedule",
]

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
