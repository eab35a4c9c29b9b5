"""Waits between tries."""

from random import Random

from tidemark.client.transport.backoff import Backoff


def test_waits_double_up_to_the_ceiling_and_vary_within_their_upper_half() -> None:
    backoff = Backoff(Random(7), min_ms=100, max_ms=800)

    waits = [backoff.next_ms() for _ in range(6)]

    for wait_ms, whole_ms in zip(waits, (100, 200, 400, 800, 800, 800), strict=True):
        assert whole_ms // 2 <= wait_ms <= whole_ms


def test_a_wait_is_short_again_after_success() -> None:
    backoff = Backoff(Random(7), min_ms=100, max_ms=800)
    for _ in range(5):
        backoff.next_ms()

    backoff.reset()

    assert backoff.next_ms() <= 100


def test_what_the_other_side_asks_for_is_kept_up_to_the_ceiling() -> None:
    backoff = Backoff(Random(7), min_ms=10, max_ms=800)

    assert 250 <= backoff.next_ms(at_least_ms=500) <= 500
    assert 400 <= backoff.next_ms(at_least_ms=60_000) <= 800


def test_two_clients_do_not_wait_in_step() -> None:
    waits = {tuple(Backoff(Random(seed)).next_ms() for _ in range(1)) for seed in range(20)}

    assert len(waits) > 5


def test_waits_are_short_while_a_partition_may_be_moving_and_grow_after_that() -> None:
    """S8: at most 250 ms, also if the broker asks for more; a long outage is not hammered."""
    backoff = Backoff(Random(7), min_ms=20, may_move=True)

    waits = [backoff.next_ms(at_least_ms=500) for _ in range(60)]
    backoff.reset()

    assert max(waits[:40]) <= 250
    assert sum(waits[:40]) >= 5_000
    assert min(waits[-10:]) >= 1_000
    assert backoff.next_ms() <= 20
