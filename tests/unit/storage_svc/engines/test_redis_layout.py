"""The layout of the redis engine: how values are squeezed, and how commits are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_svc.engines.engine import Batch, Table
from storage_svc.engines.keys import u64
from storage_svc.engines.redis.layout import (
    PIECE_BYTES_MAX,
    SCRIPT_US_MAX,
    WRITE_US,
    Kind,
    Piece,
    expanded,
    squeezed,
    write_pieces,
)
from storage_svc.engines.redis.server import packed_command

PIECE_ROWS = SCRIPT_US_MAX // WRITE_US[Kind.ORDERED]
VALUES = st.lists(
    st.one_of(
        st.integers(0, 80).map(bytes),
        st.binary(max_size=4),
        st.sampled_from([b"\xff", b"\xff\x00", b"\xff\x08", b"\x00\x01"]),
    ),
    max_size=20,
).map(b"".join)


@given(VALUES)
def test_a_squeezed_value_comes_back_as_it_was(value: bytes) -> None:
    """S9: whatever bytes it has, those of the escape included."""
    assert expanded(squeezed(value)) == value


@pytest.mark.parametrize("zeros", range(3, 200))
def test_runs_of_zeros_become_short(zeros: int) -> None:
    """S9: most bytes of a row are the zeros of small numbers."""
    value = b"a" + bytes(zeros) + b"b"

    short = squeezed(value)

    assert len(short) <= 2 + 8 + 2 * (zeros // 32)
    assert expanded(short) == value


def batch_of(rows: int, value: bytes = b"v", table: Table = Table.GROUPS) -> Batch:
    batch = Batch()
    for number in range(rows):
        batch.put(table, u64(number), value)
    return batch


@pytest.mark.parametrize(
    ("rows", "value", "pieces"),
    [
        (1, b"v", 1),
        (PIECE_ROWS, b"v", 1),
        (PIECE_ROWS + 1, b"v", 2),
        (3 * PIECE_ROWS, b"v", 3),
        (8, bytes(PIECE_BYTES_MAX // 4), 2),
        (3, bytes(2 * PIECE_BYTES_MAX), 3),
    ],
)
def test_a_commit_is_cut_by_rows_and_by_bytes(rows: int, value: bytes, pieces: int) -> None:
    """S9: a script holds the server for as long as it writes."""
    found = write_pieces(batch_of(rows, value, Table.RUN_BODIES))

    assert len(found) == pieces
    assert all(each.tables == (Table.RUN_BODIES,) for each in found)


def test_a_range_is_a_piece_of_its_own_in_its_place() -> None:
    """S9: it may take several scripts."""
    batch = batch_of(2)
    batch.delete_range(Table.GROUPS, b"a", b"b")
    batch.put(Table.GROUPS, b"a", b"after")

    before, deleted, after = write_pieces(batch)

    assert [each.steps[0] for each in (before, deleted, after)] == [b"hset", b"range", b"hset"]
    assert deleted.is_range


def test_a_piece_is_stored_as_an_array_of_byte_strings() -> None:
    """The server unpacks it as MessagePack."""
    assert Piece([b"ab", b""], ()).packed() == b"\xdd\0\0\0\x02\xdb\0\0\0\x02ab\xdb\0\0\0\0"


def test_a_command_travels_as_its_arguments_with_their_lengths() -> None:
    """RESP, as every server reads it."""
    packed = packed_command((b"EVALSHA", "é", 1, b"\r\n", Table.META))

    assert (
        packed
        == b"*5\r\n$7\r\nEVALSHA\r\n$2\r\n\xc3\xa9\r\n$1\r\n1\r\n$2\r\n\r\n\r\n$4\r\nmeta\r\n"
    )
