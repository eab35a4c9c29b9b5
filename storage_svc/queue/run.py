"""Runs: messages of one queue and one fairness key that were published together, and parts of them.

Pure. Everything in storage works in runs and slices of runs, never in single messages.
"""

from typing import NamedTuple


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

    @property
    def messages(self) -> int:
        return self.end - self.start
