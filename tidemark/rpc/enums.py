"""Names of proto enum values without their prefix: `PARTITION_STATE_SERVING` is `SERVING`.

A value that this version does not know is shown as its number, so that a newer peer breaks nothing.
"""

from typing import Any


def word_of(enum: Any, value: int, prefix: str) -> str:
    """The name of a value of a proto enum; UNKNOWN for the unspecified one."""
    try:
        name: str = enum.Name(value)
    except ValueError:
        return str(value)
    word = name.removeprefix(prefix)
    return "UNKNOWN" if word == "UNSPECIFIED" else word
