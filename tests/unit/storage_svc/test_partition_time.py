"""Partition time never goes back, and a date that jumps far ahead is not believed blindly."""

from hypothesis import given
from hypothesis import strategies as st

from storage_svc.partition.clock import FORWARD_JUMP_MS_MAX, PartitionTime

READINGS = st.lists(
    st.tuples(st.integers(0, 10**13), st.integers(0, 10**6)), min_size=1, max_size=20
)


def test_time_is_the_wall_clock_where_nothing_speaks_against_it() -> None:
    time = PartitionTime(committed_ms=500, wall_ms=1_000, monotonic_ms=7)

    assert time.now_ms(1_000, 7) == 1_000
    assert time.now_ms(1_250, 257) == 1_250


def test_the_last_commit_wins_over_a_wall_clock_that_is_behind() -> None:
    """S2: after a restart time goes on from the last commit."""
    time = PartitionTime(committed_ms=5_000, wall_ms=1_000, monotonic_ms=0)

    assert time.now_ms(1_000, 0) == 5_000


def test_time_advances_by_the_monotonic_clock_while_the_wall_clock_stands_behind() -> None:
    time = PartitionTime(committed_ms=0, wall_ms=5_000, monotonic_ms=0)

    assert time.now_ms(2_000, 100) == 5_100
    assert time.now_ms(2_050, 150) == 5_150
    assert time.now_ms(5_149, 150) == 5_150


def test_a_long_downtime_is_not_suspicious() -> None:
    time = PartitionTime(committed_ms=0, wall_ms=10 * FORWARD_JUMP_MS_MAX, monotonic_ms=0)

    time.now_ms(10 * FORWARD_JUMP_MS_MAX, 0)

    assert not time.suspicious


def test_a_jump_is_suspicious_only_beyond_the_limit() -> None:
    """R9: a wrong date must not delete what is stored."""
    time = PartitionTime(0, wall_ms=1_000, monotonic_ms=0)

    assert time.now_ms(1_000 + FORWARD_JUMP_MS_MAX, 0) == 1_000 + FORWARD_JUMP_MS_MAX
    assert not time.suspicious

    assert time.now_ms(1_001 + 2 * FORWARD_JUMP_MS_MAX, 0) == 1_001 + 2 * FORWARD_JUMP_MS_MAX
    assert time.suspicious


def test_a_jump_is_measured_beyond_what_the_monotonic_clock_explains() -> None:
    time = PartitionTime(0, wall_ms=1_000, monotonic_ms=0)

    time.now_ms(1_000 + 2 * FORWARD_JUMP_MS_MAX, FORWARD_JUMP_MS_MAX)

    assert not time.suspicious


def test_suspicion_stays_until_an_operator_confirms() -> None:
    time = PartitionTime(0, wall_ms=1_000, monotonic_ms=0)
    jumped_ms = time.now_ms(2_000 + FORWARD_JUMP_MS_MAX, 0)

    time.now_ms(jumped_ms + 1, 1)
    assert time.suspicious

    time.confirm()
    time.now_ms(jumped_ms + 2, 2)
    assert not time.suspicious


@given(st.integers(0, 10**13), READINGS)
def test_time_never_goes_back_nor_behind_any_clock(
    committed_ms: int, readings: list[tuple[int, int]]
) -> None:
    """S2: whatever the wall clock does, backwards too."""
    monotonic_ms = 0
    time = PartitionTime(committed_ms, readings[0][0], monotonic_ms)
    last_ms = committed_ms
    for wall_ms, elapsed_ms in readings:
        monotonic_ms += elapsed_ms

        now_ms = time.now_ms(wall_ms, monotonic_ms)

        assert now_ms >= max(wall_ms, last_ms + elapsed_ms)
        last_ms = now_ms
