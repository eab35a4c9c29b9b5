"""The timetable of one sweeper: when it sweeps next (L7).

Pure: monotonic time and randomness are arguments. The next sweep is timed from the earliest thing
that is due; an interval is only the ceiling. After faults the pauses grow, for this partition
alone.
"""

RETRY_MS_MIN = 200
RETRY_MS_MAX = 30_000


class Timetable:
    """When one partition is swept next."""

    __slots__ = (
        "_began_ms",
        "_interval_ms_max",
        "_interval_ms_min",
        "failures",
        "next_ms",
        "not_before_ms",
    )

    def __init__(self, now_ms: int, *, interval_ms_min: int, interval_ms_max: int) -> None:
        self.next_ms = now_ms
        self.failures = 0
        """Sweeps that failed in a row."""
        self.not_before_ms = now_ms
        """The end of the pause after a fault."""
        self._began_ms = now_ms - interval_ms_min
        self._interval_ms_min = interval_ms_min
        self._interval_ms_max = interval_ms_max

    def begins(self, now_ms: int) -> int:
        """A sweep begins; returns how late it is. Wake-ups from now on concern the next one."""
        late_ms = max(0, now_ms - self.next_ms)
        self._began_ms = now_ms
        self.next_ms = now_ms + self._interval_ms_max
        return late_ms

    def due(self, at_ms: int) -> None:
        """Something is due then: sweep no later, but not more often than the shortest interval."""
        at_ms = max(at_ms, self._began_ms + self._interval_ms_min, self.not_before_ms)
        self.next_ms = min(self.next_ms, at_ms)

    def ended(self) -> None:
        """The sweep has succeeded."""
        self.failures = 0

    def failed(self, now_ms: int, chance: float) -> None:
        """The sweep has failed: whatever is due waits for a pause, longer each time.

        `chance` is between 0 and 1; it keeps sweepers that failed together apart.
        """
        pause_ms = min(RETRY_MS_MIN << min(self.failures, 10), RETRY_MS_MAX)
        self.failures += 1
        self.not_before_ms = now_ms + pause_ms // 2 + int(pause_ms / 2 * chance)
        self.next_ms = self.not_before_ms

    def opened(self, now_ms: int) -> None:
        """The partition was opened anew: whatever was wrong with it before, sweep it now."""
        self.failures = 0
        self.not_before_ms = self.next_ms = now_ms
