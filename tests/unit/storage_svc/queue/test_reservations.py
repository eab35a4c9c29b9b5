"""Each message of a reservation ends once, in one way, and a repeat differs from a change."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_svc.queue.reservation import Ending, Reservation, Span
from storage_svc.queue.run import Run, Slice
from tidemark.errors import (
    AlreadySettled,
    Fenced,
    InvalidArgument,
    ReservationExpired,
    TidemarkError,
)

FIRST, END = 100, 110
REFUSALS = {Ending.EXPIRED: ReservationExpired, Ending.REVOKED: Fenced}


def reservation() -> Reservation:
    run = Run(FIRST - 5, 20, 200, 1_000, 0, "", "")
    return Reservation(1, "default", Slice(FIRST, END, run, 0, 1), 5_000)


def offsets(spans: list[Span]) -> set[int]:
    return {offset for start, end in spans for offset in range(start, end)}


def test_a_new_reservation_is_open_from_end_to_end() -> None:
    new = reservation()

    assert new.open == [(FIRST, END)]
    assert new.open_messages == 10
    assert new.live
    new.check_live()


def test_indexes_count_from_the_first_message() -> None:
    assert reservation().spans([(0, 1), (4, 10)]) == [(100, 101), (104, 110)]
    assert reservation().spans([(0, 5), (5, 10)]) == [(100, 105), (105, 110)]
    assert reservation().spans([]) == []


@pytest.mark.parametrize(
    "ranges",
    [
        [(0, 11)],
        [(10, 11)],
        [(3, 3)],
        [(4, 3)],
        [(0, 5), (4, 6)],
        [(5, 6), (0, 1)],
        [(0, 1), (0, 1)],
    ],
)
def test_ranges_outside_empty_overlapping_or_in_disorder_are_refused(ranges: list[Span]) -> None:
    """S3: with the field that is wrong."""
    with pytest.raises(InvalidArgument) as refused:
        reservation().spans(ranges)

    assert refused.value.metadata["field"] == "ranges"


def test_finishing_without_spans_ends_all_that_is_open() -> None:
    """V6."""
    partly = reservation()
    assert partly.finish([(102, 104)], Ending.ACK) == [(102, 104)]
    assert partly.open == [(100, 102), (104, 110)]
    assert partly.open_messages == 8

    assert partly.finish([], Ending.NACK) == [(100, 102), (104, 110)]

    assert not partly.live


def test_messages_that_ended_in_the_same_way_are_no_change() -> None:
    """V6: repeating the same settlement is a success, in part and in whole."""
    twice = reservation()
    twice.finish([(100, 105)], Ending.ACK)

    assert twice.finish([(100, 105)], Ending.ACK) == []
    assert twice.finish([(103, 108)], Ending.ACK) == [(105, 108)]
    assert twice.finish([], Ending.ACK) == [(108, 110)]
    assert twice.finish([], Ending.ACK) == []
    assert twice.finish([(100, 110)], Ending.ACK) == []


def test_repeating_a_settlement_of_the_rest_is_a_success() -> None:
    """V6: the first answer may have been lost, after other messages ended in another way."""
    rest = reservation()
    rest.finish([(100, 105)], Ending.ACK)
    assert rest.finish([], Ending.NACK) == [(105, 110)]

    assert rest.finish([], Ending.NACK) == []


def test_a_settlement_of_everything_after_another_of_everything_is_refused() -> None:
    """V6."""
    mixed = reservation()
    mixed.finish([(100, 105)], Ending.ACK)
    mixed.finish([], Ending.NACK)

    with pytest.raises(AlreadySettled):
        mixed.finish([], Ending.ACK)


@pytest.mark.parametrize(
    ("ending", "refusal"), [(Ending.EXPIRED, ReservationExpired), (Ending.REVOKED, Fenced)]
)
def test_acknowledging_the_rest_after_it_was_taken_back_is_refused(
    ending: Ending, refusal: type[TidemarkError]
) -> None:
    """V6, E8: though some messages were acknowledged before, it is no repeat."""
    taken_back = reservation()
    taken_back.finish([(100, 105)], Ending.ACK)
    taken_back.finish([], ending)

    with pytest.raises(refusal):
        taken_back.finish([], Ending.ACK)


@pytest.mark.parametrize("first", Ending)
@pytest.mark.parametrize("second", [Ending.ACK, Ending.NACK, Ending.DEAD_LETTER, Ending.RELEASE])
def test_a_different_ending_is_refused_with_the_reason(first: Ending, second: Ending) -> None:
    """V6, E8: expired, fenced or settled before, and nothing changes."""
    ended = reservation()
    ended.finish([(100, 102)], first)
    if first is second:
        return

    with pytest.raises(REFUSALS.get(first, AlreadySettled)):
        ended.finish([(101, 104)], second)

    assert ended.open == [(102, 110)]
    assert ended.done == [(100, 102, first)]


def test_a_refusal_names_how_the_messages_were_settled() -> None:
    """V6, S3."""
    ended = reservation()
    ended.finish([], Ending.DEAD_LETTER)

    with pytest.raises(AlreadySettled) as refused:
        ended.finish([], Ending.ACK)

    assert refused.value.metadata["how"] == "DEAD_LETTER"


@pytest.mark.parametrize("ending", Ending)
def test_a_reservation_that_ended_is_not_live_and_says_why(ending: Ending) -> None:
    """V6: so that it cannot be extended."""
    ended = reservation()
    ended.finish([], ending)

    assert not ended.live
    with pytest.raises(REFUSALS.get(ending, AlreadySettled)):
        ended.check_live()


def test_messages_that_all_ended_in_one_way_are_one_record() -> None:
    pieces = reservation()
    for offset in (105, 100, 109, 101, 102, 108, 103, 107, 104, 106):
        pieces.finish([(offset, offset + 1)], Ending.ACK)

    assert pieces.done == [(FIRST, END, Ending.ACK)]


def test_messages_acknowledged_one_by_one_are_few_records() -> None:
    """Design 3.5: what is written with each of ten thousand acknowledgements stays small."""
    pieces = reservation()
    for offset in range(FIRST, END - 1):
        pieces.finish([(offset, offset + 1)], Ending.ACK)

    assert pieces.done == [(FIRST, END - 1, Ending.ACK)]


@given(
    st.lists(
        st.tuples(
            st.sets(st.integers(0, 10), max_size=6).map(sorted),
            st.sampled_from(list(Ending)),
        ),
        max_size=8,
    )
)
def test_every_message_ends_once(steps: list[tuple[list[int], Ending]]) -> None:
    """V6: against one record per message, over any ranges and endings."""
    tested = reservation()
    model: dict[int, Ending | None] = dict.fromkeys(range(FIRST, END))
    for cuts, ending in steps:
        ranges = list(zip(cuts[::2], cuts[1::2], strict=False))
        spans = tested.spans(ranges)
        if not spans and not tested.live:
            continue  # what a repeat of "the rest" means has tests of its own
        wanted = offsets(spans) or {offset for offset, how in model.items() if how is None}
        refused = any(model[offset] not in (None, ending) for offset in wanted)
        try:
            changed = tested.finish(spans, ending)
        except TidemarkError:
            assert refused
        else:
            assert not refused
            assert offsets(changed) == {offset for offset in wanted if model[offset] is None}
            model.update(dict.fromkeys(wanted, ending))

        assert tested.open == sorted(tested.open)
        assert offsets(tested.open) == {offset for offset, how in model.items() if how is None}
        done = [(at, how) for start, end, how in tested.done for at in range(start, end)]
        assert sorted(done) == [(at, how) for at, how in model.items() if how is not None]
        assert tested.live == (None in model.values())
