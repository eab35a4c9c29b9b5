"""Logs: one line per event on stderr, as JSON for machines or text for people.

Lines are formatted in the thread that logs, so that they carry the current trace, and written by
another thread, so that a slow or closed stderr never blocks the event loop. Payloads never appear:
bytes and protobuf messages are logged by size, unknown objects by type.
"""

import json
import logging
import math
import os
import queue
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from enum import Enum
from pathlib import PurePath
from typing import Any, Final

from opentelemetry import trace

_LINES_WAITING_MAX: Final = 10_000
"""Lines that wait for a slow stderr; further ones are dropped and counted."""

_FLUSH_SECONDS_MAX: Final = 2.0
"""How long the process waits at its end for stderr to accept the last lines."""

_TEXT_CHARACTERS_MAX: Final = 16_384
"""Longer texts lose their middle, which is the least useful part."""

_DEPTH_MAX: Final = 4
"""How deep an extra field may be nested."""

# Attributes of every record; all others are extra fields.
_STANDARD_ATTRIBUTES: Final = frozenset(
    {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
)

_UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class LineHandler(logging.Handler):
    """Passes formatted lines to the writer thread; never blocks and never raises."""

    def __init__(self, descriptor: int | None, formatter: logging.Formatter) -> None:
        """Takes ownership of the descriptor; with None, nothing is written."""
        super().__init__()
        self.setFormatter(formatter)
        self._descriptor = descriptor
        # A line to write, an event to set once all previous lines are written, or None for the end.
        self._waiting: queue.Queue[str | threading.Event | None] = queue.Queue(_LINES_WAITING_MAX)
        self._lost = 0
        self._thread = threading.Thread(target=self._write_lines, name="log-writer", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._waiting.put_nowait(self.format(record))
        except Exception:
            # The queue is full, or the record cannot be formatted. Python's default would report
            # it on stderr, which may be the cause.
            self._lost += 1
            return
        if self._lost:
            with suppress(queue.Full):
                self._waiting.put_nowait(self.format(_lost_lines(self._lost)))
                self._lost = 0

    def flush(self) -> None:
        """Wait, for a bounded time, until everything logged so far is written."""
        written = threading.Event()
        if self._put(written):
            written.wait(_FLUSH_SECONDS_MAX)

    def close(self) -> None:
        if self._put(None):
            self._thread.join(_FLUSH_SECONDS_MAX)
        super().close()

    def _put(self, item: threading.Event | None) -> bool:
        if not self._thread.is_alive():
            return False
        try:
            self._waiting.put(item, timeout=_FLUSH_SECONDS_MAX)
        except queue.Full:
            return False
        return True

    def _write_lines(self) -> None:
        while True:
            items = self._take()
            text = "".join(f"{item}\n" for item in items if isinstance(item, str))
            self._write(text.encode(errors="backslashreplace"))
            for item in items:
                if isinstance(item, threading.Event):
                    item.set()
            if None in items:
                break
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _take(self) -> list[str | threading.Event | None]:
        """All waiting items, so that a burst costs few writes."""
        first = self._waiting.get()
        return [first, *(self._waiting.get() for _ in range(self._waiting.qsize()))]

    def _write(self, data: bytes) -> None:
        # Not through sys.stderr: data left in its buffer would make the exit fail.
        while data and self._descriptor is not None:
            try:
                data = data[os.write(self._descriptor, data) :]
            except OSError:
                return  # closed by the reader; there is nowhere to report it


class JsonFormatter(logging.Formatter):
    """One JSON object per line, in ASCII, so that no text can break a line or a terminal."""

    def __init__(self, service: str, instance: str) -> None:
        super().__init__()
        self._service = service
        self._instance = instance

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message_of(record),
            "service": self._service,
            "instance": self._instance,
            **_trace_ids(),
        }
        if record.exc_info:
            fields["exception"] = _shorten(self.formatException(record.exc_info))
        for key, value in _extras(record):
            # An extra field never replaces a standard one.
            fields[f"{key}_" if key in fields else key] = loggable(value)
        return json.dumps(fields)


class TextFormatter(logging.Formatter):
    """`time LEVEL service/instance logger: message key=value`, then the traceback, if any."""

    def __init__(self, service: str, instance: str) -> None:
        super().__init__()
        self._origin = f"{service}/{instance}"

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_time(record)} {record.levelname:<7} {self._origin} {record.name}:"
        pairs = [*_trace_ids().items(), *((key, loggable(value)) for key, value in _extras(record))]
        words = [message_of(record), *(f"{key}={value}" for key, value in pairs)]
        line = _UNPRINTABLE.sub(_escape, " ".join((head, *words)))
        if record.exc_info:
            line += "\n" + _shorten(self.formatException(record.exc_info))
        return line


def open_stderr() -> int | None:
    """A duplicate of the stderr descriptor, or None if there is none.

    Descriptor 2 itself is not safe to use: once it is closed, the next file that is opened, such as
    a data file, gets that number.
    """
    try:
        return os.dup(sys.stderr.fileno())
    except (AttributeError, OSError, ValueError):
        return None


def install(handler: logging.Handler, level: str) -> int:
    """Make it the handler of the root logger; returns the level to pass to `remove`."""
    root = logging.getLogger()
    level_before = root.level
    root.addHandler(handler)
    root.setLevel(level.upper())
    return level_before


def remove(handler: logging.Handler, level_before: int) -> None:
    root = logging.getLogger()
    root.removeHandler(handler)
    root.setLevel(level_before)
    handler.flush()
    handler.close()


def message_of(record: logging.LogRecord) -> str:
    """The message with its arguments, payloads replaced by their size."""
    arguments = record.args
    if not arguments:
        return _shorten(str(record.msg))
    try:
        if isinstance(arguments, Mapping):
            return _shorten(
                str(record.msg) % {k: _without_payload(v) for k, v in arguments.items()}
            )
        return _shorten(str(record.msg) % tuple(_without_payload(v) for v in arguments))
    except (TypeError, ValueError, KeyError):
        # A bug in a log call must not hide the event that it reports.
        return _shorten(f"{record.msg} (its arguments do not fit)")


def loggable(value: object, depth: int = _DEPTH_MAX) -> Any:
    """The value for JSON. Unknown objects are logged by type: their text may be secret."""
    match value:
        case Enum():
            return value.name
        case None | bool() | int():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case str():
            return _shorten(value)
        case PurePath():
            return str(value)
        case BaseException():
            return _shorten(f"{type(value).__name__}: {value}")
        case Mapping() if depth > 0:
            return {str(key): loggable(item, depth - 1) for key, item in value.items()}
        case list() | tuple() | set() | frozenset() if depth > 0:
            return [loggable(item, depth - 1) for item in value]
    shown = _without_payload(value)
    return shown if shown is not value else f"<{type(value).__name__}>"


def _without_payload(value: object) -> object:
    match value:
        case bytes() | bytearray():
            return f"<{len(value)} bytes>"
        case memoryview():
            return f"<{value.nbytes} bytes>"
    if hasattr(value, "SerializeToString") and hasattr(value, "ByteSize"):
        return f"<{type(value).__name__}, {value.ByteSize()} bytes>"
    return value


def _extras(record: logging.LogRecord) -> Iterator[tuple[str, object]]:
    for key, value in vars(record).items():
        if key not in _STANDARD_ATTRIBUTES:
            yield key, value


def _trace_ids() -> dict[str, str]:
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _shorten(text: str) -> str:
    if len(text) <= _TEXT_CHARACTERS_MAX:
        return text
    half = _TEXT_CHARACTERS_MAX // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}...({left_out} characters left out)...{text[-half:]}"


def _escape(character: re.Match[str]) -> str:
    return character[0].encode("unicode_escape").decode("ascii")


def _lost_lines(count: int) -> logging.LogRecord:
    return logging.makeLogRecord(
        {
            "name": __name__,
            "levelno": logging.WARNING,
            "levelname": "WARNING",
            "msg": "log lines were lost",
            "lines": count,
        }
    )
