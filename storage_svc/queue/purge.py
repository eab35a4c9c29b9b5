"""A purge: all messages of a queue leave at once, except those under live reservations.

Pure. A purge does not walk over the stored runs: it marks them. A run below the mark that is not
spared is gone for every reader and consumer from that moment on, and its rows are erased later
(`operations/erase.py`). Until then whatever reads stored runs asks the mark.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from storage_svc.queue.run import Run

if TYPE_CHECKING:
    from storage_svc.queue.lane import Container
    from storage_svc.queue.queue import QueueState
    from storage_svc.queue.record import Journal
    from storage_svc.queue.reservation import Reservation


class PurgeMark:
    """The extent of a purge: the runs below an offset, except those in spans that it spares."""

    __slots__ = ("_ends", "_starts", "below", "schedules_to")

    def __init__(
        self, below: int, schedules_to: int = 0, spared: Iterable[tuple[int, int]] = ()
    ) -> None:
        self.below = below
        self.schedules_to = schedules_to
        """The last schedule id that is covered."""
        spans = list(spared)
        self._starts = [start for start, _ in spans]
        self._ends = [end for _, end in spans]

    @property
    def spared(self) -> list[tuple[int, int]]:
        """Offsets of the runs that are spared; runs next to each other share a span."""
        return list(zip(self._starts, self._ends, strict=True))

    def covers(self, first_offset: int) -> bool:
        """Whether a run is purged."""
        return self.next_live(first_offset) != first_offset

    def next_live(self, offset: int) -> int:
        """The first offset, from one on, at which a run may begin that is not purged."""
        if offset >= self.below or not self._starts:
            return max(offset, self.below)
        at = bisect_right(self._starts, offset)
        if at and offset < self._ends[at - 1]:
            return offset
        return self._starts[at] if at < len(self._starts) else self.below


class Purged(NamedTuple):
    """The counts of a purge."""

    messages: int
    body_bytes: int


class Spared:
    """The runs that a purge spares, gathered in parts."""

    __slots__ = ("body_bytes", "messages", "runs", "spans")

    def __init__(self) -> None:
        self.runs: dict[int, Run] = {}
        """By their first offsets."""
        self.spans: list[tuple[int, int]] = []
        self.messages = 0
        self.body_bytes = 0

    def add(self, reservations: "Iterable[Reservation]") -> None:
        """Spare the runs of live reservations."""
        self.runs.update((each.slice.run.first_offset, each.slice.run) for each in reservations)

    def measure(self, first_offsets: Iterable[int]) -> None:
        """Count runs, in the order of their offsets; those next to each other share a span."""
        for first in first_offsets:
            run = self.runs[first]
            self.messages += run.messages
            self.body_bytes += run.body_bytes
            if self.spans and self.spans[-1][1] == first:
                self.spans[-1] = (self.spans[-1][0], run.end)
            else:
                self.spans.append((first, run.end))


def purge(
    state: "QueueState",
    mark: PurgeMark,
    spared: Spared,
    unsettled: Mapping[str, int],
    journal: "Journal",
) -> tuple[Purged, "list[Container]"]:
    """Take everything that the mark covers out of the queue; its rows stay.

    `unsettled` counts, by the name of each group, its unsettled messages of the spared runs. Also
    returns the containers of the rest, for the caller to free.
    """
    record = state.record
    purged = Purged(record.messages - spared.messages, record.body_bytes - spared.body_bytes)
    record.messages, record.body_bytes = spared.messages, spared.body_bytes
    if not spared.messages:  # its rows in the index of ages would be reviewed for nothing
        record.waiting_since_ms = record.settled_since_ms = 0
    record.scheduled = 0
    dropped: list[Container] = []
    for group in state.groups.values():
        dropped += group.drop_purged(mark, spared.runs)
        group.settled = record.next_offset - group.base - unsettled[group.name]
        journal.group_changed(record, group)
        state.notify_waiters(group, journal)  # too many may have blocked the group
    journal.queue_changed(record)
    return purged, dropped
