"""Durations, moments, sizes and counts as people type and read them.

Pure. Invalid text raises ValueError with a message for the user.
"""

import re
from datetime import UTC, datetime
from typing import Final

_SECOND_MS: Final = 1000
_MINUTE_MS: Final = 60 * _SECOND_MS
_HOUR_MS: Final = 60 * _MINUTE_MS
_DAY_MS: Final = 24 * _HOUR_MS

_UNITS_MS: Final = {
    "": 1,
    "ms": 1,
    "s": _SECOND_MS,
    "m": _MINUTE_MS,
    "h": _HOUR_MS,
    "d": _DAY_MS,
}
_DURATION: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)(ms|s|m|h|d|)")
_SIZES: Final = {"": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}
_SIZE: Final = re.compile(r"([0-9]{1,18})(KiB|MiB|GiB|TiB|)")
_NUMBER_MAX: Final = 2**63 - 1
_SCALES: Final = ("", "k", "M", "G", "T")


# --- typed by people ------------------------------------------------------------------------------


def parse_duration_ms(text: str) -> int:
    """`250`, `250ms`, `1.5s`, `10m`, `2h`, `7d`."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a duration, such as 500ms, 30s, 10m, 2h or 7d")
    return _bounded(round(float(match[1]) * _UNITS_MS[match[2]]), text)


def parse_duration_s(text: str) -> int:
    """The same in whole seconds."""
    duration_ms = parse_duration_ms(text)
    if duration_ms % 1000:
        raise ValueError(f"{text!r} is not a whole number of seconds")
    return duration_ms // 1000


def parse_size_bytes(text: str) -> int:
    """`4096`, `64KiB`, `1GiB`."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size, such as 4096, 64KiB, 10MiB or 1GiB")
    return _bounded(int(match[1]) * _SIZES[match[2]], text)


def parse_moment_ms(text: str, now_ms: int) -> int:
    """`2h` (ago), or `2026-01-31T12:00:00Z`; UTC unless the text has an offset.

    Times before 1970 are the first one: nothing is older.
    """
    try:
        return max(0, now_ms - parse_duration_ms(text))
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(
            f"{text!r} is not a time, such as 2h (ago) or 2026-01-31T12:00:00Z"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0, round(moment.timestamp() * 1000))


def _bounded(number: int, text: str) -> int:
    if number > _NUMBER_MAX:
        raise ValueError(f"{text!r} is too large")
    return number


# --- read by people -------------------------------------------------------------------------------


def duration(duration_ms: int) -> str:
    """`850ms`, `12s`, `3m12s`, `2h05m`, `4d03h`: two units at most."""
    if duration_ms < 0:
        return "0ms"
    if duration_ms < _SECOND_MS:
        return f"{duration_ms}ms"
    if duration_ms < 10 * _SECOND_MS and duration_ms % _SECOND_MS:
        return f"{duration_ms / _SECOND_MS:.1f}s"
    seconds = duration_ms // _SECOND_MS
    minutes, seconds = divmod(seconds, 60)
    if not minutes:
        return f"{seconds}s"
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes}m{seconds:02}s" if seconds else f"{minutes}m"
    days, hours = divmod(hours, 24)
    if not days:
        return f"{hours}h{minutes:02}m" if minutes else f"{hours}h"
    return f"{days}d{hours:02}h" if hours else f"{days}d"


def ago(moment_ms: int | None, now_ms: int) -> str:
    """The time since a moment; `-` for never."""
    return "-" if not moment_ms else duration(max(0, now_ms - moment_ms))


def moment(moment_ms: int) -> str:
    """`2026-01-31 12:00:00`, UTC."""
    return f"{datetime.fromtimestamp(moment_ms / 1000, UTC):%Y-%m-%d %H:%M:%S}"


def count(number: int) -> str:
    return f"{number:,}"


def counted(number: int, noun: str) -> str:
    """`1 message`, `5,000 messages`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def short(number: float) -> str:
    """At most five characters: `0`, `0.4`, `950`, `12.3k`, `1.2M`."""
    if 0 < number < 9.95:
        return f"{number:.1f}".removesuffix(".0")
    for scale in _SCALES:
        if number < 999.5:
            digits = 0 if not scale or number >= 99.95 else 1
            return f"{number:.{digits}f}{scale}"
        number /= 1000
    return f"{number:.0f}P"


def size(number_bytes: int) -> str:
    """`512 B`, `1.5 KiB`, `20 MiB`."""
    value = float(number_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1023.95:
            digits = 0 if unit == "B" or value >= 99.95 else 1
            return f"{value:.{digits}f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
