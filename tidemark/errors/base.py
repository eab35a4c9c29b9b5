"""The base class of all errors and its two branches: errors of the caller and of the service."""

from collections.abc import Mapping
from typing import Final

from grpc import StatusCode

DOMAIN: Final = "tidemark"
"""The domain of every `google.rpc.ErrorInfo` that Tidemark sends."""


class TidemarkError(Exception):
    """The base class.

    `reason` and `code` belong to the class. Only an error received from a newer peer, with a reason
    that this version does not know, has its own on the instance.
    """

    reason: str
    code: StatusCode
    retry_after_ms: int | None = None
    """Delay before the same call may succeed; None if a retry does not help."""

    detail: str
    metadata: Mapping[str, str]
    answered: bool = True
    """False where the caller's side made it because no server of Tidemark answered."""

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
    """A fault of the service, or a transient state."""

    reason = "SERVICE_ERROR"
    code = StatusCode.INTERNAL
