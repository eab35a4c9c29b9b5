"""The service cannot do it now, or cannot say whether it did.

The caller made no mistake. Most of these pass by themselves, and then say after how long to repeat.
"""

from grpc import StatusCode

from tidemark.errors.base import ServiceError


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
