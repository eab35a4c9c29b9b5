"""Who schedules passes: one holder at a time, for as long as it keeps saying so (R11).

In memory only. Passes at once do no harm, they only repeat each other's work, so that a restart of
storage, after which anybody may be first, needs no record on disk. Pure: the time is an argument.
"""


class SchedulerLease:
    """The scheduler of the cluster, as the process that is asked knows it."""

    def __init__(self) -> None:
        self._holder = ""
        self._until_ms = 0

    def hold(self, holder: str, hold_ms: int, now_ms: int) -> tuple[str, int]:
        """Take it, renew it or, with 0, give it up; returns who has it, and for how long."""
        if holder == self._holder or now_ms >= self._until_ms:
            self._holder = holder if hold_ms else ""
            self._until_ms = now_ms + hold_ms
        return self._holder, max(0, self._until_ms - now_ms)
