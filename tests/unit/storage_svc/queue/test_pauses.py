"""Paused queues: consumers that wait are left alone until the queue and its topic go on (L10)."""

import pytest

from storage_svc.queue.record import Rules
from storage_svc.queue.reservation import Ending
from tests.support.queue_in_tables import Queue

PAUSED = Rules(paused=True)


def waiting_queue(rules: Rules | None = None) -> Queue:
    """A queue with a group whose consumers wait for messages."""
    queue = Queue(rules)
    queue.add_group().has_waiters = True
    return queue


def test_consumers_that_wait_get_no_notice_while_their_queue_is_paused() -> None:
    """L10: neither of new messages nor of those that come back."""
    queue = waiting_queue()
    queue.append(1)
    (reservation,) = queue.reserve()
    queue.tables.told.clear()
    queue.state.group("default").has_waiters = True

    assert queue.state.pause(True, queue.tables)
    queue.append(1)
    queue.settle(reservation, Ending.NACK)

    assert queue.tables.told == []
    assert queue.state.group("default").has_waiters


def test_a_queue_that_is_resumed_announces_what_became_ready_meanwhile() -> None:
    """L10."""
    queue = waiting_queue()
    queue.state.pause(True, queue.tables)
    queue.append(1)

    assert queue.state.pause(False, queue.tables)

    assert queue.tables.told == ["default"]


def test_a_queue_without_messages_announces_nothing_when_it_is_resumed() -> None:
    """L10, O3: and its consumers get a notice of the next message."""
    queue = waiting_queue()
    queue.state.pause(True, queue.tables)

    queue.state.pause(False, queue.tables)
    assert queue.tables.told == []
    queue.append(1)

    assert queue.tables.told == ["default"]


@pytest.mark.parametrize("paused", [True, False])
def test_pausing_or_resuming_again_changes_nothing(paused: bool) -> None:
    """L10."""
    queue = waiting_queue()
    queue.state.pause(paused, queue.tables)
    queue.tables.record = None

    assert not queue.state.pause(paused, queue.tables)

    assert queue.tables.record is None


def test_a_queue_goes_on_once_neither_it_nor_its_topic_is_paused() -> None:
    """L10."""
    queue = waiting_queue(PAUSED)
    queue.state.pause(True, queue.tables)
    queue.append(1)

    queue.state.pause(False, queue.tables)
    assert queue.tables.told == []
    queue.obey(Rules())

    assert queue.tables.told == ["default"]
    assert not queue.state.paused


def test_a_pause_survives_a_restart() -> None:
    """L10."""
    queue = waiting_queue()
    queue.state.pause(True, queue.tables)

    queue.restart()

    assert queue.state.paused
