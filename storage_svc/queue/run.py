"""Runs: messages of one queue and one fairness key that were published together, and parts of them.

Pure. Everything in storage works in runs and slices of runs, never in single messages.
"""

from typing import NamedTuple

JOINED_MS = 1_000
"""Slices whose first deliveries are closer are one record: a consumer that leaves gives many back
that were handed out one after the other."""


class Run(NamedTuple):
    """The header of a stored run. Immutable, like the run itself."""

    first_offset: int
    messages: int
    body_bytes: int
    publish_time_ms: int
    dead_deadline_ms: int  # 0: no time to live
    fairness_key: str
    traceparent: str
    group: str = ""
    """The only group that consumes it; "" for all. A redriven run is settled for the others."""

    @property
    def end(self) -> int:
        return self.first_offset + self.messages

    def is_for(self, group: str) -> bool:
        """Whether a group consumes the run, or has settled it from the start."""
        return self.group in ("", group)

    @property
    def message_bytes(self) -> int:
        """The size that one message counts for: the mean, because runs are not parsed."""
        return max(1, self.body_bytes // self.messages)


class Slice(NamedTuple):
    """Messages of one run that have the same history in a group."""

    start: int
    end: int
    run: Run
    attempts: int = 0  # failed deliveries
    deliveries: int = 0  # hand-outs
    first_delivery_ms: int = 0  # time of the first hand-out; 0: none

    @property
    def messages(self) -> int:
        return self.end - self.start

    def handed_out(self, now_ms: int) -> "Slice":
        """The same after one more hand-out."""
        start, end, run, attempts, deliveries, first_ms = self
        return Slice(start, end, run, attempts, deliveries + 1, first_ms or now_ms)

    def joined(self, following: "Slice") -> "Slice | None":
        """Both as one slice, if the other continues this one with the same history.

        First deliveries may differ a little: the earlier one counts for all.
        """
        first_ms, other_ms = self.first_delivery_ms, following.first_delivery_ms
        if self.end != following.start or self[2:5] != following[2:5]:
            return None
        if abs(first_ms - other_ms) >= JOINED_MS:
            return None
        return self._replace(end=following.end, first_delivery_ms=min(first_ms, other_ms))
