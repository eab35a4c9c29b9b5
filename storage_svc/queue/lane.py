"""A lane: the messages of one fairness key that one group has not been handed yet.

Pure. Holds a bounded window of run headers: slices that were given back in place come first, by
offset, then runs that were never handed out, among which retries take their turns. Headers beyond
the window stay in the engine and are fed in page by page, so that a backlog costs no memory. A
delayed slice that keeps its place holds back the messages after it (V9).
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from storage_svc.queue.purge import PurgeMark
from storage_svc.queue.retry import RetryLine, Turn
from storage_svc.queue.run import Run, Slice
from tidemark.limits import RETURNED_SLICES_MAX

LANE_RUNS_MAX = 128
"""Headers of runs that one lane keeps in memory before they are handed out."""

RETRIES_MAX = RETURNED_SLICES_MAX
"""Slices of a retry line at which the line goes first, so that failures cost no more memory."""

DROPPED_SINGLY_MAX = 16
"""Deleted runs that are looked up one by one; for more, the slices between the first and the last
of them are examined once."""


Container = dict[Any, Any] | list[Any]


class Lane:
    """The messages of one fairness key that one group has not been handed yet."""

    __slots__ = (
        "fresh",
        "holding",
        "key",
        "position",
        "read_from",
        "retries",
        "returned",
        "unread",
    )

    def __init__(self, key: str, position: int, read_from: int | None = None) -> None:
        self.key = key
        self.position = position
        """Everything before it was handed out, or precedes the group."""
        self.fresh: list[Run] = []  # of few: an empty deque weighs ten times as much
        self.returned: list[Slice] = []
        self.retries: RetryLine | None = None
        """None until the first retry: most lanes never have any."""
        self.holding: set[int] | None = None
        """Starts of delayed slices that hold back the messages after them."""
        self.unread = read_from is not None
        """Whether the engine may hold runs beyond `fresh`, from `read_from` on."""
        self.read_from = read_from if read_from is not None else position

    @property
    def needs_page(self) -> bool:
        """Nothing is in memory, and the engine may hold more."""
        if not self.unread or self.fresh or self.returned:
            return False
        return not self._is_retry_next and not self._holds_back(self.next_offset)

    @property
    def drained(self) -> bool:
        """Nothing to hand out, in memory or not."""
        return not (self.fresh or self.returned or self.unread or self.retries)

    @property
    def next_offset(self) -> int:
        """The first message to hand out, or a lower bound of it."""
        if self.returned:
            fresh = self.returned[0].start
        elif self.fresh:
            fresh = max(self.position, self.fresh[0].first_offset)
        else:
            fresh = max(self.position, self.read_from)
        if not self.retries:
            return fresh
        return min(fresh, *(each.start for each in self.retries.slices))

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
        head = None
        if self.returned:
            head = self.returned[0]
        elif self._is_retry_next and self.retries:
            head = self.retries.head()
        elif self.fresh:
            run = self.fresh[0]
            head = Slice(max(self.position, run.first_offset), run.end, run)
        return None if head is None or self._holds_back(head.start) else head

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
        if self._is_retry_next and self.retries:
            return self.retries.take(messages)
        run = self.fresh[0]
        start = max(self.position, run.first_offset)
        self.position = start + messages
        if self.position == run.end:
            del self.fresh[0]
        return Slice(start, self.position, run)

    def returned_of(self, run: Run) -> list[Slice]:
        """The slices of one run that are ready again; found without passing over the others."""
        first, end = self._returned_range(run)
        return self.returned[first:end] + (self.retries.of(run) if self.retries else [])

    @property
    def all_returned(self) -> list[Slice]:
        """Every slice that is ready again, retries last."""
        return [*self.returned, *(self.retries.slices if self.retries else ())]

    def record_at(self, start: int) -> tuple[Slice, Turn | None] | None:
        """The next slice that is ready again, with its turn as a retry, if it begins there."""
        if self.returned and self.returned[0].start == start:
            return self.returned[0], None
        return self.retries.rest_at(start) if self.retries else None

    def drop(self, runs: Sequence[Run]) -> list[int]:
        """Forget runs that are deleted; returns the starts of their slices that were ready again.

        Within a queue a run is known by its first offset.
        """
        first_offsets = {run.first_offset for run in runs}
        if self.fresh:
            self.fresh = [run for run in self.fresh if run.first_offset not in first_offsets]
        retries = self.retries.drop(runs) if self.retries else []
        if not self.returned:
            return retries
        if len(runs) <= DROPPED_SINGLY_MAX:
            return [start for run in runs for start in self._drop_returned(run)] + retries
        first, end = self._returned_range(min(runs)), self._returned_range(max(runs))
        window = self.returned[first[0] : end[1]]
        self.returned[first[0] : end[1]] = [
            each for each in window if each.run.first_offset not in first_offsets
        ]
        dropped = [each.start for each in window if each.run.first_offset in first_offsets]
        return dropped + retries

    def drop_purged(self, mark: PurgeMark, spared: Mapping[int, Run]) -> list[Container]:
        """Forget everything that a purge covers, but for runs that are spared; see the group."""
        dropped: list[Container] = [self.returned]
        self.fresh = [run for run in self.fresh if run.first_offset in spared]
        if len(spared) < len(self.returned):
            runs = sorted(run for run in spared.values() if run.fairness_key == self.key)
            ranges = [self._returned_range(run) for run in runs]
            self.returned = [each for first, end in ranges for each in self.returned[first:end]]
        else:
            self.returned = [each for each in self.returned if each.run.first_offset in spared]
        if self.retries:
            dropped += self.retries.keep(spared)
        if self.unread:
            self.read_from = mark.next_live(self.read_from)
        return dropped

    def hold_back(self, start: int) -> None:
        """A delayed slice keeps its place: messages after it wait until it is ready."""
        if self.holding is None:
            self.holding = set()
        self.holding.add(start)

    def let_pass(self, start: int) -> None:
        """A delayed slice is ready or gone."""
        if self.holding is not None:
            self.holding.discard(start)

    def _holds_back(self, offset: int) -> bool:
        return bool(self.holding) and min(self.holding or ()) < offset

    @property
    def _is_retry_next(self) -> bool:
        """Whether the first retry goes before the runs that were never handed out."""
        retries = self.retries
        if not retries:
            return False
        if len(retries) >= RETRIES_MAX or not (self.fresh or self.unread):
            return True
        first = self.fresh[0].first_offset if self.fresh else self.read_from
        return retries.after_offset <= max(self.position, first)

    def _drop_returned(self, run: Run) -> list[int]:
        first, end = self._returned_range(run)
        starts = [each.start for each in self.returned[first:end]]
        del self.returned[first:end]
        return starts

    def _returned_range(self, run: Run) -> tuple[int, int]:
        """Where the slices of a run lie in `returned`, which is in the order of offsets."""
        first = bisect_left(self.returned, run.first_offset, key=_start)
        return first, bisect_left(self.returned, run.end, lo=first, key=_start)

    def retry(self, slice_: Slice, turn: Turn) -> tuple[Slice, list[int]]:
        """Make messages ready again behind those that are ready; returns as `give_back` does."""
        if self.retries is None:
            self.retries = RetryLine()
        return self.retries.add(slice_, turn)

    def give_back(self, slice_: Slice) -> tuple[Slice, list[int]]:
        """Make messages that were handed out ready again, in place.

        Adjacent slices with the same history are merged: returns the slice, and the starts of those
        that it replaces.
        """
        swallowed: list[int] = []
        at = bisect_left(self.returned, slice_)
        joined = slice_.joined(self.returned[at]) if at < len(self.returned) else None
        if joined is not None:
            swallowed.append(self.returned.pop(at).start)
            slice_ = joined
        joined = self.returned[at - 1].joined(slice_) if at > 0 else None
        if joined is not None:
            at -= 1
            swallowed.append(slice_.start)
            del self.returned[at]
            slice_ = joined
        self.returned.insert(at, slice_)
        return slice_, swallowed


def _start(slice_: Slice) -> int:
    return slice_.start
