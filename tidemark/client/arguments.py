"""Arguments of public calls: checked before anything is sent, each under its name.

A value of the wrong type or beyond its range raises InvalidArgument with `field` as the name of the
argument; an illegal name raises InvalidName. Pure: it never calls a service. Rules that need the
state of the cluster are checked there.

Whole numbers are `int`, or anything with `__index__`; a bool is not a number here. Durations are
whole milliseconds or a `timedelta`, which is rounded up. A float is refused even where it is whole:
`seconds * 1000` is whole for some values only, and a call must not fail for the others.
"""

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from enum import StrEnum
from itertools import islice
from typing import Any, Final, TypeAlias, TypeVar

from tidemark import limits
from tidemark.clock import Clock
from tidemark.errors import HeadersTooLarge, InvalidArgument, MessageTooLarge
from tidemark.names import LmqName, validate_fairness_key, validate_group, validate_topic
from tidemark.settings.variables import split_address
from tidemark.topics import FRACTION_RANGES, SETTING_NAMES, SETTING_RANGES, TopicSettings

Duration: TypeAlias = int | timedelta
"""Whole milliseconds, or a timedelta."""

UINT32_MAX: Final = 2**32 - 1
UINT64_MAX: Final = 2**64 - 1
TIMESTAMP_MS_MAX: Final = 253_402_300_799_999
"""The last millisecond of the year 9999, beyond which no proto timestamp goes."""

_MILLISECOND: Final = timedelta(milliseconds=1)
_SECOND: Final = timedelta(seconds=1)
_VISIBILITY_MS: Final = (limits.VISIBILITY_TIMEOUT_MS_MIN, limits.VISIBILITY_TIMEOUT_MS_MAX)
_DEFAULTS: Final = TopicSettings()

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

# --- numbers and durations ------------------------------------------------------------------------


def check_int(field: str, value: Any, low: int, high: int = UINT64_MAX) -> int:
    """A whole number from `low` to `high`."""
    number = _whole(field, value, "an int")
    if not low <= number <= high:
        raise InvalidArgument(f"{field} is {low} to {high}, not {_shown(value)}", field=field)
    return number


def check_ms(field: str, value: Any, low: int, high: int) -> int:
    """A duration from `low` to `high` milliseconds."""
    number = _milliseconds(field, value)
    if not low <= number <= high:
        raise InvalidArgument(f"{field} is {low} to {high} ms, not {_shown(value)}", field=field)
    return number


def check_timeout_ms(field: str, value: Any) -> int:
    """A timeout of the client."""
    return check_ms(field, value, 1, limits.CLIENT_TIMEOUT_MS_MAX)


def check_visibility_ms(value: Any, *, optional: bool) -> int:
    """A visibility timeout; if it is optional, 0 means the topic's."""
    number = _milliseconds("visibility_ms", value)
    if optional and number == 0:
        return 0
    return check_ms("visibility_ms", value, *_VISIBILITY_MS)


def check_delay_ms(value: Any, high: int) -> int:
    return check_ms("delay_ms", value, 0, high)


def _milliseconds(field: str, value: Any) -> int:
    if isinstance(value, timedelta):
        return _rounded_up(value, _MILLISECOND)
    return _whole(field, value, "an int of milliseconds, or a timedelta")


def _rounded_up(value: timedelta, unit: timedelta) -> int:
    """Rounded up, because 0 often means a default: a short delay must not become none."""
    whole, rest = divmod(value, unit)
    return whole + bool(rest)


def _whole(field: str, value: Any, wanted: str) -> int:
    if type(value) is int:
        return value
    if isinstance(value, bool):
        raise wrong_type(field, value, wanted)
    try:
        return operator.index(value)
    except TypeError:
        raise wrong_type(field, value, wanted) from None


# --- names and texts ------------------------------------------------------------------------------


def check_str(field: str, value: Any, bytes_max: int | None = None) -> str:
    """A text of valid Unicode, possibly empty."""
    if not isinstance(value, str):
        raise wrong_type(field, value, "a str")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidArgument(f"{field} is not legal Unicode", field=field) from None
    if bytes_max is not None and len(value.encode()) > bytes_max:
        raise InvalidArgument(f"{field} has at most {bytes_max} bytes", field=field)
    return value


def check_lmq_name(value: Any, field: str = "lmq_name") -> str:
    LmqName.parse(check_str(field, value))
    return str(value)


def check_lmq_names(value: Any) -> list[str]:
    """The names of one or more queues, in a list or any other iterable."""
    if isinstance(value, str):
        raise InvalidArgument("lmq_names must be a list of names, not a str", field="lmq_names")
    most = limits.SUBSCRIPTIONS_PER_SESSION_MAX
    names = list(islice(check_iterable("lmq_names", value), most + 1))
    if not names:
        raise InvalidArgument("a subscription names at least one queue", field="lmq_names")
    if len(names) > most:
        raise InvalidArgument(f"a subscription has at most {most} queues", field="lmq_names")
    return [check_lmq_name(name, "lmq_names") for name in names]


def check_topic_name(value: Any, field: str = "name") -> str:
    validate_topic(check_str(field, value))
    return str(value)


def check_group(value: Any) -> str:
    validate_group(check_str("group", value))
    return str(value)


def check_fairness_key(value: Any) -> str:
    validate_fairness_key(check_str("fairness_key", value))
    return str(value)


def check_addresses(value: Any) -> list[str]:
    """One `host:port`, or several."""
    addresses = [value] if isinstance(value, str) else list(check_iterable("addresses", value))
    if not addresses:
        raise InvalidArgument("there is no address to connect to", field="addresses")
    for address in addresses:
        try:
            split_address(check_str("addresses", address))
        except ValueError:
            shown = ascii(address[:80])
            raise InvalidArgument(f"{shown} is not host:port", field="addresses") from None
    return addresses


# --- messages -------------------------------------------------------------------------------------


def check_message(payload: Any, headers: Any) -> int:
    """Check a message; returns its size, raises if it can never be stored."""
    if not isinstance(payload, bytes):
        hint = ": encode it, as in text.encode()" if isinstance(payload, str) else ""
        kind = type(payload).__name__
        raise InvalidArgument(f"a payload is bytes, not {kind}{hint}", field="payload")
    size = len(payload)
    if size > limits.MESSAGE_BYTES_MAX:
        raise MessageTooLarge(f"a payload has at most {limits.MESSAGE_BYTES_MAX} bytes, not {size}")
    return size if headers is None else size + _headers_bytes(headers)


def _headers_bytes(headers: Any) -> int:
    if not isinstance(headers, Mapping):
        raise wrong_type("headers", headers, "a mapping of str to str")
    if len(headers) > limits.HEADERS_COUNT_MAX:
        raise HeadersTooLarge(f"a message has at most {limits.HEADERS_COUNT_MAX} headers")
    try:
        size = sum(len(str.encode(key)) + len(str.encode(text)) for key, text in headers.items())
    except (TypeError, UnicodeEncodeError):
        raise InvalidArgument("headers are strings of legal Unicode", field="headers") from None
    if size > limits.HEADERS_BYTES_MAX:
        raise HeadersTooLarge(f"headers have at most {limits.HEADERS_BYTES_MAX} bytes")
    return size


# --- settings of topics ---------------------------------------------------------------------------


def check_settings(settings: Any) -> dict[str, Any]:
    """Settings of a topic by name, ready for `TopicSettings`.

    0 means the default. Seconds may also be a timedelta.
    """
    if not isinstance(settings, Mapping):
        raise wrong_type("settings", settings, "a mapping of settings by name")
    return {name: _setting(name, value) for name, value in settings.items()}


def _setting(name: Any, value: Any) -> Any:
    if name not in SETTING_NAMES:
        known = ", ".join(SETTING_NAMES)
        raise InvalidArgument(
            f"a topic has no setting {name!s:.80}; it has {known}", field=f"{name!s:.80}"
        )
    if name in SETTING_RANGES:
        low, high = SETTING_RANGES[name]
        number = _amount(name, value)
        return number if number == 0 else check_int(name, number, low, high)
    if name in FRACTION_RANGES:
        return _fraction(name, value, *FRACTION_RANGES[name])
    default = getattr(_DEFAULTS, name)
    if isinstance(default, StrEnum):
        try:
            return type(default)(value)
        except ValueError:
            known = " or ".join(repr(each.value) for each in type(default))
            raise InvalidArgument(f"{name} is {known}, not {value!r:.80}", field=name) from None
    if isinstance(default, bool):
        return check_bool(name, value)
    if name == "dead_letter_topic":
        return check_topic_name(value, name) if value != "" else ""
    return _weights(name, value)


def _fraction(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(name, value, "a number")
    if value != 0 and not low <= value <= high:
        raise InvalidArgument(f"{name} is {low:g} to {high:g}, not {value!r:.80}", field=name)
    return float(value)


def _amount(name: str, value: Any) -> int:
    """A number in the unit with which the name of the setting ends."""
    if name.endswith(("_ms", "_ms_max")):
        return _milliseconds(name, value)
    if name.endswith("_seconds") and isinstance(value, timedelta):
        return _rounded_up(value, _SECOND)
    return _whole(name, value, "an int, or a timedelta" if name.endswith("_seconds") else "an int")


def _weights(name: str, value: Any) -> dict[str, int]:
    if not isinstance(value, Mapping):
        raise wrong_type(name, value, "a mapping of fairness keys to weights")
    if len(value) > limits.FAIRNESS_WEIGHTS_MAX:
        raise InvalidArgument(f"at most {limits.FAIRNESS_WEIGHTS_MAX} weights", field=name)
    low, high = limits.FAIRNESS_WEIGHT_MIN, limits.FAIRNESS_WEIGHT_MAX
    return {
        check_fairness_key(key): check_int(name, weight, low, high) for key, weight in value.items()
    }


# --- anything else --------------------------------------------------------------------------------


def check_bool(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong_type(field, value, "a bool")
    return value


def check_iterable(field: str, value: Any) -> Iterator[Any]:
    """A list or another iterable of items; a single text or payload is not one."""
    if isinstance(value, str | bytes | bytearray | memoryview):
        raise wrong_type(field, value, "a list, or another iterable")
    try:
        items: Iterator[Any] = iter(value)
    except TypeError:
        raise wrong_type(field, value, "a list, or another iterable") from None
    return items


def check_callback(field: str, value: F | None) -> F | None:
    """A callback that is called in the event loop of the client and not awaited."""
    if value is None:
        return None
    if not callable(value):
        raise wrong_type(field, value, "a function")
    if inspect.iscoroutinefunction(value):
        raise InvalidArgument(
            f"{field} is called, not awaited: pass a plain function, which may start a task",
            field=field,
        )
    return value


def check_clock(value: Any) -> Clock:
    """A clock: it has the methods that the client calls."""
    for method in ("monotonic_ms", "sleep_ms", "wait_for"):
        if not callable(getattr(value, method, None)):
            raise wrong_type("clock", value, "a tidemark.clock.Clock")
    clock: Clock = value
    return clock


def check_instance(field: str, value: Any, *kinds: type[T]) -> T:
    """A value of one of these classes."""
    for kind in kinds:
        if isinstance(value, kind):
            return value
    raise wrong_type(field, value, " or ".join(kind.__name__ for kind in kinds))


def not_encoded(error: Exception) -> InvalidArgument:
    """The error of a call with arguments that passed the checks but cannot be encoded."""
    return InvalidArgument(f"it cannot be encoded: {error!r:.200}")


def wrong_type(field: str, value: Any, wanted: str) -> InvalidArgument:
    kind = type(value).__name__
    return InvalidArgument(f"{field} is {wanted}, not {kind}", field=field)


def _shown(value: Any) -> str:
    """A number for an error text, however long it is."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    return str(value)
