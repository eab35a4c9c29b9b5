"""Keys sort as the values they were made from, and give them back."""

import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from storage_svc.engines import keys

U64 = st.integers(0, 2**64 - 1)
PARTS = st.tuples(st.binary(max_size=12), U64, st.binary(max_size=12))


def encoded(parts: tuple[bytes, int, bytes]) -> bytes:
    return keys.text(parts[0]) + keys.u64(parts[1]) + keys.text(parts[2])


@given(PARTS, PARTS)
@example((b"a", 1, b""), (b"a\x00", 0, b""))
@example((b"a", 1, b""), (b"ab", 0, b""))
@example((b"a\x00", 1, b""), (b"a\x01", 0, b""))
@example((b"", 0, b"\x00\x01"), (b"", 0, b"\x00\xff"))
def test_keys_sort_as_the_tuples_they_were_made_from(
    left: tuple[bytes, int, bytes], right: tuple[bytes, int, bytes]
) -> None:
    assert (encoded(left) < encoded(right)) == (left < right)
    assert (encoded(left) == encoded(right)) == (left == right)


@given(PARTS)
def test_keys_give_back_their_parts(parts: tuple[bytes, int, bytes]) -> None:
    key = encoded(parts)

    first, at = keys.read_text(key)
    second = keys.read_u64(key, at)
    third, end = keys.read_text(key, at + 8)

    assert (first, second, third) == parts
    assert end == len(key)


@given(st.integers(0, 2**32 - 1), U64, U64, U64)
def test_integers_of_every_width_round_trip(b: int, c: int, d: int, e: int) -> None:
    assert keys.read_u32(b"#" + keys.u32(b), 1) == b
    assert keys.read_u64(b"#" + keys.u64(c), 1) == c
    assert keys.read_u64x2(b"#" + keys.u64x2(c, d), 1) == (c, d)
    assert keys.read_u64x3(b"#" + keys.u64x3(c, d, e), 1) == (c, d, e)
    assert keys.u64x2(c, d) == keys.u64(c) + keys.u64(d)
    assert keys.u64x3(c, d, e) == keys.u64(c) + keys.u64x2(d, e)


@given(st.binary(max_size=8), st.binary(max_size=8))
@example(b"ab\xff", b"\xff\xff")
def test_the_end_of_a_prefix_is_the_smallest_key_above_it(prefix: bytes, key: bytes) -> None:
    if not prefix.rstrip(b"\xff"):
        with pytest.raises(ValueError, match="no key lies above"):
            keys.prefix_end(prefix)
        return

    end = keys.prefix_end(prefix)

    assert prefix + key < end
    assert key < end or not key.startswith(prefix)
    # Whatever is at or above the prefix and below its end starts with it: nothing is in between.
    assert (prefix <= key < end) == key.startswith(prefix)


@given(st.binary(max_size=8), st.binary(max_size=8))
def test_nothing_lies_between_a_key_and_its_successor(key: bytes, other: bytes) -> None:
    assert key < keys.successor(key)
    assert not key < other < keys.successor(key)


@pytest.mark.parametrize("number", [-1, 2**64])
def test_an_integer_that_does_not_fit_is_refused(number: int) -> None:
    with pytest.raises(struct.error):
        keys.u64(number)


@pytest.mark.parametrize("key", [b"", b"abc", b"abc\x00", b"abc\x00\xff"])
def test_a_text_without_its_end_is_refused(key: bytes) -> None:
    with pytest.raises(ValueError, match="not found"):
        keys.read_text(key)
