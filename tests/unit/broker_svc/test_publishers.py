"""Publishers: cached where they are used, never copied, destroyed by id (I5, I7, I8)."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from broker_svc.idle.activity_leases import ActivityLeases, Lease
from broker_svc.idle.tracking import Tracking
from broker_svc.publish.publishers import Publisher, PublisherCache, PublisherRegistry
from tidemark.clock import ManualClock
from tidemark.errors import PublisherNotFound

IDLE_AFTER_MS = 1_000
FIRST_ID = 41


class Made:
    """Publishers of one connection on queues that need no storage: their leases are counted."""

    def __init__(self, publishers_max: int = 3) -> None:
        self.clock = ManualClock()
        self.tracking = Tracking()
        no_topics: Any = None  # leases that need no storage ask for no topic
        self.leases = ActivityLeases({}, no_topics, self.tracking, self.clock)
        self.registry = PublisherRegistry(FIRST_ID)
        self.cache = PublisherCache(self.registry, publishers_max)

    def lease(self, lmq_name: str) -> Lease:
        queue = self.tracking.get((0, lmq_name), IDLE_AFTER_MS, self.clock.monotonic_ms())
        queue.leases += 1
        return Lease(self.leases, (queue,), "")

    def publisher(self, lmq_name: str) -> Publisher:
        return self.cache.add(lmq_name, self.lease(lmq_name), self.clock.monotonic_ms())

    def held(self) -> set[str]:
        return {queue.lmq_name for queue in self.tracking if queue.leases}


@pytest.fixture
async def made() -> Made:
    return Made()


# --- a publisher is one (I7) ------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
async def test_a_publisher_cannot_be_copied(made: Made, copied: Callable[[Any], Any]) -> None:
    """I7"""
    publisher = made.publisher("t/a")

    with pytest.raises(TypeError, match="cannot be"):
        copied(publisher)

    assert sum(queue.leases for queue in made.tracking) == 1


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
async def test_no_protocol_pickles_a_publisher(made: Made, protocol: int) -> None:
    """I7"""
    with pytest.raises(TypeError):
        pickle.dumps(made.publisher("t/a"), protocol)


async def test_a_publisher_inside_something_else_is_not_copied_either(made: Made) -> None:
    """I7"""
    with pytest.raises(TypeError):
        copy.deepcopy([made.publisher("t/a")])


async def test_a_publisher_owns_its_lease_and_knows_its_partitions(made: Made) -> None:
    """I7"""
    publisher = made.publisher("t/a")

    assert publisher.partitions == (0,)
    assert made.held() == {"t/a"}


# --- the cache (I5) ---------------------------------------------------------------------------


async def test_a_publisher_is_found_again_until_it_is_destroyed(made: Made) -> None:
    """I5"""
    publisher = made.publisher("t/a")

    assert made.cache.find("t/a", 0) is publisher
    made.cache.destroy(publisher)
    assert made.cache.find("t/a", 0) is None


async def test_a_second_lease_for_a_queue_that_has_a_publisher_is_given_back(made: Made) -> None:
    """I5: two runs that opened the same queue at the same time share one publisher."""
    publisher = made.publisher("t/a")

    assert made.publisher("t/a") is publisher
    assert sum(queue.leases for queue in made.tracking) == 1
    assert len(made.registry) == 1


async def test_the_least_recently_used_publisher_leaves_first(made: Made) -> None:
    """I5: the cap, one past it."""
    for lmq_name in ("t/a", "t/b", "t/c"):
        made.publisher(lmq_name)
    made.cache.find("t/a", 0)

    made.publisher("t/d")

    assert made.held() == {"t/a", "t/c", "t/d"}
    assert len(made.cache) == len(made.registry) == 3


async def test_a_cap_of_one_keeps_the_newest() -> None:
    """I5: the cap at its least."""
    made = Made(publishers_max=1)

    for lmq_name in ("t/a", "t/b"):
        made.publisher(lmq_name)

    assert made.held() == {"t/b"}


async def test_publishers_expire_when_they_were_not_used_for_the_whole_timeout(
    made: Made,
) -> None:
    """I5: the backstop."""
    made.publisher("t/a")
    made.publisher("t/b")
    await made.clock.advance_ms(99)
    made.cache.find("t/a", made.clock.monotonic_ms())

    early = made.cache.expire(99, idle_ms=100)
    late = made.cache.expire(100, idle_ms=100)

    assert (early, late) == (0, 1)
    assert made.held() == {"t/a"}


async def test_a_connection_that_ends_drops_all_its_publishers_and_no_others(made: Made) -> None:
    """I5"""
    other = PublisherCache(made.registry, 10)
    other.add("t/z", made.lease("t/z"), 0)
    made.publisher("t/a")
    made.publisher("t/b")

    made.cache.close()

    assert made.held() == {"t/z"}
    assert len(made.registry) == 1


async def test_dropping_a_publisher_starts_the_idle_window_of_its_queue(made: Made) -> None:
    """I3, I5"""
    publisher = made.publisher("t/a")
    await made.clock.advance_ms(500)

    made.cache.destroy(publisher)

    queue = made.tracking.find((0, "t/a"))
    assert queue is not None
    assert queue.idle_since_ms == 500


# --- destroying by id (I8) --------------------------------------------------------------------


async def test_a_publisher_is_destroyed_by_its_id_wherever_it_is_cached(made: Made) -> None:
    """I8"""
    publisher = made.publisher("t/a")

    made.registry.destroy(publisher.publisher_id)

    assert made.held() == set()
    assert len(made.cache) == len(made.registry) == 0


async def test_a_publisher_is_destroyed_once(made: Made) -> None:
    """I8: the second call fails with PUBLISHER_NOT_FOUND, and drops no other lease."""
    publisher = made.publisher("t/a")
    made.registry.destroy(publisher.publisher_id)
    successor = made.publisher("t/a")

    with pytest.raises(PublisherNotFound):
        made.registry.destroy(publisher.publisher_id)

    made.cache.destroy(publisher)  # neither does a late one by the old handle
    assert made.cache.find("t/a", 0) is successor
    assert sum(queue.leases for queue in made.tracking) == 1


async def test_ids_are_issued_once_each_and_never_guessed_from_an_earlier_life(
    made: Made,
) -> None:
    """I8"""
    ids = []
    for _ in range(3):
        publisher = made.publisher("t/a")
        ids.append(publisher.publisher_id)
        made.cache.destroy(publisher)

    assert ids == [FIRST_ID + 1, FIRST_ID + 2, FIRST_ID + 3]
    for never_issued in (0, FIRST_ID, FIRST_ID + 4):
        with pytest.raises(PublisherNotFound):
            made.registry.destroy(never_issued)
