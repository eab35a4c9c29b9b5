"""The timetable of a sweeper: from what is due, under a ceiling, with pauses after faults (L7)."""

from lifecycle_svc.timetable import RETRY_MS_MAX, RETRY_MS_MIN, Timetable


def timetable() -> Timetable:
    return Timetable(1_000, interval_ms_min=20, interval_ms_max=60_000)


def test_the_first_sweep_is_at_once() -> None:
    """L7: after every restart."""
    assert timetable().next_ms == 1_000


def test_with_nothing_due_the_ceiling_decides() -> None:
    """L7."""
    times = timetable()

    times.begins(1_000)
    times.ended()

    assert times.next_ms == 61_000


def test_the_earliest_due_time_decides() -> None:
    """L7."""
    times = timetable()

    times.begins(1_000)
    for at_ms in (5_000, 3_000, 4_000):
        times.due(at_ms)

    assert times.next_ms == 3_000


def test_what_is_due_at_once_waits_for_the_shortest_interval() -> None:
    times = timetable()

    times.begins(1_000)
    times.due(1_001)

    assert times.next_ms == 1_020


def test_a_wake_up_during_a_sweep_concerns_the_next_one() -> None:
    """L7: nothing is lost between reading and waiting."""
    times = timetable()

    times.begins(1_000)
    times.due(1_500)
    times.ended()

    assert times.next_ms == 1_500


def test_a_sweep_tells_how_late_it_is() -> None:
    times = timetable()
    times.begins(1_000)
    times.due(2_000)

    assert times.begins(2_070) == 70


def test_pauses_grow_after_faults_and_end_with_a_success() -> None:
    """L4: retries back off."""
    times = timetable()
    pauses = []
    now_ms = 1_000
    for _ in range(12):
        times.begins(now_ms)
        times.failed(now_ms, chance=1.0)
        pauses.append(times.next_ms - now_ms)
        now_ms = times.next_ms

    times.begins(now_ms)
    times.ended()
    times.begins(now_ms + 1)
    times.failed(now_ms + 1, chance=0.0)

    assert pauses[:3] == [RETRY_MS_MIN, 2 * RETRY_MS_MIN, 4 * RETRY_MS_MIN]
    assert pauses == sorted(pauses)
    assert pauses[-1] == RETRY_MS_MAX
    assert times.next_ms - now_ms - 1 == RETRY_MS_MIN // 2


def test_a_wake_up_does_not_end_a_pause_but_opening_the_partition_does() -> None:
    """L4: a faulty partition backs off, however much is due in it."""
    times = timetable()
    times.begins(1_000)
    times.failed(1_000, chance=1.0)

    times.due(1_001)
    paused_ms = times.next_ms
    times.opened(1_050)

    assert paused_ms == 1_000 + RETRY_MS_MIN
    assert (times.next_ms, times.failures) == (1_050, 0)
