"""Keys that sort: bytes whose order is the order of the values they were made from.

This module owns the encoding of single parts; a key is its parts joined with `+`, and then sorts as
the tuple of its parts. Pure functions; the meaning of the parts is in the catalogue of
`engine.Table`.

Integers are big-endian of fixed width. Byte strings are escape-terminated: 0x00 becomes 0x00 0xFF
and the end is 0x00 0x01, so that "a" sorts before "a\\0" and "ab", whatever part follows, and all
keys below a string share a prefix that no other string's keys have. (A length prefix would sort by
length first; no key uses one.)
"""

from struct import Struct

from tidemark.name_caches import name_cache

_u16 = Struct(">H")
_u32 = Struct(">I")
_u64 = Struct(">Q")
_u64x2 = Struct(">QQ")
_u64x3 = Struct(">QQQ")

u16 = _u16.pack
u32 = _u32.pack
u64 = _u64.pack
u64x2 = _u64x2.pack
u64x3 = _u64x3.pack

read_u64x2 = _u64x2.unpack_from
read_u64x3 = _u64x3.unpack_from

_END = b"\x00\x01"


def read_u16(key: bytes, at: int = 0) -> int:
    value: int = _u16.unpack_from(key, at)[0]
    return value


def read_u32(key: bytes, at: int = 0) -> int:
    value: int = _u32.unpack_from(key, at)[0]
    return value


def read_u64(key: bytes, at: int = 0) -> int:
    value: int = _u64.unpack_from(key, at)[0]
    return value


def text(value: bytes) -> bytes:
    """A byte string of any length as one part of a key."""
    return value.replace(b"\x00", b"\x00\xff") + _END


@name_cache
def name(value: str) -> bytes:
    """`text` of a group or a fairness key: few of them are in nearly every row."""
    return text(value.encode())


def read_text(key: bytes, at: int = 0) -> tuple[bytes, int]:
    """The byte string that starts at `at`, and where the next part starts."""
    # Inside a string every 0x00 is followed by 0xFF, so the first match is the end.
    end = key.index(_END, at)
    return key[at:end].replace(b"\x00\xff", b"\x00"), end + 2


def prefix_end(prefix: bytes) -> bytes:
    """The smallest key above every key that starts with `prefix`.

    There is none above the empty prefix or above nothing but 0xFF bytes: ValueError.
    """
    head = prefix.rstrip(b"\xff")
    if not head:
        raise ValueError(f"no key lies above the prefix {prefix!r}")
    return head[:-1] + bytes((head[-1] + 1,))


def successor(key: bytes) -> bytes:
    """The smallest key above `key`: where a scan goes on."""
    return key + b"\x00"
