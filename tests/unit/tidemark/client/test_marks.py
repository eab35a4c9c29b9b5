"""Ranges of messages, as settlements name them."""

from hypothesis import given
from hypothesis import strategies as st

from tidemark.client.consume.marks import merge, ranges_of


def test_neighbours_become_one_range_in_whatever_order_they_came() -> None:
    assert merge([(4, 5), (0, 1), (1, 2), (5, 9)]) == [(0, 2), (4, 9)]


@given(st.lists(st.booleans(), max_size=50), st.integers(0, 50))
def test_open_ranges_name_every_message_that_is_not_settled_and_no_other(
    settled: list[bool], start: int
) -> None:
    marks = bytearray(settled)

    ranges = ranges_of(marks, 0, start, len(marks))

    named = [index for first, last in ranges for index in range(first, last)]
    assert named == [at for at, done in enumerate(settled) if not done and at >= start]
    assert ranges == merge(ranges), "no two ranges touch"


@given(st.sets(st.integers(0, 60)))
def test_merging_keeps_every_message(indexes: set[int]) -> None:
    merged = merge([(index, index + 1) for index in indexes])

    assert {at for first, last in merged for at in range(first, last)} == indexes
