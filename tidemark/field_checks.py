"""Checks of numbers and times in requests that several services share."""

from google.protobuf.timestamp_pb2 import Timestamp

from tidemark import limits
from tidemark.errors import InvalidArgument


def check_range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidArgument(f"{field} is {low} to {high}, not {value}", field=field)


def check_visibility(visibility_ms: int) -> None:
    """0 stands for the visibility timeout of the topic."""
    if visibility_ms:
        low, high = limits.VISIBILITY_TIMEOUT_MS_MIN, limits.VISIBILITY_TIMEOUT_MS_MAX
        check_range("visibility_ms", visibility_ms, low, high)


def unix_ms(field: str, time: Timestamp) -> int:
    """A time in a request, in milliseconds; 0 if it is not set."""
    try:
        return int(time.ToMilliseconds())
    except ValueError:
        raise InvalidArgument("not a time", field=field) from None
