"""The scheduler lease: one scheduler starts passes, for as long as it renews the lease (R11).

In memory only. Two passes at once do no harm, they only repeat each other's work; so after a
restart of storage any scheduler may be the first, and nothing is stored. Pure: the time is an
argument.
"""


class SchedulerLease:
    """The scheduler of the cluster, in the view of this process."""

    def __init__(self) -> None:
        self._holder = ""
        self._until_ms = 0

    def hold(self, holder: str, hold_ms: int, now_ms: int) -> tuple[str, int]:
        """Take, renew or, with 0, give up the lease; returns its holder and its remaining time."""
        if holder == self._holder or now_ms >= self._until_ms:
            self._holder = holder if hold_ms else ""
            self._until_ms = now_ms + hold_ms
        return self._holder, max(0, self._until_ms - now_ms)
