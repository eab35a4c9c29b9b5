"""The root of all errors and its two branches: is it the caller's turn, or ours?

What every error has in common is here; the reasons are in the modules beside it.
"""

from collections.abc import Mapping
from typing import Final

from grpc import StatusCode

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
