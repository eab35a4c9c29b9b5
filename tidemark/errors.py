"""The errors of Tidemark: one exception class per reason, each with its gRPC code.

Services raise them, `tidemark.rpc` carries them over the wire, clients catch them. This module owns
the catalogue (docs/ERRORS.md is generated from it); it never builds a proto and never logs.

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
    └── ServiceError                 ours, or passing
        ├── CommitOutcomeUnknown     ABORTED               retry
        ├── DataCorrupt              DATA_LOSS
        ├── DataDirectoryInUse       FAILED_PRECONDITION
        ├── DeadlineExceeded         DEADLINE_EXCEEDED
        ├── DiskFull                 RESOURCE_EXHAUSTED    retry
        ├── FormatNotSupported       FAILED_PRECONDITION
        ├── Internal                 INTERNAL
        ├── LifecycleUnavailable     UNAVAILABLE           retry
        ├── PartitionFaulty          UNAVAILABLE           retry
        ├── PartitionStarting        UNAVAILABLE           retry
        ├── ResourceExhausted        RESOURCE_EXHAUSTED    retry
        ├── ShuttingDown             UNAVAILABLE           retry
        └── Unavailable              UNAVAILABLE           retry

UNAVAILABLE is kept for errors after which the very same call may be repeated without thinking.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from grpc import StatusCode

_ACTION: Final = "What to do:"

DOMAIN: Final = "tidemark"
"""The domain of every `google.rpc.ErrorInfo` that Tidemark sends."""


class TidemarkError(Exception):
    """The root of the tree.

    `reason` and `code` belong to the class. Only an error revived from a newer peer, whose reason
    this version does not know, carries its own on the instance.
    """

    reason: str
    code: StatusCode
    retry_after_ms: int | None = None
    """How long to wait before the same call may succeed; None where a retry does not help."""

    detail: str
    metadata: Mapping[str, str]

    def __init__(self, detail: str, *, retry_after_ms: int | None = None, **metadata: str) -> None:
        super().__init__(detail)
        self.detail = detail
        self.metadata = metadata
        if retry_after_ms is not None:
            self.retry_after_ms = retry_after_ms

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


class ClientError(TidemarkError):
    """The caller's mistake, or a state that the caller can handle."""

    reason = "CLIENT_ERROR"
    code = StatusCode.FAILED_PRECONDITION


class ServiceError(TidemarkError):
    """A fault of the service, or a state that passes by itself."""

    reason = "SERVICE_ERROR"
    code = StatusCode.INTERNAL


# --- what was asked for is not valid ------------------------------------------------------------


class InvalidArgument(ClientError):
    """A field of the request is missing, malformed or out of its range.

    What to do: correct the field named by `field`; the same request never succeeds.
    """

    reason = "INVALID_ARGUMENT"
    code = StatusCode.INVALID_ARGUMENT


class InvalidName(ClientError):
    """A topic, lite, group, client or header name breaks the rules for names.

    What to do: choose a name within the documented length and characters.
    """

    reason = "INVALID_NAME"
    code = StatusCode.INVALID_ARGUMENT


class MessageTooLarge(ClientError):
    """One message is larger than the message limit.

    What to do: shrink the message, or store the payload elsewhere and publish a reference.
    """

    reason = "MESSAGE_TOO_LARGE"
    code = StatusCode.INVALID_ARGUMENT


class BatchTooLarge(ClientError):
    """One call or frame carries more messages or bytes than it may.

    What to do: split it; each part may be as large as the documented limit.
    """

    reason = "BATCH_TOO_LARGE"
    code = StatusCode.INVALID_ARGUMENT


class HeadersTooLarge(ClientError):
    """The headers of one message are larger than the header limit, or too many.

    What to do: move what is not needed for routing into the body.
    """

    reason = "HEADERS_TOO_LARGE"
    code = StatusCode.INVALID_ARGUMENT


# --- what was asked for is not there, or already is ---------------------------------------------


class TopicNotFound(ClientError):
    """There is no topic of this name.

    What to do: create the topic first, or check the spelling.
    """

    reason = "TOPIC_NOT_FOUND"
    code = StatusCode.NOT_FOUND


class TopicExists(ClientError):
    """A topic of this name exists already.

    What to do: use the existing topic, or update its settings.
    """

    reason = "TOPIC_EXISTS"
    code = StatusCode.ALREADY_EXISTS


class TopicNotEmpty(ClientError):
    """The topic still has queues or messages.

    What to do: purge or consume them first, or ask for deletion with its contents.
    """

    reason = "TOPIC_NOT_EMPTY"
    code = StatusCode.FAILED_PRECONDITION


class TopicVersionMismatch(ClientError):
    """The call was checked against another version of the topic's settings.

    What to do: read the topic again and repeat the call with its current version.
    """

    reason = "TOPIC_VERSION_MISMATCH"
    code = StatusCode.ABORTED


class QueueNotFound(ClientError):
    """There is no queue of this lmq_name.

    What to do: publish or subscribe to create it, or check the spelling.
    """

    reason = "QUEUE_NOT_FOUND"
    code = StatusCode.NOT_FOUND


class GroupNotFound(ClientError):
    """The queue has no group of this name.

    What to do: subscribe with the group to create it, or check the spelling.
    """

    reason = "GROUP_NOT_FOUND"
    code = StatusCode.NOT_FOUND


class RunNotScheduled(ClientError):
    """The queue has no scheduled run of this id: it never had, or the run is already due.

    What to do: take it for delivered, and settle it when it arrives.
    """

    reason = "RUN_NOT_SCHEDULED"
    code = StatusCode.NOT_FOUND


class PublisherNotFound(ClientError):
    """No publisher has this id; it was destroyed or timed out.

    What to do: nothing if it should be gone; otherwise publish again, which makes a new one.
    """

    reason = "PUBLISHER_NOT_FOUND"
    code = StatusCode.NOT_FOUND


class SessionNotFound(ClientError):
    """The broker knows no session of this client; it ended, timed out or was elsewhere.

    What to do: open a session and sync the subscriptions.
    """

    reason = "SESSION_NOT_FOUND"
    code = StatusCode.NOT_FOUND


class ClientClosed(ClientError):
    """The client, or the subscription, was closed before or during the call.

    What to do: open a new one with `tidemark.connect`; nothing comes back to life.
    """

    reason = "CLIENT_CLOSED"
    code = StatusCode.FAILED_PRECONDITION


class JobRunning(ClientError):
    """A pass of the same job is running.

    What to do: wait for it to end; `ListJobs` tells how it is.
    """

    reason = "JOB_RUNNING"
    code = StatusCode.FAILED_PRECONDITION


class PartitionNotFound(ClientError):
    """This process does not hold the partition.

    What to do: look up where the partition lives and call there.
    """

    reason = "PARTITION_NOT_FOUND"
    code = StatusCode.NOT_FOUND


# --- reservations and settling ------------------------------------------------------------------


class ReservationExpired(ClientError):
    """The reservation ran out before it was settled; its messages are ready for others.

    What to do: drop the work or make it idempotent; extend earlier, or ask for more time.
    """

    reason = "RESERVATION_EXPIRED"
    code = StatusCode.FAILED_PRECONDITION


class ReservationNotFound(ClientError):
    """The receipt names no reservation that storage remembers.

    What to do: drop the receipt; the messages come again if they were not settled.
    """

    reason = "RESERVATION_NOT_FOUND"
    code = StatusCode.NOT_FOUND


class AlreadySettled(ClientError):
    """The reservation was settled before, in another way than asked for now.

    What to do: keep the first outcome; settle every delivery from one place only.
    """

    reason = "ALREADY_SETTLED"
    code = StatusCode.FAILED_PRECONDITION


class UnknownDeliveryTag(ClientError):
    """The delivery tag does not stand for a delivery of this connection.

    What to do: settle on the connection that received the delivery, or by receipt.
    """

    reason = "UNKNOWN_DELIVERY_TAG"
    code = StatusCode.NOT_FOUND


# --- ownership ----------------------------------------------------------------------------------


class Fenced(ClientError):
    """The caller acts under an epoch that a newer owner has replaced.

    What to do: stop acting on it and drop what was held; claim or subscribe anew to own it again.
    """

    reason = "FENCED"
    code = StatusCode.FAILED_PRECONDITION


class NotOwner(ClientError):
    """This broker does not own the partition of the queue.

    What to do: call the broker whose address is in `owner`; wait for one if that is empty.
    """

    reason = "NOT_OWNER"
    code = StatusCode.FAILED_PRECONDITION


class NotSubscribed(ClientError):
    """The client has no subscription to this queue.

    What to do: subscribe first; after a reconnect, sync the subscriptions.
    """

    reason = "NOT_SUBSCRIBED"
    code = StatusCode.FAILED_PRECONDITION


class ClusterMismatch(ClientError):
    """The caller, or the data directory, belongs to another cluster.

    What to do: check the address and the cluster id in the settings.
    """

    reason = "CLUSTER_MISMATCH"
    code = StatusCode.FAILED_PRECONDITION


# --- idempotent publishing ----------------------------------------------------------------------


class SequenceTooOld(ClientError):
    """The producer's sequence is older than the window storage remembers.

    What to do: do not repeat it; look up whether the run arrived, and go on with newer sequences.
    """

    reason = "SEQUENCE_TOO_OLD"
    code = StatusCode.OUT_OF_RANGE


class SequenceConflict(ClientError):
    """The producer used this sequence before, for a different run.

    What to do: give every run a sequence of its own, and every producer an id of its own.
    """

    reason = "SEQUENCE_CONFLICT"
    code = StatusCode.FAILED_PRECONDITION


# --- rights and quotas --------------------------------------------------------------------------


class Unauthenticated(ClientError):
    """The call carries no valid token or certificate.

    What to do: supply a valid one.
    """

    reason = "UNAUTHENTICATED"
    code = StatusCode.UNAUTHENTICATED


class PermissionDenied(ClientError):
    """The caller is known but has no right to do this on this topic.

    What to do: ask an operator for the right named by `right`.
    """

    reason = "PERMISSION_DENIED"
    code = StatusCode.PERMISSION_DENIED


class Unimplemented(ClientError):
    """This server does not offer the call.

    What to do: check that client and server versions fit, and which service listens at the address.
    """

    reason = "UNIMPLEMENTED"
    code = StatusCode.UNIMPLEMENTED


class QuotaExceeded(ClientError):
    """A quota of the topic, the client or the connection is used up.

    What to do: free what the quota counts (named by `quota`), or have it raised.
    """

    reason = "QUOTA_EXCEEDED"
    code = StatusCode.RESOURCE_EXHAUSTED


class QueueFull(ClientError):
    """The queue holds as many messages or bytes as it may.

    What to do: wait until consumers have caught up, then publish again.
    """

    reason = "QUEUE_FULL"
    code = StatusCode.RESOURCE_EXHAUSTED
    retry_after_ms = 1_000


# --- the service cannot do it now ---------------------------------------------------------------


class DiskFull(ServiceError):
    """The disk is past its watermark: publishes are refused, settles and deletions go on.

    What to do: consume or purge messages, or enlarge the disk; publishes then succeed again.
    """

    reason = "DISK_FULL"
    code = StatusCode.RESOURCE_EXHAUSTED
    retry_after_ms = 5_000


class ResourceExhausted(ServiceError):
    """The process has no room for more calls, streams or work in progress.

    What to do: repeat the call after the given time, with fewer in parallel.
    """

    reason = "RESOURCE_EXHAUSTED"
    code = StatusCode.RESOURCE_EXHAUSTED
    retry_after_ms = 500


class PartitionStarting(ServiceError):
    """The partition is open, but its first sweep has not finished.

    What to do: repeat the call after the given time.
    """

    reason = "PARTITION_STARTING"
    code = StatusCode.UNAVAILABLE
    retry_after_ms = 200


class PartitionFaulty(ServiceError):
    """The partition takes no publishes because a sweep or a commit failed.

    What to do: repeat the call after the given time; if it lasts, look up the fault in the logs.
    """

    reason = "PARTITION_FAULTY"
    code = StatusCode.UNAVAILABLE
    retry_after_ms = 1_000


class LifecycleUnavailable(ServiceError):
    """The partition waits for lifecycle, which cannot be reached.

    What to do: repeat the call after the given time; check that lifecycle_svc runs.
    """

    reason = "LIFECYCLE_UNAVAILABLE"
    code = StatusCode.UNAVAILABLE
    retry_after_ms = 1_000


class ShuttingDown(ServiceError):
    """The process is draining and takes no new work.

    What to do: repeat the call; another process, or this one restarted, answers it.
    """

    reason = "SHUTTING_DOWN"
    code = StatusCode.UNAVAILABLE
    retry_after_ms = 500


class Unavailable(ServiceError):
    """The link to a peer is broken, or could not be made.

    What to do: repeat the call after the given time.
    """

    reason = "UNAVAILABLE"
    code = StatusCode.UNAVAILABLE
    retry_after_ms = 200


class CommitOutcomeUnknown(ServiceError):
    """A commit failed half way: the change may or may not be on disk.

    What to do: repeat a settle, or a publish with the same producer id and sequence, as it was;
    look before repeating anything else.
    """

    reason = "COMMIT_OUTCOME_UNKNOWN"
    code = StatusCode.ABORTED
    retry_after_ms = 200


class DeadlineExceeded(ServiceError):
    """The call was not finished within its deadline; it may still have taken effect.

    What to do: repeat it if it is idempotent, with a longer deadline if this happens often.
    """

    reason = "DEADLINE_EXCEEDED"
    code = StatusCode.DEADLINE_EXCEEDED


class Internal(ServiceError):
    """The service failed in a way it did not foresee.

    What to do: report it with the time of the call; the service's log has the details.
    """

    reason = "INTERNAL"
    code = StatusCode.INTERNAL


# --- data on disk -------------------------------------------------------------------------------


class FormatNotSupported(ServiceError):
    """The data was written in a format that this version cannot read.

    What to do: run the version that wrote it, or follow the upgrade notes.
    """

    reason = "FORMAT_NOT_SUPPORTED"
    code = StatusCode.FAILED_PRECONDITION


class DataCorrupt(ServiceError):
    """Stored data fails its checksum or cannot be decoded.

    What to do: keep the file named by `file`, restore from a copy, and check the disk.
    """

    reason = "DATA_CORRUPT"
    code = StatusCode.DATA_LOSS


class DataDirectoryInUse(ServiceError):
    """Another process has the data directory open.

    What to do: stop the other process, or choose another directory.
    """

    reason = "DATA_DIRECTORY_IN_USE"
    code = StatusCode.FAILED_PRECONDITION


def _concrete() -> tuple[type[TidemarkError], ...]:
    found = [*ClientError.__subclasses__(), *ServiceError.__subclasses__()]
    return tuple(sorted(found, key=lambda error: error.reason))


ALL: Final[tuple[type[TidemarkError], ...]] = _concrete()
"""Every error that can be raised, sorted by reason."""

BY_REASON: Final[Mapping[str, type[TidemarkError]]] = MappingProxyType(
    {error.reason: error for error in ALL}
)


def meaning_and_action(error: type[TidemarkError]) -> tuple[str, str]:
    """What an error means and what to do about it, each on one line: its docstring's halves."""
    meaning, found, action = inspect.cleandoc(error.__doc__ or "").partition(_ACTION)
    if not (found and meaning.strip() and action.strip()):
        raise ValueError(f"the docstring of {error.__name__} does not say '{_ACTION}'")
    return " ".join(meaning.split()), " ".join(action.split())
