"""The time of a partition over all of its openings, and the alarm of a clock that jumped ahead.

While that alarm stands nothing is deleted. It is stored with every commit, so that a restart does
not end it; an operator ends it by confirming the time.
"""

import logging

from storage_svc.partition.clock import PartitionTime
from storage_svc.partition.counters import Counters
from storage_svc.partition.health import FaultReason, Health
from storage_svc.turns import Reading
from tidemark.clock import Clock
from tidemark.errors import PartitionFaulty, TidemarkError
from tidemark.telemetry import counter

_log = logging.getLogger(__name__)
_clock_jumps = counter(
    "tidemark.storage.clock_jumps", description="Jumps of the clock that suspended deletions"
)


class Timekeeping:
    """Reads the clock for one partition; it never goes back, unless an operator sets it back."""

    def __init__(self, partition: int, clock: Clock, health: Health) -> None:
        self._partition = partition
        self._clock = clock
        self._health = health
        self._time = PartitionTime(0, clock.wall_ms(), clock.monotonic_ms())

    def now_ms(self) -> int:
        return self._time.now_ms(self._clock.wall_ms(), self._clock.monotonic_ms())

    @property
    def is_suspicious(self) -> bool:
        """Whether deletions were suspended at the last reading."""
        return self._time.suspicious

    def go_on_from(self, counters: Counters) -> None:
        """The partition was opened: continue after its last commit, suspended if it was."""
        committed_ms = max(counters.time_ms, self.now_ms())
        suspicious = self._time.suspicious or counters.suspended_ms > 0
        self._time = PartitionTime(committed_ms, self._clock.wall_ms(), self._clock.monotonic_ms())
        self._time.suspicious = suspicious

    def stamp(self, reading: Reading, counters: Counters) -> int:
        """The time of the next commit, which stores whether deletions are suspended."""
        now_ms = self._time.now_ms(reading.wall_ms, reading.monotonic_ms)
        counters.suspended_ms = (counters.suspended_ms or now_ms) if self._time.suspicious else 0
        return now_ms

    def refusal(self) -> TidemarkError | None:
        """Why nothing is deleted now; None if it is."""
        if not self._time.suspicious:
            return None
        return PartitionFaulty(
            f"the clock of partition {self._partition} jumped ahead: nothing is deleted until its "
            "time is confirmed",
            partition=str(self._partition),
        )

    def confirm(self, *, to_wall_clock: bool) -> None:
        """An operator confirms the time; with `to_wall_clock`, after it has gone back to that."""
        if to_wall_clock:
            self._time = PartitionTime(0, self._clock.wall_ms(), self._clock.monotonic_ms())
        self._time.confirm()

    def check(self) -> bool:
        """Raise or clear the alarm; returns whether it changed."""
        raised = self._health.has(FaultReason.CLOCK_JUMPED)
        now_ms = self.now_ms()  # notices a jump
        detail = ""
        if self._time.suspicious:
            detail = (
                "nothing is deleted until the time is confirmed: "
                f"tidemark partitions confirm-time {self._partition}"
            )
            if not raised:
                _clock_jumps.add(1)
                _log.error("the clock jumped ahead", extra={"partition": self._partition})
        return self._health.set_alarm(FaultReason.CLOCK_JUMPED, detail, now_ms)
