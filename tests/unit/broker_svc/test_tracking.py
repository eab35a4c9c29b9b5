"""Tracking: light records of queues in use, and when each is to be looked at (I1, I3, I9)."""

import sys

from broker_svc.idle.tracking import TrackedQueue, Tracking

KEY = (0, "t/a")
WINDOW_MS = 100


def record(tracking: Tracking, now_ms: int = 0, window_ms: int = WINDOW_MS) -> TrackedQueue:
    return tracking.get(KEY, window_ms, now_ms)


async def test_a_queue_has_one_record_until_it_is_forgotten() -> None:
    """I9"""
    tracking = Tracking()
    first = record(tracking)

    assert record(tracking, now_ms=5) is first
    tracking.forget(first)

    assert len(tracking) == 0
    assert tracking.find(KEY) is None
    assert record(tracking) is not first


async def test_forgetting_an_old_record_leaves_its_successor() -> None:
    """I9: the holder of the old one may be late."""
    tracking = Tracking()
    old = record(tracking)
    tracking.forget(old)
    successor = record(tracking)

    tracking.forget(old)

    assert tracking.find(KEY) is successor


async def test_the_same_name_in_two_partitions_is_two_records() -> None:
    """I9: cleanup covers every partition."""
    tracking = Tracking()

    assert tracking.get((0, "t"), WINDOW_MS, 0) is not tracking.get((1, "t"), WINDOW_MS, 0)
    assert len(tracking) == 2


async def test_a_record_is_a_candidate_when_its_window_has_elapsed_and_not_before() -> None:
    """I3"""
    tracking = Tracking()
    queue = record(tracking)

    assert tracking.next_candidate_ms() == WINDOW_MS
    assert tracking.take_candidates(WINDOW_MS - 1, limit=10) == []
    assert tracking.take_candidates(WINDOW_MS, limit=10) == [queue]
    assert tracking.next_candidate_ms() is None


async def test_a_record_with_a_lease_is_no_candidate() -> None:
    """I3"""
    tracking = Tracking()
    record(tracking).leases = 1

    assert tracking.take_candidates(WINDOW_MS, limit=10) == []


async def test_a_forgotten_record_is_no_candidate() -> None:
    """I9"""
    tracking = Tracking()
    tracking.forget(record(tracking))

    assert tracking.take_candidates(WINDOW_MS, limit=10) == []


async def test_a_record_watched_many_times_is_one_candidate() -> None:
    """I3: what is remembered follows the queues, not how often they were used."""
    tracking = Tracking()
    queue = record(tracking)

    for now_ms in range(1, 10):
        tracking.watch(queue, now_ms)

    assert tracking.take_candidates(10 * WINDOW_MS, limit=100) == [queue]


async def test_a_record_used_again_and_again_keeps_one_place_in_the_line() -> None:
    """I3: polls without end would leave a place behind with each, for as long as the window is."""
    tracking = Tracking()
    queue = record(tracking)

    for now_ms in range(1, 1_000):
        tracking.watch(queue, now_ms + WINDOW_MS)

    assert len(tracking._candidates) == 1
    assert tracking.take_candidates(998 + WINDOW_MS, limit=1) == []
    assert tracking.take_candidates(999 + WINDOW_MS, limit=1) == [queue]


async def test_a_pass_takes_no_more_candidates_than_its_limit() -> None:
    tracking = Tracking()
    for number in range(5):
        tracking.get((0, f"t/{number}"), WINDOW_MS, 0)

    taken = [len(tracking.take_candidates(WINDOW_MS, limit=2)) for _ in range(4)]

    assert taken == [2, 2, 1, 0]


async def test_only_an_earlier_candidate_wakes_the_cleanup() -> None:
    """I3: a million later ones cost no wake-up."""
    tracking = Tracking()
    record(tracking)
    tracking.earlier_candidate.clear()

    tracking.get((0, "t/later"), WINDOW_MS, 1)
    after_later = tracking.earlier_candidate.is_set()
    tracking.get((0, "t/sooner"), WINDOW_MS // 2, 1)

    assert not after_later
    assert tracking.earlier_candidate.is_set()


async def test_a_lost_link_makes_only_its_partition_load_again() -> None:
    """I2"""
    tracking = Tracking()
    lost, kept = tracking.get((0, "t"), WINDOW_MS, 0), tracking.get((1, "t"), WINDOW_MS, 0)
    lost.loading = kept.loading = object()  # type: ignore[assignment]

    tracking.link_lost(0)

    assert lost.loading is None
    assert kept.loading is not None


async def test_a_record_is_light() -> None:
    """I1: slots, and no dictionary."""
    queue = record(Tracking())

    assert not hasattr(queue, "__dict__")
    assert sys.getsizeof(queue) <= 128
