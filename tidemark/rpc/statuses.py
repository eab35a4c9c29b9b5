"""Errors on the wire: `TidemarkError` to and from `google.rpc.Status`.

The same status ends a call or is the result of one item in a frame: an ErrorInfo with reason and
metadata, and a RetryInfo if a retry may help. This module only translates: it neither raises nor
retries.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final

import grpc
from google.protobuf.any_pb2 import Any as PackedDetail
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc import StatusCode

from tidemark import errors
from tidemark.errors import TidemarkError

DETAILS_KEY: Final = "grpc-status-details-bin"
"""The trailing metadata key of a serialized Status."""

# A plain gRPC client drops a call whose trailers exceed 8 KiB, and the text is sent twice (as
# grpc-message, where one byte may take three, and in the details), so both are truncated.
_DETAIL_BYTES_MAX: Final = 1_000
_VALUE_BYTES_MAX: Final = 400  # any lmq_name fits

_ERROR_INFO: Final = "type.googleapis.com/google.rpc.ErrorInfo"
_RETRY_INFO: Final = "type.googleapis.com/google.rpc.RetryInfo"

_CODES: Final[Mapping[int, StatusCode]] = {code.value[0]: code for code in StatusCode}
_CLIENT_CODES: Final = frozenset(
    {
        StatusCode.NOT_FOUND,
        StatusCode.ALREADY_EXISTS,
        StatusCode.FAILED_PRECONDITION,
        StatusCode.OUT_OF_RANGE,
        StatusCode.ABORTED,
    }
)
# Texts of gRPC, under codes other than UNAVAILABLE, when a connection breaks during a call.
_BROKEN_LINK_TEXTS: Final = ("RST_STREAM", "Stream removed", "GOAWAY", "Internal error from Core")

_log = logging.getLogger(__name__)


def to_status(error: TidemarkError) -> Status:
    """The status of an error; `from_status` is the inverse."""
    details = [_packed_info(error)]
    if error.retry_after_ms is not None:
        details.append(_packed_retry(error.retry_after_ms))
    return Status(
        code=error.code.value[0], message=_clip(error.detail, _DETAIL_BYTES_MAX), details=details
    )


def from_status(status: Status) -> TidemarkError:
    """The error of a status. An unknown reason becomes an instance of the class for its code."""
    reason = ""
    metadata: Mapping[str, str] = {}
    retry_after_ms: int | None = None
    for detail in status.details:
        try:
            if detail.type_url == _ERROR_INFO:
                info = ErrorInfo.FromString(detail.value)
                if info.domain == errors.DOMAIN:
                    reason, metadata = info.reason, dict(info.metadata)
            elif detail.type_url == _RETRY_INFO:
                retry_after_ms = RetryInfo.FromString(detail.value).retry_delay.ToMilliseconds()
        except DecodeError:
            _log.warning("received an error with a malformed %s", detail.type_url)
    if not reason:
        return _from_code(_CODES.get(status.code, StatusCode.UNKNOWN), status.message)
    known = errors.BY_REASON.get(reason)
    code = _CODES.get(status.code, StatusCode.UNKNOWN)
    error = (known or _class_of(code))(status.message)
    error.metadata = metadata
    error.retry_after_ms = retry_after_ms
    if known is None:
        error.reason, error.code = reason, code
    return error


def to_trailers(status: Status) -> tuple[tuple[str, bytes], ...]:
    """The trailing metadata that carries a status next to gRPC's own code and text."""
    return ((DETAILS_KEY, status.SerializeToString()),)


def from_rpc_error(error: grpc.aio.AioRpcError) -> TidemarkError:
    """The error of a failed call: the server's answer or a broken connection."""
    return from_trailers(error.code(), error.details() or "", error.trailing_metadata() or ())


def from_trailers(
    code: StatusCode, text: str, trailers: Iterable[tuple[str, str | bytes]]
) -> TidemarkError:
    """The same from the parts of a finished call."""
    for key, value in trailers:
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                return from_status(Status.FromString(value))
            except DecodeError:
                _log.warning("received an error with malformed %s", DETAILS_KEY)
    error = _from_code(code, text)
    error.answered = False
    return error


def _from_code(code: StatusCode, text: str) -> TidemarkError:
    """An error from gRPC, a proxy or a foreign server, with only a code and a text."""
    detail = text or code.name
    # CANCELLED comes only from the server (cancelling here raises asyncio.CancelledError), where it
    # means that the server stopped during the call.
    if code is StatusCode.CANCELLED or any(sign in text for sign in _BROKEN_LINK_TEXTS):
        return errors.Unavailable(detail)
    if code is StatusCode.RESOURCE_EXHAUSTED and "larger than max" in text:
        return errors.BatchTooLarge(detail)
    error = _class_of(code)(detail)
    error.code = code
    return error


def _class_of(code: StatusCode) -> type[TidemarkError]:
    # The generic errors have the names of their codes: UNAVAILABLE, INTERNAL, INVALID_ARGUMENT, ...
    generic = errors.BY_REASON.get(code.name)
    if generic is not None:
        return generic
    return errors.ClientError if code in _CLIENT_CODES else errors.ServiceError


def _clip(text: str, bytes_max: int) -> str:
    if len(text) <= bytes_max and text.isascii():
        return text
    # "replace" because file names may contain lone surrogates, which proto strings reject.
    return text.encode("utf-8", "replace")[:bytes_max].decode("utf-8", "ignore")


def _packed_info(error: TidemarkError) -> PackedDetail:
    if not error.metadata:
        return _packed_reason(error.reason)
    info = ErrorInfo(reason=error.reason, domain=errors.DOMAIN)
    for key, value in error.metadata.items():
        info.metadata[key] = _clip(value, _VALUE_BYTES_MAX)
    return PackedDetail(type_url=_ERROR_INFO, value=info.SerializeToString())


# Both details are the same for most errors, so they are cached. A Status copies its details, so the
# cached ones cannot be changed.
@lru_cache(maxsize=128)
def _packed_reason(reason: str) -> PackedDetail:
    value = ErrorInfo(reason=reason, domain=errors.DOMAIN).SerializeToString()
    return PackedDetail(type_url=_ERROR_INFO, value=value)


@lru_cache(maxsize=128)
def _packed_retry(retry_after_ms: int) -> PackedDetail:
    delay = Duration(seconds=retry_after_ms // 1000, nanos=retry_after_ms % 1000 * 1_000_000)
    value = RetryInfo(retry_delay=delay).SerializeToString()
    return PackedDetail(type_url=_RETRY_INFO, value=value)
