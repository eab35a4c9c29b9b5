"""A lane: the messages of one fairness key that one group has not been handed yet.

Pure. Holds a bounded window of run headers: slices that were given back come first, by offset, then
runs that were never handed out. Headers beyond the window stay in the engine and are fed in page by
page, so that a backlog costs no memory.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence

from storage_svc.queue.run import Run, Slice

LANE_RUNS_MAX = 128
"""Headers of runs that one lane keeps in memory before they are handed out."""

DROPPED_SINGLY_MAX = 16
"""Deleted runs that are looked up one by one; for more, the slices between the first and the last
of them are examined once."""


class Lane:
    """The messages of one fairness key that one group has not been handed yet."""

    __slots__ = ("fresh", "key", "position", "read_from", "returned", "unread")

    def __init__(self, key: str, position: int, read_from: int | None = None) -> None:
        self.key = key
        self.position = position
        """Everything before it was handed out, or precedes the group."""
        self.fresh: deque[Run] = deque()
        self.returned: list[Slice] = []
        self.unread = read_from is not None
        """Whether the engine may hold runs beyond `fresh`, from `read_from` on."""
        self.read_from = read_from if read_from is not None else position

    @property
    def needs_page(self) -> bool:
        """Nothing is in memory, and the engine may hold more."""
        return self.unread and not self.fresh and not self.returned

    @property
    def drained(self) -> bool:
        """Nothing to hand out, in memory or not."""
        return not (self.fresh or self.returned or self.unread)

    @property
    def next_offset(self) -> int:
        """The first message to hand out, or a lower bound of it."""
        head = self.head()
        return max(self.position, self.read_from) if head is None else head.start

    @property
    def mark(self) -> tuple[int, int]:
        """Where to continue after a restart: first offset of the run at `position`, then that."""
        if self.fresh:
            return min(self.fresh[0].first_offset, self.position), self.position
        if self.unread:
            return min(self.read_from, self.position), self.position
        return self.position, self.position

    def offer(self, run: Run) -> None:
        """A run was appended behind all others."""
        if self.unread:
            return  # it will be read with a later page
        if len(self.fresh) < LANE_RUNS_MAX:
            self.fresh.append(run)
        else:
            self.unread = True
            self.read_from = run.first_offset

    def feed(self, runs: Iterable[Run], *, read_to: int, last: bool) -> None:
        """Take a page of headers, from `read_from` to `read_to`; `last` if nothing lies behind."""
        self.fresh.extend(run for run in runs if run.end > self.position)
        self.read_from = read_to
        self.unread = not last

    def head(self) -> Slice | None:
        """The next messages, as far as they are in memory."""
        if self.returned:
            return self.returned[0]
        if self.fresh:
            run = self.fresh[0]
            return Slice(max(self.position, run.first_offset), run.end, run)
        return None

    def take(self, messages: int) -> Slice:
        """The first messages of the head."""
        if self.returned:
            head = self.returned[0]
            taken = head._replace(end=head.start + messages)
            if taken.end == head.end:
                del self.returned[0]
            else:
                self.returned[0] = head._replace(start=taken.end)
            return taken
        run = self.fresh[0]
        start = max(self.position, run.first_offset)
        self.position = start + messages
        if self.position == run.end:
            self.fresh.popleft()
        return Slice(start, self.position, run)

    def returned_of(self, run: Run) -> list[Slice]:
        """The slices of one run that are ready again; found without passing over the others."""
        first, end = self._returned_range(run)
        return self.returned[first:end]

    def drop(self, runs: Sequence[Run]) -> list[int]:
        """Forget runs that are deleted; returns the starts of their slices that were ready again.

        Within a queue a run is known by its first offset.
        """
        first_offsets = {run.first_offset for run in runs}
        if self.fresh:
            self.fresh = deque(run for run in self.fresh if run.first_offset not in first_offsets)
        if not self.returned:
            return []
        if len(runs) <= DROPPED_SINGLY_MAX:
            return [start for run in runs for start in self._drop_returned(run)]
        first, end = self._returned_range(min(runs)), self._returned_range(max(runs))
        window = self.returned[first[0] : end[1]]
        self.returned[first[0] : end[1]] = [
            each for each in window if each.run.first_offset not in first_offsets
        ]
        return [each.start for each in window if each.run.first_offset in first_offsets]

    def _drop_returned(self, run: Run) -> list[int]:
        first, end = self._returned_range(run)
        starts = [each.start for each in self.returned[first:end]]
        del self.returned[first:end]
        return starts

    def _returned_range(self, run: Run) -> tuple[int, int]:
        """Where the slices of a run lie in `returned`, which is in the order of offsets."""
        first = bisect_left(self.returned, run.first_offset, key=_start)
        return first, bisect_left(self.returned, run.end, lo=first, key=_start)

    def give_back(self, slice_: Slice) -> tuple[Slice, list[int]]:
        """Make messages that were handed out ready again.

        Adjacent slices with the same history are merged: returns the slice, and the starts of those
        that it replaces.
        """
        swallowed: list[int] = []
        at = bisect_left(self.returned, slice_)
        if at < len(self.returned) and _continues(slice_, self.returned[at]):
            swallowed.append(self.returned[at].start)
            slice_ = slice_._replace(end=self.returned.pop(at).end)
        if at > 0 and _continues(self.returned[at - 1], slice_):
            at -= 1
            swallowed.append(slice_.start)
            slice_ = slice_._replace(start=self.returned.pop(at).start)
        self.returned.insert(at, slice_)
        return slice_, swallowed


def _start(slice_: Slice) -> int:
    return slice_.start


def _continues(one: Slice, other: Slice) -> bool:
    return one.end == other.start and one[2:] == other[2:]
