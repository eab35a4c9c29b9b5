"""How a reservation ends: its records, what is remembered of it, revocation by a takeover."""

import pytest

from storage_svc.queue import settled
from storage_svc.queue.queue import QueueState
from storage_svc.queue.reservation import Ending
from tests.support.queue_in_tables import Queue, spans_of
from tidemark.errors import Fenced, ReservationExpired, ReservationNotFound


def test_a_run_is_reserved_and_acknowledged_as_one_record() -> None:
    """R2, R13: and its bytes go when the last group has settled it."""
    queue = Queue()
    queue.add_group()
    queue.append(1_000)

    (reservation,) = queue.reserve()
    assert spans_of([reservation]) == [(0, 1_000, 0, 1)]
    assert queue.settle(reservation, Ending.ACK) == [(0, 1_000)]

    assert queue.tables.runs == {}
    assert queue.tables.bodies == {}
    assert queue.tables.deadlines == set()
    assert queue.tables.returned == {}
    assert queue.tables.consumption == [("default", (0, 1_000))]
    assert (queue.state.record.messages, queue.state.record.body_bytes) == (0, 0)
    assert queue.state.group("default").settled == 1_000


def test_an_extension_moves_the_deadline_of_a_live_reservation_only() -> None:
    """V6."""
    queue = Queue()
    queue.add_group()
    queue.append(2)
    (reservation,) = queue.reserve()

    queue.state.extend(reservation, 9_999, queue.tables)
    assert queue.tables.deadlines == {(9_999, 1)}

    queue.settle(reservation, Ending.EXPIRED)
    with pytest.raises(ReservationExpired):
        queue.state.extend(reservation, 20_000, queue.tables)
    assert queue.tables.deadlines == set()


def test_a_bounded_number_of_settled_reservations_is_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """V6: long after, a repeat fails with RESERVATION_NOT_FOUND."""
    monkeypatch.setattr(settled, "SETTLED_SHARED_MAX", 0)
    queue = Queue()
    queue.add_group()
    for _ in range(settled.SETTLED_PER_QUEUE_MIN + 1):
        queue.append(1)
        queue.settle(queue.reserve()[0], Ending.ACK)

    with pytest.raises(ReservationNotFound):
        queue.state.find(1)

    assert queue.state.find(2).reservation_id == 2
    assert len(queue.tables.reservations) == settled.SETTLED_PER_QUEUE_MIN

    queue.state.prepare_to_unload(queue.tables)
    assert queue.tables.reservations == {}
    with pytest.raises(ReservationNotFound):
        queue.state.find(2)


def test_queues_share_what_they_remember_beyond_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """V6: no queue may use all of it, and an unloaded queue gives its share back."""
    monkeypatch.setattr(settled, "SETTLED_PER_QUEUE_MIN", 2)
    monkeypatch.setattr(settled, "SETTLED_SHARED_MAX", 12)
    together = settled.SettledBudget()
    queues = []
    kept = []
    for _ in range(2):
        queue = Queue()
        queue.state = QueueState(queue.state.record, queue.rules, together)
        queue.add_group()
        queues.append(queue)

    for queue in (*queues, *queues):
        for _ in range(20):
            queue.append(1)
            queue.settle(queue.reserve()[0], Ending.ACK)
        kept.append(len(queue.state.reservations))

    assert kept == [6, 2, 4, 4]
    assert together.total == sum(len(queue.state.reservations) for queue in queues)
    queues[0].state.remove_group("default", queues[0].tables)
    queues[1].state.forget_settled()
    assert together.total == 0


def test_a_takeover_revokes_what_the_old_owner_holds() -> None:
    """E8, E9: its settlement is fenced, and the messages go to the new owner uncounted."""
    queue = Queue()
    group = queue.add_group()
    queue.append(4)
    group.owner_epoch = 7
    (reservation,) = queue.reserve()
    assert reservation.owner_epoch == 7
    queue.settle(reservation, Ending.ACK, (0, 1))

    assert queue.state.revoke(group, queue.tables) == [reservation.reservation_id]
    group.owner_epoch = 8

    with pytest.raises(Fenced):
        queue.settle(reservation, Ending.ACK)
    with pytest.raises(Fenced):
        group.check_owner(7)
    group.check_owner(8)
    assert spans_of(queue.reserve()) == [(1, 4, 0, 2)]


def test_a_group_without_owner_serves_every_client() -> None:
    """E8."""
    queue = Queue()

    queue.add_group().check_owner(0)
    queue.state.group("default").check_owner(3)
