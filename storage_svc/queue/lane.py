"""A lane: the messages of one fairness key that one group has yet to be given.

Pure. Holds a bounded window of run headers: what was given back comes first, in the order of its
offsets, then what was never handed out. Beyond the window the headers stay in the engine and are
fed in page by page, so that a backlog costs no memory.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Set
from typing import NamedTuple

LANE_RUNS_MAX = 128
"""Headers of runs, never handed out, that one lane keeps in memory."""


class Run(NamedTuple):
    """The header of a stored run. Immutable, like the run itself."""

    first_offset: int
    messages: int
    body_bytes: int
    publish_time_ms: int
    dead_deadline_ms: int  # 0: it lives for ever
    fairness_key: str
    traceparent: str

    @property
    def end(self) -> int:
        return self.first_offset + self.messages

    @property
    def message_bytes(self) -> int:
        """What one message counts for: the mean, because nobody looks at single messages."""
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


class Lane:
    """What one group has yet to be given of one fairness key."""

    __slots__ = ("fresh", "key", "position", "read_from", "returned", "unread")

    def __init__(self, key: str, position: int, read_from: int | None = None) -> None:
        self.key = key
        self.position = position
        """Everything before it was handed out, or is not this group's."""
        self.fresh: deque[Run] = deque()
        self.returned: list[Slice] = []
        self.unread = read_from is not None
        """Whether the engine may hold runs beyond `fresh`, from `read_from` on."""
        self.read_from = read_from if read_from is not None else position

    @property
    def starved(self) -> bool:
        """Nothing in memory, and it is worth reading on."""
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
        """Where to read on after a restart: the first offset of the run at `position`, and that."""
        if self.fresh:
            return min(self.fresh[0].first_offset, self.position), self.position
        if self.unread:
            return min(self.read_from, self.position), self.position
        return self.position, self.position

    def offer(self, run: Run) -> None:
        """A run was appended behind all others."""
        if self.unread:
            return  # it will be read in its turn
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
        """What comes next, as far as it is in memory."""
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

    def drop(self, first_offsets: Set[int]) -> list[int]:
        """Forget runs that are deleted; returns the starts of their slices that were ready again.

        Within a queue a run is known by its first offset.
        """
        if self.fresh:
            self.fresh = deque(run for run in self.fresh if run.first_offset not in first_offsets)
        if not self.returned:
            return []
        dropped = [each.start for each in self.returned if each.run.first_offset in first_offsets]
        if dropped:
            self.returned = [
                each for each in self.returned if each.run.first_offset not in first_offsets
            ]
        return dropped

    def give_back(self, slice_: Slice) -> tuple[Slice, list[int]]:
        """Messages that were handed out are ready again.

        Neighbours with the same history become one slice: returns it, and the starts of those that
        it swallowed.
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


def _continues(one: Slice, other: Slice) -> bool:
    return one.end == other.start and one[2:] == other[2:]
