"""Partition time: milliseconds that never go back, also when the wall clock does.

Pure: the readings are arguments. Time is the larger of the last committed time and the wall clock,
and advances by the monotonic clock while the wall clock is behind. A wall clock that jumps far
ahead moves it as well, but suspends deletions until an operator confirms the time: a wrong date
must not expire everything that is stored.
"""

FORWARD_JUMP_MS_MAX = 60 * 60 * 1000
"""A larger jump of the wall clock, while the process runs, is suspicious."""


class PartitionTime:
    """The clock of one partition, seeded with the time of its last commit."""

    __slots__ = ("_base_ms", "_monotonic_ms", "suspicious")

    def __init__(self, committed_ms: int, wall_ms: int, monotonic_ms: int) -> None:
        self._base_ms = max(committed_ms, wall_ms)
        self._monotonic_ms = monotonic_ms
        # A service that was down for a week is not suspicious, so the first reading is trusted.
        self.suspicious = False
        """Whether deletions are suspended; the partition keeps that over restarts."""

    def now_ms(self, wall_ms: int, monotonic_ms: int) -> int:
        now_ms = self._base_ms
        if monotonic_ms > self._monotonic_ms:
            now_ms += monotonic_ms - self._monotonic_ms
        if wall_ms > now_ms:
            self.suspicious = self.suspicious or wall_ms - now_ms > FORWARD_JUMP_MS_MAX
            now_ms = wall_ms
        self._base_ms, self._monotonic_ms = now_ms, monotonic_ms
        return now_ms

    def confirm(self) -> None:
        """An operator confirms the time."""
        self.suspicious = False
