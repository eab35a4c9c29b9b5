"""A lane hands out in order, keeps what came back first, and never more than its window."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_svc.queue.lane import DROPPED_SINGLY_MAX, LANE_RUNS_MAX, Lane
from storage_svc.queue.run import Run, Slice


def run(first_offset: int, messages: int = 10, body_bytes: int = 100) -> Run:
    return Run(first_offset, messages, body_bytes, 1_000, 0, "", "")


def lane(*runs: Run, position: int = 0) -> Lane:
    made = Lane("", position)
    for each in runs:
        made.offer(each)
    return made


def taken(lane: Lane, messages: int) -> tuple[int, int]:
    slice_ = lane.take(messages)
    return slice_.start, slice_.end


@pytest.mark.parametrize(
    ("messages", "body_bytes", "each_bytes"), [(4, 100, 25), (3, 100, 33), (9, 8, 1), (1, 0, 1)]
)
def test_a_message_counts_for_the_mean_of_its_run_and_at_least_one_byte(
    messages: int, body_bytes: int, each_bytes: int
) -> None:
    """V7."""
    assert run(0, messages, body_bytes).message_bytes == each_bytes


def test_a_new_lane_is_drained_and_has_no_head() -> None:
    empty = lane()

    assert empty.head() is None
    assert empty.drained
    assert not empty.needs_page
    assert empty.mark == (0, 0)


def test_messages_are_taken_in_order_over_the_ends_of_runs() -> None:
    """S2."""
    two = lane(run(0, 3), run(3, 3))

    assert taken(two, 2) == (0, 2)
    assert two.head() == Slice(2, 3, run(0, 3))
    assert taken(two, 1) == (2, 3)
    assert taken(two, 3) == (3, 6)

    assert two.drained
    assert two.position == 6


def test_runs_of_other_keys_leave_gaps_that_are_passed_over() -> None:
    gaps = lane(run(5, 2), run(20, 1))

    assert gaps.next_offset == 5
    assert taken(gaps, 2) == (5, 7)
    assert gaps.next_offset == 20
    assert taken(gaps, 1) == (20, 21)


def test_a_group_that_begins_in_the_middle_of_a_run_gets_the_rest_of_it() -> None:
    """R2."""
    late = lane(run(0, 10), position=7)

    assert taken(late, 3) == (7, 10)


def test_the_mark_of_a_run_half_handed_out_is_its_beginning() -> None:
    """S2: its header is found again by it after a restart."""
    half = lane(run(4, 10), run(14, 2))
    assert half.mark == (0, 0)

    half.take(3)
    assert half.mark == (4, 7)

    half.take(7)
    assert half.mark == (14, 14)


def test_the_mark_is_kept_where_nothing_was_read_since_the_restart() -> None:
    """S2: it is written again by whatever changes next, and must not lose the half run."""
    recovered = Lane("", position=7, read_from=4)

    assert recovered.mark == (4, 7)


def test_a_full_window_leaves_the_rest_in_the_engine() -> None:
    """I1: a backlog costs no memory."""
    full = lane(*(run(first, 1) for first in range(LANE_RUNS_MAX)))
    assert len(full.fresh) == LANE_RUNS_MAX

    full.offer(run(LANE_RUNS_MAX, 1))
    full.offer(run(LANE_RUNS_MAX + 1, 1))

    assert len(full.fresh) == LANE_RUNS_MAX
    assert full.unread
    assert full.read_from == LANE_RUNS_MAX
    assert not full.needs_page
    assert not full.drained


def test_a_lane_is_starved_once_its_window_is_used_up_and_there_is_more() -> None:
    starved = lane(*(run(first, 1) for first in range(LANE_RUNS_MAX + 2)))
    for _ in range(LANE_RUNS_MAX):
        starved.take(1)
    assert starved.needs_page
    assert starved.next_offset == LANE_RUNS_MAX

    page = [run(LANE_RUNS_MAX, 1), run(LANE_RUNS_MAX + 1, 1)]
    starved.feed(page, read_to=LANE_RUNS_MAX + 2, last=True)

    assert taken(starved, 1) == (LANE_RUNS_MAX, LANE_RUNS_MAX + 1)
    assert taken(starved, 1) == (LANE_RUNS_MAX + 1, LANE_RUNS_MAX + 2)
    assert starved.drained

    starved.offer(run(LANE_RUNS_MAX + 2, 1))
    assert len(starved.fresh) == 1


def test_a_page_skips_what_lies_before_the_position_and_reads_on_behind_it() -> None:
    recovered = Lane("", position=7, read_from=0)

    recovered.feed([run(0, 3), run(3, 4)], read_to=7, last=False)
    assert recovered.needs_page
    assert recovered.read_from == 7

    recovered.feed([run(7, 2)], read_to=9, last=True)
    assert recovered.head() == Slice(7, 9, run(7, 2))


def test_a_page_of_which_everything_was_deleted_is_not_read_again() -> None:
    """Or a purge and a hand-out in one commit would read the same page in an endless loop."""
    purged = Lane("", position=0, read_from=0)

    purged.feed([], read_to=7, last=False)

    assert purged.needs_page
    assert purged.read_from == 7


def test_an_empty_last_page_drains_a_lane() -> None:
    recovered = Lane("", position=7, read_from=0)

    recovered.feed([], read_to=7, last=True)

    assert recovered.drained


def test_what_was_given_back_comes_first_in_the_order_of_offsets() -> None:
    """V2."""
    mixed = lane(run(0, 10))
    mixed.take(6)
    mixed.give_back(Slice(4, 5, run(0, 10), 1, 1))
    mixed.give_back(Slice(0, 2, run(0, 10), 1, 1))

    assert mixed.next_offset == 0
    assert mixed.take(1) == Slice(0, 1, run(0, 10), 1, 1)
    assert mixed.take(1) == Slice(1, 2, run(0, 10), 1, 1)
    assert mixed.take(1) == Slice(4, 5, run(0, 10), 1, 1)
    assert mixed.take(4) == Slice(6, 10, run(0, 10))


def test_neighbours_with_the_same_history_become_one_slice() -> None:
    """A thousand messages that share their history are one record."""
    whole = lane()
    whole.give_back(Slice(0, 2, run(0), 1, 1))
    whole.give_back(Slice(4, 6, run(0), 1, 1))

    merged, swallowed = whole.give_back(Slice(2, 4, run(0), 1, 1))

    assert merged == Slice(0, 6, run(0), 1, 1)
    assert 4 in swallowed
    assert 0 not in swallowed
    assert whole.returned == [merged]


@pytest.mark.parametrize(
    "other",
    [
        Slice(5, 8, run(0), 1, 1),
        Slice(4, 8, run(0), 2, 1),
        Slice(4, 8, run(0), 1, 2),
        Slice(4, 8, run(4), 1, 1),
    ],
)
def test_slices_apart_or_with_another_history_stay_apart(other: Slice) -> None:
    apart = lane()
    apart.give_back(Slice(0, 4, run(0), 1, 1))

    assert apart.give_back(other) == (other, [])

    assert len(apart.returned) == 2


def test_a_run_that_is_dropped_is_forgotten_ready_or_not() -> None:
    """R1."""
    dropped = lane(run(0, 4), run(4, 4))
    dropped.take(3)
    dropped.give_back(Slice(0, 1, run(0, 4), 1, 1))
    dropped.give_back(Slice(2, 3, run(0, 4), 2, 1))

    assert dropped.drop([run(0, 4)]) == [0, 2]

    assert taken(dropped, 4) == (4, 8)
    assert dropped.drained
    assert dropped.drop([run(4, 4)]) == []


def test_many_runs_are_dropped_as_one_by_one() -> None:
    """R1: the two ways of finding their slices agree."""
    runs = [run(first, 2) for first in range(0, 100, 2)]
    at_once, singly = lane(*runs), lane(*runs)
    for each in (at_once, singly):
        for one in runs:
            each.take(2)
            each.give_back(Slice(one.first_offset, one.first_offset + 1, one, 1, 1))

    dropped = at_once.drop(runs[10:40])
    for one in runs[10:40]:
        singly.drop([one])

    assert dropped == [one.first_offset for one in runs[10:40]]
    assert at_once.returned == singly.returned


@given(st.permutations(range(12)), st.lists(st.integers(1, 2), min_size=12, max_size=12))
def test_whatever_is_given_back_is_taken_again_once_and_in_order(
    order: list[int], attempts: list[int]
) -> None:
    """V2, V8: with the history each message had."""
    back = lane()
    records: dict[int, Slice] = {}
    for offset in order:
        merged, swallowed = back.give_back(Slice(offset, offset + 1, run(0, 12), attempts[offset]))
        for start in swallowed:
            records.pop(start, None)
        records[merged.start] = merged

        assert sorted(records.values()) == back.returned

    assert all(
        one.end < other.start or one.attempts != other.attempts
        for one, other in zip(back.returned, back.returned[1:], strict=False)
    )
    again = [back.take(1) for _ in range(12)]
    assert [each.start for each in again] == list(range(12))
    assert [each.attempts for each in again] == attempts
    assert back.drained


class Examined(list[Slice]):
    """Slices that were given back, and how many of them were looked at."""

    examined = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.examined += len(found) if isinstance(at, slice) else 1
        return found

    def __iter__(self) -> Iterator[Slice]:
        self.examined += len(self)
        return super().__iter__()


@pytest.mark.parametrize("dropped", [1, DROPPED_SINGLY_MAX + 1, 200])
def test_dropping_runs_costs_nothing_for_slices_that_lie_apart(dropped: int) -> None:
    """L7: the cost follows what is dropped, not what was given back."""
    costs = []
    for stored in (1_000, 16_000):
        lane = Lane("", stored)
        runs = [Run(at, 1, 10, 1, 0, "", "") for at in range(stored)]
        back = lane.returned = Examined(Slice(each.first_offset, each.end, each) for each in runs)

        starts = lane.drop(runs[500 : 500 + dropped])

        assert starts == list(range(500, 500 + dropped))
        assert len(lane.returned) == stored - dropped
        costs.append(back.examined)
    assert costs[1] <= 1.5 * costs[0] + 50
