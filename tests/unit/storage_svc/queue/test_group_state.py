"""What a group is given: fair turns, honest counts, and a cursor that never runs ahead."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_svc.queue.drr import QUANTUM_BYTES, Ring
from storage_svc.queue.group import Group
from storage_svc.queue.lane import LANE_RUNS_MAX
from storage_svc.queue.reservation import Reservation
from storage_svc.queue.returned import Returned
from storage_svc.queue.run import Run, Slice

NOW_MS = 1_000
PLENTY = 10**12


def run(first: int, messages: int, key: str = "", *, each_bytes: int = 10, dead_ms: int = 0) -> Run:
    return Run(first, messages, messages * each_bytes, 0, dead_ms, key, "")


def group(*runs: Run, base: int = 0, weights: dict[str, int] | None = None) -> Group:
    made = Group("default", base, weights or {})
    for each in runs:
        made.offer(each)
    return made


def taken(group: Group, messages_max: int = PLENTY, bytes_max: int = PLENTY) -> list[Slice]:
    return group.take(messages_max, bytes_max, NOW_MS).slices


def spans(slices: list[Slice]) -> list[tuple[int, int]]:
    return [(each.start, each.end) for each in slices]


def test_an_empty_group_gives_nothing() -> None:
    assert group().take(10, PLENTY, NOW_MS) == ([], [], None, False, False)


def test_a_request_for_no_messages_gets_none() -> None:
    assert taken(group(run(0, 3)), messages_max=0) == []


def test_messages_are_given_up_to_the_number_asked_for() -> None:
    one = group(run(0, 3), run(3, 3))

    assert spans(taken(one, 2)) == [(0, 2)]
    assert spans(taken(one, 3)) == [(2, 3), (3, 5)]
    assert spans(taken(one, 3)) == [(5, 6)]
    assert taken(one) == []


def test_messages_are_given_up_to_the_bytes_asked_for() -> None:
    """S3."""
    assert spans(taken(group(run(0, 10)), bytes_max=39)) == [(0, 3)]
    assert spans(taken(group(run(0, 10)), bytes_max=40)) == [(0, 4)]


def test_a_group_that_has_given_its_last_message_waits_for_more_at_once() -> None:
    """However many were asked for: a second request is not needed to learn that none is left."""
    one, two = group(run(0, 2)), group(run(0, 2, "a"), run(2, 1, "b"))

    assert spans(taken(one, 1)) == [(0, 1)]
    assert len(one.ring) == 1
    assert spans(taken(one, 1)) == [(1, 2)]
    assert len(one.ring) == 0
    taken(two, 3)
    assert len(two.ring) == 0


def test_a_message_that_is_too_large_stays_where_none_must_be_given() -> None:
    large = group(run(0, 3, each_bytes=1_000))

    kept = large.take(PLENTY, 999, NOW_MS, at_least_one=False)

    assert kept == ([], [], None, True, False)
    assert spans(taken(large)) == [(0, 3)]


def test_one_message_is_given_whatever_its_size() -> None:
    """Or a message larger than the consumer's bound would block the queue permanently."""
    assert spans(taken(group(run(0, 3, each_bytes=1_000)), bytes_max=1)) == [(0, 1)]


def test_beyond_the_first_message_the_bound_on_bytes_holds() -> None:
    """S3: only a message that nothing else goes with may be larger than what was asked for."""
    mixed = group(run(0, 1, each_bytes=30), run(1, 1, each_bytes=1_000))

    assert spans(taken(mixed, bytes_max=40)) == [(0, 1)]


def test_large_runs_are_sliced_where_several_keys_wait() -> None:
    """V7: a quantum of each in turn."""
    half = QUANTUM_BYTES // 2
    two = group(run(0, 5, "a", each_bytes=half), run(5, 5, "b", each_bytes=half))

    assert spans(taken(two, 8)) == [(0, 2), (5, 7), (2, 4), (7, 9)]


def test_a_key_alone_is_not_sliced() -> None:
    """V7: no other key waits behind it."""
    assert spans(taken(group(run(0, 5, "a", each_bytes=QUANTUM_BYTES)))) == [(0, 5)]


def test_a_key_that_becomes_active_in_a_backlog_is_served_within_a_round() -> None:
    """V7."""
    busy = group(run(0, 1_000, "a", each_bytes=QUANTUM_BYTES))
    taken(busy, 10)

    busy.offer(run(1_000, 1, "b"))

    assert [each.run.fairness_key for each in taken(busy, 3)][:2] == ["b", "a"]


def test_a_message_larger_than_many_quanta_is_given_in_the_end() -> None:
    """V7."""
    two = group(run(0, 1, "a", each_bytes=10 * QUANTUM_BYTES), run(1, 1, "b"))

    assert sorted(spans(taken(two))) == [(0, 1), (1, 2)]


@given(
    weights=st.dictionaries(st.sampled_from("abc"), st.integers(1, 4)),
    each_bytes=st.tuples(st.integers(1, 250), st.integers(1, 250), st.integers(1, 250)),
    asked=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 2_000)), max_size=30),
)
def test_bytes_given_stay_within_a_quantum_and_a_message_of_the_share(
    weights: dict[str, int], each_bytes: tuple[int, int, int], asked: list[tuple[int, int]]
) -> None:
    """V7: however the asking is cut into pieces."""
    quantum = 100
    fair = Group("default", 0, weights)
    fair.ring = Ring(weights, quantum)
    sizes = dict(zip("abc", each_bytes, strict=True))
    for number, key in enumerate("abc"):
        fair.offer(run(number * 10_000, 10_000, key, each_bytes=sizes[key]))
    given_bytes = dict.fromkeys("abc", 0)

    for messages_max, bytes_max in asked:
        for slice_ in taken(fair, messages_max, bytes_max):
            key = slice_.run.fairness_key
            given_bytes[key] += slice_.messages * sizes[key]

    share = {key: given_bytes[key] / weights.get(key, 1) for key in "abc"}
    for one in "abc":
        for other in "abc":
            message = max(sizes[key] / weights.get(key, 1) for key in (one, other))
            assert share[one] - share[other] <= quantum + message


def test_a_dry_lane_is_named_so_that_it_can_be_read_on() -> None:
    """I1: beyond the window headers stay in the engine."""
    backlog = group(*(run(first, 1) for first in range(LANE_RUNS_MAX + 3)))

    found = backlog.take(PLENTY, PLENTY, NOW_MS)

    assert len(found.slices) == LANE_RUNS_MAX
    assert found.needs_page is backlog.lanes[""]
    assert found.needs_page.read_from == LANE_RUNS_MAX


def test_a_lane_that_exists_in_the_engine_is_read_before_anything_is_given() -> None:
    recovered = Group("default", 0, {})
    recovered.add_lane("a", 5, 3)

    found = recovered.take(1, PLENTY, NOW_MS)
    assert found.needs_page is not None
    assert found.slices == []

    found.needs_page.feed([run(3, 4, "a")], read_to=7, last=True)
    assert spans(taken(recovered)) == [(5, 7)]


def test_what_is_too_late_is_set_apart_and_takes_no_place_of_others() -> None:
    """L5."""
    late = group(run(0, 2, dead_ms=NOW_MS), run(2, 2, dead_ms=NOW_MS + 1), run(4, 1))

    found = late.take(3, PLENTY, NOW_MS)

    assert spans(found.passed) == [(0, 2)]
    assert spans(found.slices) == [(2, 4), (4, 5)]


def test_what_was_tried_too_often_is_set_apart() -> None:
    """L5: the limit may have been lowered since it came back."""
    tried = group(run(0, 3))
    taken(tried, 2)
    tried.lanes[""].give_back(Slice(0, 1, run(0, 3), 2, 2))
    tried.lanes[""].give_back(Slice(1, 2, run(0, 3), 1, 1))

    found = tried.take(PLENTY, PLENTY, NOW_MS, max_attempts=2)

    assert found.passed == [Slice(0, 1, run(0, 3), 2, 2)]
    assert spans(found.slices) == [(1, 2), (2, 3)]


def test_a_run_is_settled_once_all_of_it_was_handed_out_and_settled() -> None:
    """R2."""
    whole = run(0, 4)
    one = group(whole)
    for slice_ in (*taken(one, 3), *taken(one, 1)):
        one.hand_out(slice_)
    assert one.outstanding == {0: 4}

    assert not one.settle(whole, 3)
    assert not one.has_settled(whole)
    assert one.settle(whole, 1)

    assert one.has_settled(whole)
    assert one.settled == 4
    assert one.outstanding == {}


def test_a_run_of_which_some_was_never_handed_out_is_not_settled() -> None:
    """R2."""
    whole = run(0, 4)
    one = group(whole)
    one.hand_out(taken(one, 2)[0])

    assert not one.settle(whole, 2)

    assert not one.has_settled(whole)


def test_a_redelivery_is_counted_as_outstanding_once() -> None:
    one = group(run(0, 4))
    (slice_,) = taken(one)
    one.hand_out(slice_)

    one.hand_out(slice_._replace(deliveries=1))

    assert one.outstanding == {0: 4}


@pytest.mark.parametrize(("base", "settled"), [(0, False), (3, False), (4, True), (9, True)])
def test_runs_before_the_base_count_as_settled(base: int, settled: bool) -> None:
    """R2."""
    assert group(base=base).has_settled(run(0, 4)) is settled


def test_a_run_that_a_reservation_holds_cannot_be_dropped() -> None:
    """R1: no rule touches messages under a live reservation."""
    whole = run(0, 4)
    one = group(whole)
    (slice_,) = taken(one)
    one.hand_out(slice_)
    reservation = Reservation(1, "default", slice_, 5_000)
    one.hold(reservation)

    assert one.holds(whole)
    assert not one.holds(run(4, 1))
    with pytest.raises(AssertionError):
        one.drop_runs([whole])

    one.let_go(reservation)
    assert not one.holds(whole)


class Unwalked(dict[int, Any]):
    """A dict that may be looked into, but not walked over."""

    def values(self) -> Any:
        raise AssertionError("walked over everything that is live")


class UnwalkedList(list[Slice]):
    """A list that may be searched and cut, but not walked over."""

    def __iter__(self) -> Iterator[Slice]:
        raise AssertionError("walked over everything that was given back")


def test_what_is_asked_of_one_run_costs_nothing_for_the_others() -> None:
    """L7: a sweep over thousands of runs asks this of each of them."""
    runs = [run(first, 1) for first in range(6)]
    busy = group(*runs)
    for number, slice_ in enumerate(taken(busy)):
        busy.hand_out(slice_)
        if number < 3:
            busy.hold(Reservation(number, "default", slice_, 5_000))
        else:
            busy.lanes[""].give_back(slice_._replace(attempts=number, deliveries=1))
    busy.live = Unwalked(busy.live)
    busy.lanes[""].returned = UnwalkedList(busy.lanes[""].returned)

    assert [busy.holds(each) for each in runs] == [True] * 3 + [False] * 3
    spans = [busy.unsettled_spans(each) for each in runs]
    assert spans == [[], [], [], [(3, 4)], [(4, 5)], [(5, 6)]]
    assert busy.drop_runs([runs[4]]) == [(4, 0)]
    assert busy.unsettled_spans(runs[5]) == [(5, 6)]


def test_a_run_is_held_until_its_last_reservation_ends() -> None:
    """R1: parts of one run may be reserved by several consumers."""
    whole = run(0, 4)
    shared = group(whole)
    (slice_,) = taken(shared)
    shared.hand_out(slice_)
    halves = [slice_._replace(end=2), slice_._replace(start=2)]
    first, second = (Reservation(n, "default", each, 5_000) for n, each in enumerate(halves))
    shared.hold(first)
    shared.hold(second)

    shared.let_go(first)
    held = shared.holds(whole)
    shared.let_go(second)

    assert (held, shared.holds(whole)) == (True, False)


def test_the_cursor_stands_at_the_first_message_that_is_not_settled() -> None:
    mixed = group(run(0, 4), run(4, 4, "a"), run(8, 4))
    assert mixed.cursor(12) == 0

    for slice_ in taken(mixed):
        mixed.hand_out(slice_)
    assert mixed.cursor(12) == 12

    whole = run(4, 4, "a")
    mixed.buried[7] = Slice(7, 8, whole, 1, 1)
    assert mixed.cursor(12) == 7
    mixed.delayed[6] = Returned(Slice(6, 7, whole, 1, 1), 9_000)
    assert mixed.cursor(12) == 6
    mixed.hold(Reservation(1, "default", Slice(5, 6, whole, 0, 1), 5_000))
    assert mixed.cursor(12) == 5
    mixed.lanes["a"].give_back(Slice(4, 5, whole, 1, 1))
    assert mixed.cursor(12) == 4


def test_the_cursor_of_a_lane_that_is_not_read_yet_stands_at_its_position() -> None:
    recovered = Group("default", 0, {})
    recovered.add_lane("", 5, 3)

    assert recovered.cursor(12) == 5
