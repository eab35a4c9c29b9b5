"""When a service that failed is started again."""

from tidemark.local.restarts import FAILURES_MAX, PAUSE_MS, STABLE_AFTER_MS, RestartPolicy


def test_pauses_double_until_the_service_is_given_up() -> None:
    """S6."""
    policy = RestartPolicy()

    pauses = [policy.pause_ms(healthy_ms=0) for _ in range(FAILURES_MAX)]

    assert pauses == [PAUSE_MS, 2 * PAUSE_MS, 4 * PAUSE_MS, 8 * PAUSE_MS, None]


def test_a_service_that_was_healthy_for_long_has_recovered() -> None:
    """S6."""
    policy = RestartPolicy()
    for _ in range(FAILURES_MAX - 1):
        policy.pause_ms(healthy_ms=STABLE_AFTER_MS - 1)

    assert policy.pause_ms(healthy_ms=STABLE_AFTER_MS) == PAUSE_MS
    assert policy.pause_ms(healthy_ms=0) == 2 * PAUSE_MS
