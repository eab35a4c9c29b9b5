"""The timetable of one sweeper: when it sweeps next (L7).

Pure: monotonic time and randomness are arguments. The next sweep is timed from the earliest due
time; the interval is only a ceiling. After a failure this partition alone backs off, for longer
each time.
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
        """Consecutive failed sweeps."""
        self.not_before_ms = now_ms
        """The end of the backoff after a failure."""
        self._began_ms = now_ms - interval_ms_min
        self._interval_ms_min = interval_ms_min
        self._interval_ms_max = interval_ms_max

    def begins(self, now_ms: int) -> int:
        """A sweep begins; returns its lateness. Wake-ups from now on are for the next sweep."""
        late_ms = max(0, now_ms - self.next_ms)
        self._began_ms = now_ms
        self.next_ms = now_ms + self._interval_ms_max
        return late_ms

    def due(self, at_ms: int) -> None:
        """Work is due then: sweep by then, subject to the shortest interval and the backoff."""
        at_ms = max(at_ms, self._began_ms + self._interval_ms_min, self.not_before_ms)
        self.next_ms = min(self.next_ms, at_ms)

    def ended(self) -> None:
        """The sweep succeeded."""
        self.failures = 0

    def failed(self, now_ms: int, chance: float) -> None:
        """The sweep failed: back off, for longer each time, whatever is due.

        `chance`, from 0 to 1, spreads the retries of sweepers that failed together.
        """
        pause_ms = min(RETRY_MS_MIN << min(self.failures, 10), RETRY_MS_MAX)
        self.failures += 1
        self.not_before_ms = now_ms + pause_ms // 2 + int(pause_ms / 2 * chance)
        self.next_ms = self.not_before_ms

    def opened(self, now_ms: int) -> None:
        """The partition was reopened: drop the backoff and sweep now."""
        self.failures = 0
        self.not_before_ms = self.next_ms = now_ms
