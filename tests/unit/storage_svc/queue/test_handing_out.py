"""What a queue hands out: what came back first, nothing too often and nothing too late."""

import pytest

from storage_svc.queue.record import Rules
from storage_svc.queue.reservation import Ending
from storage_svc.queue.retry import RetryPolicy
from storage_svc.queue.returned import ReturnPlace
from storage_svc.queue.run import Slice
from tests.support.queue_in_tables import Queue, spans_of


@pytest.mark.parametrize(
    ("ending", "attempts"),
    [
        (Ending.EXPIRED, 1),
        (Ending.NACK, 1),
        (Ending.DISCONNECT, 1),
        (Ending.RELEASE, 0),
        (Ending.REVOKED, 0),
    ],
)
def test_messages_that_come_back_count_an_attempt_where_one_was_made(
    ending: Ending, attempts: int
) -> None:
    """V2, V8: attempts grow on expiry, nack and disconnect, deliveries with every hand-out."""
    queue = Queue()
    queue.add_group()
    queue.append(2)
    (reservation,) = queue.reserve()

    queue.settle(reservation, ending)

    assert spans_of(queue.reserve()) == [(0, 2, attempts, 2)]


def test_messages_that_came_back_are_handed_out_before_new_ones() -> None:
    """S2."""
    queue = Queue(Rules(retry=RetryPolicy(first=True)))
    queue.add_group()
    queue.append(4)
    queue.append(4)
    first, second = queue.reserve(messages_max=2), queue.reserve(messages_max=2)

    queue.settle(second[0], Ending.NACK)
    queue.settle(first[0], Ending.RELEASE)

    assert spans_of(queue.reserve(messages_max=5)) == [(0, 2, 0, 2), (2, 4, 1, 2), (4, 5, 0, 1)]


def test_a_delayed_nack_is_ready_when_its_delay_ends_and_not_before() -> None:
    """V8."""
    queue = Queue()
    group = queue.add_group()
    queue.append(2)
    (reservation,) = queue.reserve()

    queue.settle(reservation, Ending.NACK, delay_ms=4_000)
    assert queue.reserve() == []
    assert queue.tables.delays == {(5_000, "default", 0)}

    assert queue.state.ready_delayed(group, 0, queue.tables) == 2
    assert queue.tables.delays == set()
    assert spans_of(queue.reserve()) == [(0, 2, 1, 2)]


def test_messages_are_handed_out_until_their_attempts_are_exhausted() -> None:
    """L5: and then never again; settling what was buried erases it."""
    queue = Queue(Rules(max_attempts=2))
    group = queue.add_group()
    run = queue.append(2)

    queue.settle(queue.reserve()[0], Ending.EXPIRED)
    queue.settle(queue.reserve()[0], Ending.NACK, delay_ms=8_000)

    assert queue.reserve() == []
    assert group.buried == {0: Slice(0, 2, run, 2, 2, queue.now_ms)}
    assert queue.tables.delays == set()

    assert queue.state.settle_buried(group, 0, queue.tables) == Slice(0, 2, run, 2, 2, queue.now_ms)
    assert queue.tables.runs == {}
    assert queue.tables.returned == {}


def test_attempts_below_the_limit_are_never_buried() -> None:
    """L5: 0 is no limit."""
    queue = Queue()
    queue.add_group()
    queue.append(1)

    for attempts in range(20):
        (reservation,) = queue.reserve()
        assert reservation.slice.attempts == attempts
        queue.settle(reservation, Ending.NACK)


def test_a_lower_limit_of_attempts_holds_for_what_came_back_before_it() -> None:
    """L5, S7: ready again or delayed, it is not handed out once more."""
    queue = Queue()
    group = queue.add_group()
    queue.append(1)
    queue.append(1)
    first, second = queue.reserve()
    queue.settle(first, Ending.NACK)
    queue.settle(second, Ending.NACK, delay_ms=4_000)

    queue.obey(Rules(max_attempts=1))
    queue.state.ready_delayed(group, 1, queue.tables)

    assert queue.reserve() == []
    assert sorted(group.buried) == [0, 1]
    assert all(each.place is ReturnPlace.BURIED for each in queue.tables.returned.values())


def test_a_message_whose_time_to_live_has_passed_is_not_handed_out() -> None:
    """L5: at its deadline it is too late, a millisecond before it is not."""
    queue = Queue()
    group = queue.add_group()
    queue.append(2, dead_ms=2_000)
    queue.append(1)

    queue.now_ms = 1_999
    (reservation,) = queue.reserve(messages_max=1)
    assert reservation.slice.start == 0

    queue.now_ms = 2_000
    assert spans_of(queue.reserve()) == [(2, 3, 0, 1)]
    assert list(group.buried) == [1]

    queue.settle(reservation, Ending.RELEASE)
    assert queue.reserve() == []
    assert sorted(group.buried) == [0, 1]


def test_a_short_hand_out_is_told_once_when_there_is_more() -> None:
    """V2: waiting consumers are notified once."""
    queue = Queue()
    group = queue.add_group()
    queue.append(1)
    (reservation,) = queue.reserve()
    queue.append(1)
    assert queue.tables.told == []

    group.has_waiters = True
    queue.settle(reservation, Ending.EXPIRED)
    queue.append(1)

    assert queue.tables.told == ["default"]
