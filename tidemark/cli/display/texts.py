"""Payloads and names as text that is safe on a terminal: no control characters.

Pure. UTF-8 stays text; other bytes become base64 (for programs) or escapes (for people).
"""

import base64
from collections.abc import Mapping
from typing import Any


def payload_fields(payload: bytes) -> dict[str, str]:
    """A payload in a JSON object: `payload` if it is UTF-8, else `payload_base64`."""
    try:
        return {"payload": payload.decode()}
    except UnicodeDecodeError:
        return {"payload_base64": base64.b64encode(payload).decode()}


def payload_line(payload: bytes) -> str:
    """A payload on one line, with escapes where needed."""
    return printable(payload.decode("utf-8", "backslashreplace"))


def header_line(headers: Mapping[str, str]) -> str:
    return printable(" ".join(f"{key}={headers[key]}" for key in sorted(headers)))


def printable(text: str) -> str:
    """The text with escapes for control and invisible characters."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def without_bytes(value: Any) -> Any:
    """A value of dicts and lists for JSON: payloads become text or base64."""
    if isinstance(value, Mapping):
        plain: dict[str, Any] = {}
        for key, each in value.items():
            if isinstance(each, bytes):
                plain.update(payload_fields(each))
            else:
                plain[str(key)] = without_bytes(each)
        return plain
    if isinstance(value, list | tuple):
        return [without_bytes(each) for each in value]
    return value
