"""The call is valid, but this caller may not make it, or has used up what it may have.

Quotas are what was set for a topic, a queue, a client or a connection; a process or a disk that is
full is in `availability`.
"""

from grpc import StatusCode

from tidemark.errors.base import ClientError


class Unauthenticated(ClientError):
    """A proxy in front of the cluster requires a token or certificate that the call lacks.

    What to do: supply the credentials that the proxy expects.
    """

    reason = "UNAUTHENTICATED"
    code = StatusCode.UNAUTHENTICATED


class PermissionDenied(ClientError):
    """A proxy in front of the cluster does not allow this caller to make the call.

    What to do: ask the operator of the proxy for access.
    """

    reason = "PERMISSION_DENIED"
    code = StatusCode.PERMISSION_DENIED


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
