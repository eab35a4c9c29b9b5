"""The service cannot serve the call now, or the outcome is unknown.

The caller made no mistake. Most of these are transient and carry the delay before a retry.
"""

from grpc import StatusCode

from tidemark.errors.base import ServiceError


class DiskFull(ServiceError):
    """The disk is past its watermark: publishes are rejected, settles and deletions continue.

    What to do: consume or purge messages, or enlarge the disk; publishes then succeed again.
    """

    reason = "DISK_FULL"
    code = StatusCode.RESOURCE_EXHAUSTED
    retry_after_ms = 5_000


class ResourceExhausted(ServiceError):
    """The process has no capacity for more calls, streams or work in progress.

    What to do: repeat the call after the given time, with fewer calls in parallel.
    """

    reason = "RESOURCE_EXHAUSTED"
    code = StatusCode.RESOURCE_EXHAUSTED
    retry_after_ms = 500


class PartitionFaulty(ServiceError):
    """The partition does not serve: a sweep or a commit failed, or commits are lost (DATA_LOST).

    What to do: repeat the call after the given time; if it persists, `tidemark partitions` shows
    the fault. `tidemark cluster confirm-loss` goes on without lost commits.
    """

    reason = "PARTITION_FAULTY"
    code = StatusCode.UNAVAILABLE
    retry_after_ms = 1_000


class LifecycleUnavailable(ServiceError):
    """The partition waits for lifecycle, which cannot be reached.

    What to do: repeat the call after the given time; check that lifecycle_svc is running.
    """

    reason = "LIFECYCLE_UNAVAILABLE"
    code = StatusCode.UNAVAILABLE
    retry_after_ms = 1_000


class RegistryUnavailable(ServiceError):
    """The registry of members does not answer; members keep serving their partitions.

    What to do: repeat the call after the given time; check the server at TIDEMARK_REGISTRY_URL.
    """

    reason = "REGISTRY_UNAVAILABLE"
    code = StatusCode.UNAVAILABLE
    retry_after_ms = 1_000


class ShuttingDown(ServiceError):
    """The process is draining and accepts no new work.

    What to do: repeat the call; another process answers it, or this one after its restart.
    """

    reason = "SHUTTING_DOWN"
    code = StatusCode.UNAVAILABLE
    retry_after_ms = 500


class Unavailable(ServiceError):
    """The connection to a peer is broken or could not be established.

    What to do: repeat the call after the given time.
    """

    reason = "UNAVAILABLE"
    code = StatusCode.UNAVAILABLE
    retry_after_ms = 200


class CommitOutcomeUnknown(ServiceError):
    """A commit failed: the change may or may not be on disk.

    What to do: repeat a settle, or a publish with the same producer id and sequence, unchanged;
    check the state before repeating anything else.
    """

    reason = "COMMIT_OUTCOME_UNKNOWN"
    code = StatusCode.ABORTED
    retry_after_ms = 200


class DeadlineExceeded(ServiceError):
    """The call did not finish within its deadline; it may still have taken effect.

    What to do: repeat it if it is idempotent; use a longer deadline if this happens often.
    """

    reason = "DEADLINE_EXCEEDED"
    code = StatusCode.DEADLINE_EXCEEDED


class Internal(ServiceError):
    """An unexpected failure of the service.

    What to do: report it with the time of the call; the service's log has the details.
    """

    reason = "INTERNAL"
    code = StatusCode.INTERNAL
