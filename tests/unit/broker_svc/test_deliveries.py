"""Deliveries: tags that stand for receipts, and the counters that cleanup looks at (I4, V6)."""

import pytest

from broker_svc.consume.deliveries import Deliveries, DeliveryDirectory, HeldDelivery
from broker_svc.idle.tracking import TrackedQueue
from tidemark.errors import ReservationExpired, UnknownDeliveryTag


@pytest.fixture
def queue() -> TrackedQueue:
    return TrackedQueue(0, "t/a", idle_after_ms=100, now_ms=0)


@pytest.fixture
def directory() -> DeliveryDirectory:
    return DeliveryDirectory()


def held(queue: TrackedQueue, reservation_id: int) -> HeldDelivery:
    return HeldDelivery(reservation_id, b"receipt", queue, 1, 1, 0)


def test_tags_count_up_and_are_never_used_again(
    queue: TrackedQueue, directory: DeliveryDirectory
) -> None:
    deliveries = Deliveries(directory)
    first = deliveries.add(held(queue, 7))
    deliveries.drop((0, 7))

    second = deliveries.add(held(queue, 8))

    assert (first, second) == (1, 2)


def test_a_tag_stands_for_its_delivery_until_that_is_dropped(
    queue: TrackedQueue, directory: DeliveryDirectory
) -> None:
    deliveries = Deliveries(directory)
    delivery = held(queue, 7)
    tag = deliveries.add(delivery)

    assert deliveries.get(tag) is delivery
    deliveries.drop((0, 7))

    with pytest.raises(UnknownDeliveryTag):
        deliveries.get(tag)


def test_a_tag_whose_reservation_ran_out_is_refused_with_queue_and_offset_every_time(
    queue: TrackedQueue, directory: DeliveryDirectory
) -> None:
    """V6: messages of it may be settled one by one, and each is reported."""
    deliveries = Deliveries(directory)
    delivery = held(queue, 7)
    delivery.first_offset = 30
    tag = deliveries.add(delivery)

    directory.ended((0, 7))

    for _ in range(2):
        with pytest.raises(ReservationExpired) as refused:
            deliveries.get(tag)
        assert refused.value.metadata == {"queue": queue.lmq_name, "offset": "30"}
    assert (len(deliveries), len(directory), queue.deliveries) == (0, 0, 0)


@pytest.mark.parametrize("tag", [0, 2, 2**64 - 1])
def test_a_tag_that_was_never_issued_is_unknown(
    queue: TrackedQueue, directory: DeliveryDirectory, tag: int
) -> None:
    deliveries = Deliveries(directory)
    deliveries.add(held(queue, 7))

    with pytest.raises(UnknownDeliveryTag):
        deliveries.get(tag)


def test_a_tag_means_nothing_on_another_connection(
    queue: TrackedQueue, directory: DeliveryDirectory
) -> None:
    tag = Deliveries(directory).add(held(queue, 7))

    with pytest.raises(UnknownDeliveryTag):
        Deliveries(directory).get(tag)


def test_the_queue_counts_what_is_held_of_it_over_all_connections(
    queue: TrackedQueue, directory: DeliveryDirectory
) -> None:
    """I4"""
    first, second = Deliveries(directory), Deliveries(directory)
    first.add(held(queue, 7))
    second.add(held(queue, 8))

    first.drop((0, 7))

    assert queue.deliveries == 1
    assert len(directory) == 1


def test_dropping_a_delivery_twice_counts_once(
    queue: TrackedQueue, directory: DeliveryDirectory
) -> None:
    """I4: it was settled and expired in the same moment."""
    deliveries = Deliveries(directory)
    deliveries.add(held(queue, 7))
    deliveries.add(held(queue, 8))

    deliveries.drop((0, 7))
    deliveries.drop((0, 7))

    assert queue.deliveries == len(deliveries) == 1


def test_a_reservation_that_storage_ended_is_dropped_from_the_client_that_holds_it(
    queue: TrackedQueue, directory: DeliveryDirectory
) -> None:
    """V6"""
    deliveries = Deliveries(directory)
    deliveries.add(held(queue, 7))

    directory.ended((0, 7))
    directory.ended((0, 7))
    directory.ended((0, 99))  # no client here holds it

    assert len(deliveries) == len(directory) == queue.deliveries == 0


def test_reservation_ids_of_two_partitions_do_not_meet(directory: DeliveryDirectory) -> None:
    """Each partition numbers its own."""
    queues = [TrackedQueue(partition, "t", 100, 0) for partition in (0, 1)]
    holders = [Deliveries(directory) for _ in queues]
    for holder, queue in zip(holders, queues, strict=True):
        holder.add(held(queue, 7))

    directory.ended((0, 7))

    assert [len(holder) for holder in holders] == [0, 1]
    assert directory.receipts(1) == [delivery.receipt for delivery in holders[1]]
    assert directory.receipts(0) == []


def test_one_connection_holds_the_same_reservation_id_of_two_partitions(
    directory: DeliveryDirectory,
) -> None:
    """I4: a session consumes from all partitions."""
    first, second = (TrackedQueue(partition, "t", 100, 0) for partition in (0, 1))
    deliveries = Deliveries(directory)
    deliveries.add(held(first, 7))
    kept = deliveries.add(held(second, 7))

    directory.ended((0, 7))

    assert (first.deliveries, second.deliveries) == (0, 1)
    assert deliveries.get(kept).queue is second


def test_a_client_that_is_gone_holds_nothing(
    queue: TrackedQueue, directory: DeliveryDirectory
) -> None:
    """V6"""
    deliveries = Deliveries(directory)
    given = [held(queue, number) for number in (7, 8, 9)]
    for each in given:
        deliveries.add(each)

    assert deliveries.take_all() == given
    assert deliveries.take_all() == []
    assert len(directory) == queue.deliveries == 0
