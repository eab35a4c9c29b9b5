"""How long a run is kept: until every group has settled it, or it is deleted everywhere."""

import pytest

from storage_svc.queue.record import Rules
from storage_svc.queue.reservation import Ending
from tests.support.queue_in_tables import Queue, spans_of
from tidemark.errors import GroupNotFound, ReservationNotFound


def test_a_topic_that_keeps_settled_messages_erases_nothing() -> None:
    """R2: settled messages stay, for replay."""
    queue = Queue(Rules(keeps_settled=True, records_consumption=False))
    queue.add_group()
    run = queue.append(3)

    queue.settle(queue.reserve()[0], Ending.ACK)

    assert queue.tables.runs == {0: run}
    assert queue.tables.consumption == []
    assert queue.reserve() == []
    assert queue.state.group("default").has_settled(run)


def test_a_run_is_erased_only_when_every_group_has_settled_all_of_it() -> None:
    """R2."""
    queue = Queue()
    queue.add_group("one")
    queue.add_group("two")
    queue.append(4)
    one = queue.reserve("one")[0]
    first, second = queue.reserve("two", 2) + queue.reserve("two", 2)

    queue.settle(one, Ending.ACK)
    queue.settle(first, Ending.ACK)
    queue.settle(second, Ending.ACK, (2, 3))
    assert 0 in queue.tables.runs

    queue.settle(second, Ending.ACK)
    assert 0 not in queue.tables.runs


def test_a_group_does_not_wait_for_messages_before_its_base() -> None:
    """R2: they are none of its business."""
    queue = Queue()
    queue.append(4)
    group = queue.add_group(base=2)

    (reservation,) = queue.reserve()
    assert spans_of([reservation]) == [(2, 4, 0, 1)]

    queue.settle(reservation, Ending.ACK)
    assert queue.tables.runs == {}
    assert group.settled == 2


def test_a_group_that_comes_later_begins_with_what_is_still_there() -> None:
    """R2."""
    queue = Queue()
    queue.add_group("first")
    queue.append(2)
    queue.settle(queue.reserve("first")[0], Ending.ACK)
    queue.append(3)

    late = queue.add_group("late")

    assert spans_of(queue.reserve("late")) == [(2, 5, 0, 1)]
    assert late.settled == 2


def test_a_group_that_is_removed_is_gone_with_its_reservations() -> None:
    queue = Queue()
    queue.add_group()
    queue.add_group("other")
    queue.append(2)
    (other,) = queue.reserve("other")
    (settled,) = queue.reserve(messages_max=1)
    queue.settle(settled, Ending.ACK)
    (live,) = queue.reserve()

    queue.remove_group("default")

    assert not live.live
    assert list(queue.tables.groups) == ["other"]
    assert list(queue.tables.reservations) == [other.reservation_id]
    assert queue.tables.deadlines == {(other.deadline_ms, other.reservation_id)}
    assert queue.tables.returned == {}
    with pytest.raises(GroupNotFound):
        queue.state.group("default")
    with pytest.raises(ReservationNotFound):
        queue.state.find(settled.reservation_id)


def test_what_only_a_removed_group_had_kept_is_dropped_with_it() -> None:
    """R2: but nothing is dropped where no group is left, or one still waits for it."""
    queue = Queue()
    for name in ("quick", "slow", "slower"):
        queue.add_group(name)
    queue.append(2)
    queue.append(2)
    queue.settle(queue.reserve("quick", 2)[0], Ending.ACK)

    queue.remove_group("slow")
    assert sorted(queue.tables.runs) == [0, 2]

    queue.remove_group("slower")
    assert sorted(queue.tables.runs) == [2]

    queue.remove_group("quick")
    assert sorted(queue.tables.runs) == [2]


def test_a_run_that_is_deleted_is_gone_in_every_place_it_can_be() -> None:
    """R1, L6: never handed out, ready again, delayed or buried; what is held is protected."""
    queue = Queue(Rules(max_attempts=2))
    groups = [queue.add_group(name) for name in ("fresh", "ready", "delayed", "buried")]
    run = queue.append(2)
    queue.settle(queue.reserve("ready")[0], Ending.RELEASE)
    queue.settle(queue.reserve("delayed")[0], Ending.NACK, delay_ms=8_000)
    queue.settle(queue.reserve("buried")[0], Ending.NACK)
    queue.settle(queue.reserve("buried")[0], Ending.NACK)
    (held,) = queue.reserve("fresh", 1)
    assert queue.state.is_held(run)
    queue.settle(held, Ending.RELEASE)
    assert not queue.state.is_held(run)

    queue.state.delete_runs([run], queue.tables)

    assert all(queue.reserve(group.name) == [] for group in groups)
    assert [group.settled for group in groups] == [2, 2, 2, 2]
    assert all(not group.outstanding for group in groups)
    assert queue.tables.runs == {}
    assert queue.tables.returned == {}
    assert queue.tables.delays == set()
    assert queue.state.record.messages == 0


def test_a_run_that_is_partly_settled_counts_its_messages_once_when_deleted() -> None:
    queue = Queue()
    group = queue.add_group()
    run = queue.append(6)
    queue.settle(queue.reserve(messages_max=2)[0], Ending.ACK)
    queue.settle(queue.reserve(messages_max=2)[0], Ending.RELEASE)

    queue.state.delete_runs([run], queue.tables)

    assert group.settled == 6
