"""Retries: how long a failed delivery waits, where it goes, and what it holds back (V9)."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_svc.queue import lane as lanes
from storage_svc.queue.record import Rules
from storage_svc.queue.reservation import Ending, Reservation
from storage_svc.queue.retry import RetryLine, RetryPolicy, Turn
from storage_svc.queue.run import Run, Slice
from tests.support.queue_in_tables import Queue, spans_of
from tidemark.limits import MAX_ATTEMPTS_MAX, NACK_DELAY_MS_MAX, RETRY_MULTIPLIER_MAX

FIRST = Rules(retry=RetryPolicy(delay_ms=500, first=True))
DELAYED = Rules(retry=RetryPolicy(delay_ms=500))


def starts(reservations: list[Reservation]) -> list[int]:
    return [each.slice.start for each in reservations]


def queue_of(rules: Rules, *keys: str) -> Queue:
    """A queue with one message for each key."""
    queue = Queue(rules)
    queue.add_group()
    for key in keys:
        queue.append(1, key)
    return queue


# --- delays ---------------------------------------------------------------------------------------


def test_the_delay_grows_with_each_failed_attempt_up_to_its_maximum() -> None:
    """V9."""
    policy = RetryPolicy(delay_ms=100, delay_ms_max=1_000, multiplier=2.5)

    assert [policy.delay_after_ms(each, 0.0) for each in (1, 2, 3, 4, 5)] == [
        100,
        250,
        625,
        1_000,
        1_000,
    ]


@pytest.mark.parametrize("chance", [0.0, 0.999999])
def test_without_a_delay_chance_and_growth_change_nothing(chance: float) -> None:
    """V9: 0 is off."""
    policy = RetryPolicy(delay_ms=0, delay_ms_max=1_000, multiplier=3, jitter=1)

    assert policy.delay_after_ms(7, chance) == 0


@pytest.mark.parametrize("attempts", [2, 1_000, MAX_ATTEMPTS_MAX, 2**32 - 1])
def test_a_delay_beyond_all_bounds_is_the_longest_that_a_nack_may_have(attempts: int) -> None:
    """V9: no power of the multiplier overflows, and a maximum of 0 is no maximum of its own."""
    policy = RetryPolicy(delay_ms=NACK_DELAY_MS_MAX, multiplier=RETRY_MULTIPLIER_MAX)

    assert policy.delay_after_ms(attempts, 0.0) == NACK_DELAY_MS_MAX


@given(
    st.builds(
        RetryPolicy,
        st.integers(1, NACK_DELAY_MS_MAX),
        st.just(0) | st.integers(1, NACK_DELAY_MS_MAX),
        st.floats(1, RETRY_MULTIPLIER_MAX),
        st.floats(0, 1),
    ),
    st.integers(1, 2**32 - 1),
    st.floats(0, 1, exclude_max=True),
)
def test_chance_takes_off_at_most_its_share(
    policy: RetryPolicy, attempts: int, chance: float
) -> None:
    """V9: a delay never exceeds its maximum, and is never lost altogether."""
    whole_ms = policy._replace(jitter=0).delay_after_ms(attempts, chance)

    delay_ms = policy.delay_after_ms(attempts, chance)

    assert whole_ms * (1 - policy.jitter) <= delay_ms <= whole_ms
    assert 1 <= delay_ms <= (policy.delay_ms_max or NACK_DELAY_MS_MAX)


# --- behind what is ready -------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [Ending.NACK, Ending.EXPIRED])
def test_a_poison_message_takes_one_delivery_of_each_round(ending: Ending) -> None:
    """V9: 200 deliveries of 20 messages, of which one always fails; it once took all of them."""
    queue = queue_of(Rules(), *[""] * 20)
    poison = 0

    for _ in range(200):
        (reservation,) = queue.reserve(messages_max=1)
        if reservation.slice.start == 0:
            poison += 1
            queue.settle(reservation, ending)
        else:
            queue.settle(reservation, Ending.ACK)
            queue.append(1)  # the backlog stays as long as it was

    assert 9 <= poison <= 11


def test_messages_published_later_do_not_overtake_a_retry() -> None:
    """V9: it goes behind what is ready, not behind all that will be."""
    queue = queue_of(Rules(), "", "", "")
    (reservation,) = queue.reserve(messages_max=1)

    queue.settle(reservation, Ending.NACK)
    queue.append(1)

    assert starts(queue.reserve()) == [1, 2, 0, 3]


def test_messages_that_all_fail_take_turns() -> None:
    """V9: a retry goes behind the retries that wait, over a restart as well."""
    queue = queue_of(Rules(), "", "", "")
    served = []

    for _ in range(7):
        (reservation,) = queue.reserve(messages_max=1)
        served.append(reservation.slice.start)
        queue.settle(reservation, Ending.NACK)
        queue.restart()

    assert served == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("ending", [Ending.RELEASE, Ending.REVOKED, Ending.DISCONNECT])
@pytest.mark.parametrize("rules", [DELAYED, FIRST], ids=["behind", "first"])
def test_what_did_not_fail_returns_in_place_and_at_once(rules: Rules, ending: Ending) -> None:
    """V9."""
    queue = queue_of(rules, "", "", "")
    (reservation,) = queue.reserve(messages_max=1)

    queue.settle(reservation, ending)

    assert starts(queue.reserve()) == [0, 1, 2]


def test_a_nack_with_a_delay_of_its_own_ignores_the_policy() -> None:
    """V9: neither the delay nor the place of the topic applies, and nothing is held back."""
    queue = queue_of(FIRST, "", "", "")
    group = queue.state.group("default")
    (reservation,) = queue.reserve(messages_max=1)

    queue.settle(reservation, Ending.NACK, delay_ms=7)
    assert queue.tables.delays == {(queue.now_ms + 7, "default", 0)}
    assert starts(queue.reserve(messages_max=1)) == [1]
    queue.state.ready_delayed(group, 0, queue.tables)

    assert starts(queue.reserve()) == [0, 2]


def test_what_expired_before_the_application_was_given_it_returns_in_place() -> None:
    """V9, K1: nothing was tried, so nothing has failed."""
    queue = queue_of(Rules())
    queue.append(4)
    queue.append(1)
    (reservation,) = queue.reserve(messages_max=4)
    reservation.note_given(1)

    queue.settle(reservation, Ending.EXPIRED)

    assert spans_of(queue.reserve()) == [(1, 4, 0, 2), (4, 5, 0, 1), (0, 1, 1, 2)]


def test_a_delayed_retry_goes_behind_what_is_ready_when_its_delay_ends() -> None:
    """V9."""
    queue = queue_of(DELAYED, "", "")
    (reservation,) = queue.reserve(messages_max=1)

    queue.settle(reservation, Ending.NACK)
    assert queue.tables.delays == {(queue.now_ms + 500, "default", 0)}
    queue.append(1)
    queue.restart()
    queue.state.ready_delayed(queue.state.group("default"), 0, queue.tables)
    queue.append(1)
    queue.restart()

    assert starts(queue.reserve()) == [1, 2, 0, 3]
    assert queue.tables.returned == {}


def test_a_retry_waits_for_runs_that_are_still_in_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """V9: what is ready is more than what is in memory."""
    monkeypatch.setattr(lanes, "LANE_RUNS_MAX", 2)
    queue = queue_of(Rules(), *[""] * 7)
    (reservation,) = queue.reserve(messages_max=1)

    queue.settle(reservation, Ending.NACK)

    assert starts(queue.reserve()) == [1, 2, 3, 4, 5, 6, 0]


def test_a_retry_handed_out_in_part_keeps_its_turn() -> None:
    """V9, S2: the rest has a record of its own."""
    queue = queue_of(Rules())
    queue.append(4)
    queue.append(1)
    (reservation,) = queue.reserve(messages_max=4)
    queue.settle(reservation, Ending.NACK)
    queue.settle(queue.reserve(messages_max=1)[0], Ending.ACK)

    (part,) = queue.reserve(messages_max=1)
    queue.append(1)
    queue.restart()

    assert spans_of([part]) == [(0, 1, 1, 2)]
    assert spans_of(queue.reserve()) == [(1, 4, 1, 2), (5, 6, 0, 1)]
    assert queue.tables.returned == {}


def test_failures_without_end_are_served_before_more_messages_join_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """V9: a retry line is in memory, so it is bounded."""
    monkeypatch.setattr(lanes, "RETRIES_MAX", 4)
    queue = queue_of(Rules(), *[""] * 50)
    longest = 0
    served = set()

    for _ in range(120):
        (reservation,) = queue.reserve(messages_max=1)
        served.add(reservation.slice.start)
        queue.settle(reservation, Ending.NACK)
        retries = queue.state.group("default").lanes[""].retries
        longest = max(longest, 0 if retries is None else len(retries))

    assert longest == 4
    assert len(served) == 4


# --- first, holding back --------------------------------------------------------------------------


def test_a_delayed_message_that_goes_first_holds_back_its_key_and_nothing_else() -> None:
    """V9: the order of its key is kept; other keys, groups and queues go on."""
    queue = queue_of(FIRST, "a", "a", "b", "b")
    queue.add_group("other")
    (reservation,) = queue.reserve(messages_max=1)

    queue.settle(reservation, Ending.NACK)

    assert starts(queue.reserve()) == [2, 3]
    assert sorted(starts(queue.reserve("other"))) == [0, 1, 2, 3]
    queue.restart()
    assert queue.reserve() == []
    queue.state.ready_delayed(queue.state.group("default"), 0, queue.tables)
    assert starts(queue.reserve()) == [0, 1]


def test_messages_before_a_delayed_one_are_not_held_back() -> None:
    """V9: handing them out keeps the order."""
    queue = queue_of(FIRST, "", "", "")
    first, second, third = queue.reserve()

    queue.settle(second, Ending.NACK)
    queue.settle(third, Ending.RELEASE)
    queue.settle(first, Ending.RELEASE)

    assert starts(queue.reserve()) == [0]


def test_consumers_that_wait_get_a_notice_when_a_delay_ends() -> None:
    """V2, V9."""
    queue = queue_of(FIRST, "", "")
    group = queue.state.group("default")
    queue.settle(queue.reserve(messages_max=1)[0], Ending.NACK)
    assert queue.reserve() == []
    group.has_waiters = True

    queue.state.ready_delayed(group, 0, queue.tables)

    assert queue.tables.told == ["default"]


@pytest.mark.parametrize("settles", [False, True], ids=["deleted", "settled"])
def test_a_delayed_message_that_is_gone_holds_nothing_back(settles: bool) -> None:
    """V9, R1: consumers that wait for what comes after it get a notice."""
    queue = queue_of(FIRST)
    gone = queue.append(1)
    queue.append(1)
    group = queue.state.group("default")
    queue.settle(queue.reserve(messages_max=1)[0], Ending.NACK)
    assert queue.reserve() == []
    group.has_waiters = True

    if settles:
        queue.state.settle_rest(gone, queue.tables)
    else:
        queue.state.delete_runs([gone], queue.tables)

    assert queue.tables.told == ["default"]
    assert starts(queue.reserve()) == [1]
    assert queue.tables.delays == set()


def test_a_delayed_message_beyond_a_lower_limit_of_attempts_holds_nothing_back() -> None:
    """V9, L5."""
    queue = queue_of(FIRST, "", "")
    group = queue.state.group("default")
    queue.settle(queue.reserve(messages_max=1)[0], Ending.NACK)
    queue.obey(FIRST._replace(max_attempts=1))
    group.has_waiters = True

    queue.state.ready_delayed(group, 0, queue.tables)

    assert queue.tables.told == ["default"]
    assert starts(queue.reserve()) == [1]


# --- the line -------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.integers(0, 11), st.sampled_from([Turn(12, 1), Turn(12, 2), Turn(14, 3)])),
        unique_by=lambda each: each[0],
    )
)
def test_a_retry_line_is_in_the_order_of_turns_and_merges_neighbours(
    added: list[tuple[int, Turn]],
) -> None:
    """V9."""
    run = Run(0, 12, 120, 0, 0, "", "")
    line = RetryLine()
    records: set[int] = set()

    for start, turn in added:
        merged, swallowed = line.add(Slice(start, start + 1, run, 1, 1), turn)
        records = (records - set(swallowed)) | {merged.start}
        assert records == {each.start for each in line.slices}

    expected = sorted((turn, start) for start, turn in added)
    assert [at for each in line.slices for at in range(each.start, each.end)] == [
        start for _, start in expected
    ]
    joined = sum(one[0] == other[0] and one[1] + 1 == other[1] for one, other in pairwise(expected))
    assert len(line) == len(added) - joined
    assert sorted(line.of(run)) == sorted(line.slices)
    assert sorted(line.drop([run])) == sorted(records)
    assert not line
