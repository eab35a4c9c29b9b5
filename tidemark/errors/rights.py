"""The call is valid, but the caller is not allowed to make it, or exceeds a quota.

Quotas belong to a topic, a queue, a client or a connection. A full disk or an overloaded process is
in `availability`.
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
    """A quota of the topic, the client or the connection is exceeded.

    What to do: use less of the quota named by `quota`, or raise it.
    """

    reason = "QUOTA_EXCEEDED"
    code = StatusCode.RESOURCE_EXHAUSTED


class QueueFull(ClientError):
    """The queue is at its limit of messages or bytes.

    What to do: wait until consumers have caught up, then publish again.
    """

    reason = "QUEUE_FULL"
    code = StatusCode.RESOURCE_EXHAUSTED
    retry_after_ms = 1_000
