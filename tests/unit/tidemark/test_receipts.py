"""Receipts survive the wire, and nothing else passes for one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemark.errors import InvalidArgument
from tidemark.receipts import Receipt

U64 = st.integers(0, 2**64 - 1)


@given(st.integers(0, 1023), U64, U64, U64)
def test_a_receipt_survives_encoding(
    partition: int, queue_id: int, reservation_id: int, owner_epoch: int
) -> None:
    """V4: a receipt names its reservation across restarts."""
    receipt = Receipt(partition, queue_id, reservation_id, owner_epoch)

    assert Receipt.decode(receipt.encode()) == receipt


@given(st.binary(max_size=64).filter(lambda data: len(data) != 27 or data[0] != 1))
def test_anything_else_is_refused(data: bytes) -> None:
    """S3: bad input gets a reason."""
    with pytest.raises(InvalidArgument):
        Receipt.decode(data)
