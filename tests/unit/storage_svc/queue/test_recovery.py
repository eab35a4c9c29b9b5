"""A state that is built from its tables again goes on where the last one was."""

from storage_svc.queue.reservation import Ending
from tests.support.queue_in_tables import Queue, spans_of


def test_what_a_restart_left_unread_survives_another_restart() -> None:
    """S2: a settlement between two restarts must not lose the rest of a run half handed out."""
    queue = Queue()
    queue.add_group()
    queue.append(10)
    (reservation,) = queue.reserve(messages_max=5)
    queue.restart()

    queue.settle(queue.state.find(reservation.reservation_id), Ending.ACK)
    queue.restart()

    assert spans_of(queue.reserve()) == [(5, 10, 0, 1)]


def test_a_running_reservation_survives_a_restart_with_its_receipt() -> None:
    """V4."""
    queue = Queue()
    queue.add_group()
    queue.append(4)
    (reservation,) = queue.reserve()
    queue.settle(reservation, Ending.ACK, (1, 2))

    queue.restart()

    found = queue.state.find(reservation.reservation_id)
    assert found.open == [(0, 1), (2, 4)]
    assert queue.state.inflight == 3
    assert queue.state.has_inflight
    assert queue.settle(found, Ending.ACK) == [(0, 1), (2, 4)]
    assert queue.tables.runs == {}
    assert not queue.state.has_inflight
