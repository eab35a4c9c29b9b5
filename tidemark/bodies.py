"""Bodies of runs as they are serialized: batches of messages, written and recognized by hand.

Pure. A body is a MessageBatch. `MessageBatch.messages` and `Message.payload` are both field 1, so a
plain payload follows its tag and length inside a message that follows its own. Most bodies are one
such payload, or several of one size: neither making nor checking those needs an object for each.
The bytes made here are identical to those of an encoder, because the repeat of a run must be
identical (S11).
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
"""Number of sizes that have cached prefixes: small messages have few sizes."""


def body_of(payloads: Sequence[bytes]) -> bytes:
    """The body of messages that have nothing but a payload: four times as fast as messages."""
    if len(payloads) == 1:
        return _prefix(len(payloads[0])) + payloads[0]
    sizes = set(map(len, payloads))
    if len(sizes) == 1:
        return _prefix(sizes.pop()).join((b"", *payloads))
    return b"".join([_prefix(len(payload)) + payload for payload in payloads])


def has_payloads(body: bytes, count: int) -> bool:
    """Whether a body is so many messages that have nothing but a payload, all of one size; False
    where that is unclear. Looks at all of them without a Python loop."""
    if not count:
        return False
    size, rest = divmod(len(body), count)
    prefix = None if rest else _prefix_of_one(size)
    if prefix is None:
        return False
    if count == 1:
        return body.startswith(prefix)
    return all(body[at::size] == prefix[at : at + 1] * count for at in range(len(prefix)))


@lru_cache(_SIZES_MAX)
def _prefix(size: int) -> bytes:
    """The bytes before a payload of that size."""
    if not size:
        return _EMPTY
    payload_head = _FIELD_1 + _varint(size)
    return _FIELD_1 + _varint(len(payload_head) + size) + payload_head


@lru_cache(_SIZES_MAX)
def _prefix_of_one(message_bytes: int) -> bytes | None:
    """The first bytes of a message of a given length; None if no payload has that length."""
    for prefix_bytes in _PREFIX_BYTES:
        if prefix_bytes <= message_bytes:
            prefix = _prefix(message_bytes - prefix_bytes)
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
