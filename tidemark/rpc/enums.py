"""Enums on the wire as words: `PARTITION_STATE_SERVING` is shown as `SERVING`.

A value that this version does not know is shown by its number: a newer peer must not break a tool.
"""

from typing import Any


def word_of(enum: Any, value: int, prefix: str) -> str:
    """The word for a value of a proto enum; UNKNOWN for the one that is unspecified."""
    try:
        name: str = enum.Name(value)
    except ValueError:
        return str(value)
    word = name.removeprefix(prefix)
    return "UNKNOWN" if word == "UNSPECIFIED" else word
