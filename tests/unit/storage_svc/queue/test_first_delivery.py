"""The time of the first delivery, which messages keep until they are settled (R13)."""

from storage_svc.queue.record import Rules
from storage_svc.queue.reservation import Ending
from storage_svc.queue.run import JOINED_MS
from tests.support.queue_in_tables import Queue


def first_deliveries(queue: Queue) -> list[tuple[int, int, int]]:
    """Start, end and first delivery of what is handed out next."""
    return [
        (each.slice.start, each.slice.end, each.slice.first_delivery_ms) for each in queue.reserve()
    ]


def test_a_redelivered_message_keeps_its_first_delivery_over_a_restart() -> None:
    """R13."""
    queue = Queue()
    queue.add_group()
    queue.append(2)
    (held,) = queue.reserve()
    delivered_ms = queue.now_ms
    queue.now_ms += 5_000
    queue.settle(held, Ending.NACK, delay_ms=100)

    queue.restart()
    group = queue.state.group("default")
    queue.state.ready_delayed(group, 0, queue.tables)

    assert first_deliveries(queue) == [(0, 2, delivered_ms)]
    queue.restart()
    queue.settle(queue.state.find(queue.reservation_id), Ending.ACK)
    assert queue.tables.first_deliveries == [delivered_ms]


def test_messages_given_back_together_keep_first_deliveries_that_are_far_apart() -> None:
    """R13: those within a second become one record, with the earliest of them."""
    queue = Queue(Rules())
    queue.add_group()
    queue.append(3)
    first_ms = queue.now_ms
    held = queue.reserve(messages_max=1)
    queue.now_ms = first_ms + JOINED_MS - 1
    held += queue.reserve(messages_max=1)
    queue.now_ms = first_ms + JOINED_MS
    held += queue.reserve(messages_max=1)

    for each in (held[1], held[0], held[2]):
        queue.settle(each, Ending.RELEASE)

    assert first_deliveries(queue) == [(0, 2, first_ms), (2, 3, first_ms + JOINED_MS)]


def test_a_message_that_was_set_aside_unread_was_not_delivered() -> None:
    """R13, V3: its first delivery is the one that succeeds."""
    queue = Queue()
    group = queue.add_group()
    queue.append(1)
    slices, _ = queue.take(group)
    queue.state.postpone(group, slices, queue.now_ms + 60_000, queue.tables)
    queue.now_ms += 60_000
    queue.state.ready_delayed(group, 0, queue.tables)

    assert first_deliveries(queue) == [(0, 1, queue.now_ms)]
