"""The errors of Tidemark: one exception class per reason, each with its gRPC code.

Services raise them, `tidemark.rpc` carries them over the wire, and clients catch them. This package
owns the catalogue (docs/ERRORS.md is generated from it); it builds no protos and logs nothing. Each
module covers one subject; other packages import from here.

    TidemarkError
    ├── ClientError                  the caller's mistake, or a state the caller can handle
    │   ├── AlreadySettled           FAILED_PRECONDITION
    │   ├── BatchTooLarge            INVALID_ARGUMENT
    │   ├── ClientClosed             FAILED_PRECONDITION
    │   ├── ClusterMismatch          FAILED_PRECONDITION
    │   ├── Fenced                   FAILED_PRECONDITION
    │   ├── GroupNotFound            NOT_FOUND
    │   ├── HeadersTooLarge          INVALID_ARGUMENT
    │   ├── InvalidArgument          INVALID_ARGUMENT
    │   ├── InvalidName              INVALID_ARGUMENT
    │   ├── JobRunning               FAILED_PRECONDITION
    │   ├── MemberReplaced           FAILED_PRECONDITION
    │   ├── MembershipStatic         FAILED_PRECONDITION
    │   ├── MessageTooLarge          INVALID_ARGUMENT
    │   ├── NotOwner                 FAILED_PRECONDITION
    │   ├── NotSubscribed            FAILED_PRECONDITION
    │   ├── PartitionNotFound        NOT_FOUND
    │   ├── PermissionDenied         PERMISSION_DENIED
    │   ├── PublisherNotFound        NOT_FOUND
    │   ├── QueueFull                RESOURCE_EXHAUSTED    retry
    │   ├── QueueNotFound            NOT_FOUND
    │   ├── QuotaExceeded            RESOURCE_EXHAUSTED
    │   ├── ReservationExpired       FAILED_PRECONDITION
    │   ├── ReservationNotFound      NOT_FOUND
    │   ├── RunNotScheduled          NOT_FOUND
    │   ├── SequenceConflict         FAILED_PRECONDITION
    │   ├── SequenceTooOld           OUT_OF_RANGE
    │   ├── SessionNotFound          NOT_FOUND
    │   ├── TopicExists              ALREADY_EXISTS
    │   ├── TopicNotEmpty            FAILED_PRECONDITION
    │   ├── TopicNotFound            NOT_FOUND
    │   ├── TopicVersionMismatch     ABORTED
    │   ├── Unauthenticated          UNAUTHENTICATED
    │   ├── Unimplemented            UNIMPLEMENTED
    │   └── UnknownDeliveryTag       NOT_FOUND
    └── ServiceError                 a fault of the service, or a transient state
        ├── CommitOutcomeUnknown     ABORTED               retry
        ├── DataCorrupt              DATA_LOSS
        ├── DataDirectoryInUse       FAILED_PRECONDITION
        ├── DeadlineExceeded         DEADLINE_EXCEEDED
        ├── DiskFull                 RESOURCE_EXHAUSTED    retry
        ├── FormatNotSupported       FAILED_PRECONDITION
        ├── Internal                 INTERNAL
        ├── LifecycleUnavailable     UNAVAILABLE           retry
        ├── PartitionFaulty          UNAVAILABLE           retry
        ├── RecordUnreadable         DATA_LOSS
        ├── RegistryUnavailable      UNAVAILABLE           retry
        ├── ResourceExhausted        RESOURCE_EXHAUSTED    retry
        ├── ShuttingDown             UNAVAILABLE           retry
        ├── StoreNotFit              FAILED_PRECONDITION
        └── Unavailable              UNAVAILABLE           retry

UNAVAILABLE is reserved for errors after which the same call can always be repeated.
"""

from tidemark.errors.availability import (
    CommitOutcomeUnknown,
    DeadlineExceeded,
    DiskFull,
    Internal,
    LifecycleUnavailable,
    PartitionFaulty,
    RegistryUnavailable,
    ResourceExhausted,
    ShuttingDown,
    Unavailable,
)
from tidemark.errors.base import DOMAIN, ClientError, ServiceError, TidemarkError
from tidemark.errors.catalogue import ALL, BY_REASON, meaning_and_action
from tidemark.errors.existence import (
    ClientClosed,
    GroupNotFound,
    JobRunning,
    PartitionNotFound,
    PublisherNotFound,
    QueueNotFound,
    RunNotScheduled,
    SessionNotFound,
    TopicExists,
    TopicNotEmpty,
    TopicNotFound,
    TopicVersionMismatch,
)
from tidemark.errors.ownership import (
    AlreadySettled,
    ClusterMismatch,
    Fenced,
    MemberReplaced,
    MembershipStatic,
    NotOwner,
    NotSubscribed,
    ReservationExpired,
    ReservationNotFound,
    UnknownDeliveryTag,
)
from tidemark.errors.requests import (
    BatchTooLarge,
    HeadersTooLarge,
    InvalidArgument,
    InvalidName,
    MessageTooLarge,
    SequenceConflict,
    SequenceTooOld,
    Unimplemented,
)
from tidemark.errors.rights import PermissionDenied, QueueFull, QuotaExceeded, Unauthenticated
from tidemark.errors.stored_data import (
    DataCorrupt,
    DataDirectoryInUse,
    FormatNotSupported,
    RecordUnreadable,
    StoreNotFit,
)

__all__ = [
    "ALL",
    "BY_REASON",
    "DOMAIN",
    "AlreadySettled",
    "BatchTooLarge",
    "ClientClosed",
    "ClientError",
    "ClusterMismatch",
    "CommitOutcomeUnknown",
    "DataCorrupt",
    "DataDirectoryInUse",
    "DeadlineExceeded",
    "DiskFull",
    "Fenced",
    "FormatNotSupported",
    "GroupNotFound",
    "HeadersTooLarge",
    "Internal",
    "InvalidArgument",
    "InvalidName",
    "JobRunning",
    "LifecycleUnavailable",
    "MemberReplaced",
    "MembershipStatic",
    "MessageTooLarge",
    "NotOwner",
    "NotSubscribed",
    "PartitionFaulty",
    "PartitionNotFound",
    "PermissionDenied",
    "PublisherNotFound",
    "QueueFull",
    "QueueNotFound",
    "QuotaExceeded",
    "RecordUnreadable",
    "RegistryUnavailable",
    "ReservationExpired",
    "ReservationNotFound",
    "ResourceExhausted",
    "RunNotScheduled",
    "SequenceConflict",
    "SequenceTooOld",
    "ServiceError",
    "SessionNotFound",
    "ShuttingDown",
    "StoreNotFit",
    "TidemarkError",
    "TopicExists",
    "TopicNotEmpty",
    "TopicNotFound",
    "TopicVersionMismatch",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "UnknownDeliveryTag",
    "meaning_and_action",
]

# Callers import from here. Tracebacks, spans and pickles name this module as well.
for _error in (TidemarkError, ClientError, ServiceError, *ALL):
    _error.__module__ = __name__
