"""The earliest deadline is always known, and what is gone costs nothing."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from storage_svc.partition.deadlines import BUCKET_MS, Deadlines

TIMES = st.integers(0, 500)


def test_without_deadlines_there_is_no_earliest() -> None:
    assert Deadlines().earliest_ms() is None


def test_the_earliest_is_told_as_the_end_of_its_bucket() -> None:
    """V1: a timer set to it finds everything in the bucket due, 10 ms at the finest."""
    deadlines = Deadlines()

    deadlines.add(1_009)
    assert deadlines.earliest_ms() == 1_010

    deadlines.add(1_000)
    assert deadlines.earliest_ms() == 1_010

    deadlines.add(999)
    assert deadlines.earliest_ms() == 1_000


def test_a_bucket_counts_until_its_last_deadline_is_gone() -> None:
    deadlines = Deadlines()
    deadlines.add(11)
    deadlines.add(12)
    deadlines.add(35)

    deadlines.discard(12)
    assert deadlines.earliest_ms() == 20

    deadlines.discard(11)
    assert deadlines.earliest_ms() == 40


def test_a_bucket_that_was_empty_for_a_while_counts_again() -> None:
    deadlines = Deadlines()
    deadlines.add(11)
    deadlines.discard(11)
    deadlines.add(12)

    assert deadlines.earliest_ms() == 20

    deadlines.discard(12)
    assert deadlines.earliest_ms() is None

    deadlines.add(13)
    assert deadlines.earliest_ms() == 20


def test_deadlines_that_went_away_are_not_kept() -> None:
    """V5: the next one is found without passing over those that are gone, again and again."""
    deadlines = Deadlines()
    for deadline_ms in range(0, 10_000, BUCKET_MS):
        deadlines.add(deadline_ms)
        deadlines.discard(deadline_ms)

    assert deadlines.earliest_ms() is None

    assert not deadlines._heap
    assert not deadlines._counts


@given(st.lists(st.tuples(st.booleans(), st.booleans(), TIMES), max_size=60))
def test_the_earliest_is_that_of_a_plain_list(steps: list[tuple[bool, bool, int]]) -> None:
    """V1, V5: whatever comes, goes and is asked in between."""
    deadlines = Deadlines()
    kept: Counter[int] = Counter()
    for adds, asks, deadline_ms in steps:
        if adds or not kept[deadline_ms]:
            deadlines.add(deadline_ms)
            kept[deadline_ms] += 1
        else:
            deadlines.discard(deadline_ms)
            kept[deadline_ms] -= 1
        if asks:
            earliest_ms = min(kept.elements(), default=None)
            expected = None if earliest_ms is None else (earliest_ms // BUCKET_MS + 1) * BUCKET_MS

            assert deadlines.earliest_ms() == expected
            assert deadlines.total == kept.total()


def test_what_is_gone_takes_up_nothing_also_behind_a_deadline_that_stays() -> None:
    """A reservation may be held for hours while others come and go beside it."""
    deadlines = Deadlines()
    deadlines.add(5)

    for bucket in range(1, 10_000):
        deadlines.add(bucket * BUCKET_MS)
        deadlines.discard(bucket * BUCKET_MS)

    assert (deadlines.total, deadlines.earliest_ms()) == (1, BUCKET_MS)
    assert len(deadlines) < 100


def test_deadlines_beyond_the_page_that_was_read_are_counted() -> None:
    """S2: a partition opens with a count and a page, however many deadlines are running."""
    deadlines = Deadlines(stored=5)
    assert (deadlines.total, deadlines.needs_page) == (5, True)

    deadlines.add_page({100: 1, 200: 1}, horizon_ms=300)
    assert (deadlines.total, deadlines.needs_page, deadlines.earliest_ms()) == (5, False, 110)

    deadlines.discard(100)
    deadlines.discard(400)
    deadlines.discard(200)
    assert (deadlines.total, deadlines.needs_page, deadlines.earliest_ms()) == (2, True, 310)

    deadlines.add_page({300: 1, 500: 1}, horizon_ms=None)
    assert (deadlines.total, deadlines.needs_page, deadlines.earliest_ms()) == (2, False, 310)


@given(
    st.lists(st.integers(0, 300), max_size=30),
    st.lists(st.tuples(st.booleans(), TIMES), max_size=40),
)
def test_pages_read_when_they_are_needed_show_the_earliest(
    stored: list[int], steps: list[tuple[bool, int]]
) -> None:
    """V1: as if all deadlines had been read at once."""
    deadlines = Deadlines(len(stored))
    kept = Counter(stored)
    for adds, deadline_ms in [*steps, (True, 1_000)]:
        if adds or not kept[deadline_ms]:
            deadlines.add(deadline_ms)
            kept[deadline_ms] += 1
        else:
            deadlines.discard(deadline_ms)
            kept[deadline_ms] -= 1
        while deadlines.needs_page:
            left = sorted(each for each in kept.elements() if each >= (deadlines.horizon_ms or 0))
            horizon_ms = next((each for each in left[2:] if each > left[0]), None)
            page = [each for each in left if horizon_ms is None or each < horizon_ms]
            deadlines.add_page(Counter(page), horizon_ms)

        assert deadlines.total == kept.total()
        if kept.total():
            assert deadlines.earliest_ms() == (min(kept.elements()) // BUCKET_MS + 1) * BUCKET_MS
