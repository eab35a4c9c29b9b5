"""A purge: everything that a queue holds leaves at once, but for what live reservations hold.

Pure. A purge does not walk over the stored runs: it marks them. A run below the mark that is not
spared is gone for every reader and consumer from that moment on, and its rows are erased later
(`operations/erase.py`). Until then whatever reads stored runs asks the mark.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from storage_svc.queue.run import Run

if TYPE_CHECKING:
    from storage_svc.queue.queue import QueueState
    from storage_svc.queue.record import Journal


class PurgeMark:
    """What a purge covers: the runs below an offset, except those in spans that it spares."""

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
    """What a purge has removed, and what it has spared."""

    messages: int
    body_bytes: int
    spared_messages: int


def spans_of(runs: Iterable[Run]) -> list[tuple[int, int]]:
    """The offsets of runs in their order; those next to each other are merged."""
    spans: list[tuple[int, int]] = []
    for run in sorted(runs):
        if spans and spans[-1][1] == run.first_offset:
            spans[-1] = (spans[-1][0], run.end)
        else:
            spans.append((run.first_offset, run.end))
    return spans


def held_runs(state: "QueueState") -> dict[int, Run]:
    """The runs that live reservations cover, by their first offsets."""
    live = chain.from_iterable(group.live.values() for group in state.groups.values())
    return {each.slice.run.first_offset: each.slice.run for each in live}


def purge(
    state: "QueueState", mark: PurgeMark, spared: Mapping[int, Run], journal: "Journal"
) -> Purged:
    """Take everything that the mark covers out of the queue; its rows stay."""
    record = state.record
    kept_messages, kept_bytes = _sizes(spared.values())
    purged = Purged(record.messages - kept_messages, record.body_bytes - kept_bytes, kept_messages)
    record.messages, record.body_bytes = kept_messages, kept_bytes
    if not kept_messages:  # its rows in the index of ages would be reviewed for nothing
        record.waiting_since_ms = record.settled_since_ms = 0
    record.scheduled = 0
    for group in state.groups.values():
        group.drop_purged(mark, spared, record.next_offset)
        journal.group_changed(record, group)
        state.notify_waiters(group, journal)  # too many may have blocked the group
    journal.queue_changed(record)
    return purged


def _sizes(runs: Iterable[Run]) -> tuple[int, int]:
    sizes: Sequence[tuple[int, int]] = [(run.messages, run.body_bytes) for run in runs]
    return sum(messages for messages, _ in sizes), sum(body_bytes for _, body_bytes in sizes)
