"""Bodies of runs as they are serialized: batches of messages, written and recognized by hand.

Pure. A body is a MessageBatch. `MessageBatch.messages` and `Message.payload` are both field 1, so a
plain payload follows its tag and length inside a message that follows its own. Most bodies are one
such payload, and neither making nor checking one needs an object for each message. What is made
here is the same to the byte as what an encoder makes of it: the repeat of a run must be (S11).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

_FIELD_1: Final = b"\x0a"
"""The tag of field 1 with a length, as Protocol Buffers write it."""

_EMPTY: Final = b"\x0a\x00"
"""An empty message: an empty payload is not written."""

_PREFIX_BYTES: Final = range(len(_EMPTY), 12)
_SIZES_MAX: Final = 4096
"""Sizes whose prefixes are kept: small messages have few of them."""


def body_of(payloads: Sequence[bytes]) -> bytes:
    """The body of messages that have nothing but a payload: four times as fast as messages."""
    if len(payloads) == 1:
        return _prefix(len(payloads[0])) + payloads[0]
    sizes = set(map(len, payloads))
    if len(sizes) == 1:
        return _prefix(sizes.pop()).join((b"", *payloads))
    return b"".join([_prefix(len(payload)) + payload for payload in payloads])


def is_one_payload(body: bytes) -> bool:
    """Whether a body is one message that has nothing but a payload; False where that is unclear."""
    prefix = _prefix_of_body(len(body))
    return prefix is not None and body.startswith(prefix)


@lru_cache(_SIZES_MAX)
def _prefix(size: int) -> bytes:
    """What stands before a payload of that size."""
    if not size:
        return _EMPTY
    payload_head = _FIELD_1 + _varint(size)
    return _FIELD_1 + _varint(len(payload_head) + size) + payload_head


@lru_cache(_SIZES_MAX)
def _prefix_of_body(body_bytes: int) -> bytes | None:
    """What a body of that size begins with if it is one payload; None if no payload makes it."""
    for prefix_bytes in _PREFIX_BYTES:
        if prefix_bytes <= body_bytes:
            prefix = _prefix(body_bytes - prefix_bytes)
            if len(prefix) == prefix_bytes:
                return prefix
    return None


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
