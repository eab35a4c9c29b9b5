"""Checks of numbers in requests that several services share."""

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
