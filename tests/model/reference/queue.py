"""One queue in its simplest form: for each group, one record per message.

The model knows no runs to slice, no lanes, no marks and no indexes: only where every message is in
every group. It is the measure for the real thing, so it is written to be obvious, not fast.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from typing import NamedTuple

from storage_svc.queue.reservation import Ending, Span


class Place(Enum):
    """Where a message is, for one group."""

    READY = "ready"
    RESERVED = "reserved"
    DELAYED = "delayed"
    BURIED = "buried"
    SETTLED = "settled"


class Published(NamedTuple):
    """Messages that were published together."""

    first_offset: int
    payloads: tuple[bytes, ...]
    body_bytes: int
    fairness_key: str
    publish_time_ms: int
    dead_deadline_ms: int

    @property
    def messages(self) -> int:
        return len(self.payloads)

    @property
    def end(self) -> int:
        return self.first_offset + self.messages

    @property
    def offsets(self) -> range:
        return range(self.first_offset, self.end)

    @property
    def message_bytes(self) -> int:
        return max(1, self.body_bytes // self.messages)

    def payloads_of(self, start: int, end: int) -> tuple[bytes, ...]:
        return self.payloads[start - self.first_offset : end - self.first_offset]


@dataclass(slots=True)
class Standing:
    """One message in one group."""

    run: Published
    place: Place = Place.READY
    attempts: int = 0
    deliveries: int = 0
    retry_of: int = 0
    """The reservation that it came back from, if it goes behind what is ready; 0 otherwise."""
    after: int = 0
    """Once ready again: the messages before it go first."""
    holds: bool = False
    """Whether it keeps what comes after it waiting while it is delayed."""

    def undeliverable(self, now_ms: int, max_attempts: int) -> bool:
        return 0 < self.run.dead_deadline_ms <= now_ms or 0 < max_attempts <= self.attempts

    @property
    def history(self) -> tuple[int, ...]:
        turn = self.after, self.retry_of
        return self.run.first_offset, self.attempts, self.deliveries, *turn

    def rank(self, offset: int) -> tuple[int, ...]:
        """What is handed out first: what came back in place, then what never left in the order of
        offsets, with retries before what was published after they were ready (S2, V9)."""
        if self.retry_of:
            return 1, self.after, 0, self.retry_of, offset
        return int(self.deliveries == 0), offset, 1


@dataclass(slots=True)
class ModelReservation:
    """Messages in a consumer's hands, and what became of them."""

    reservation_id: int
    group: str
    run: Published
    start: int
    end: int
    deadline_ms: int
    owner_epoch: int
    open: set[int]
    given: int
    """The messages before it were given to the application, as far as that was reported."""
    done: dict[int, Ending] = field(default_factory=dict)
    fading: bool = False
    """Settled long ago: storage is free to have forgotten it."""
    forgotten: bool = False
    """Gone from the disk with the handle of its queue; memory may know it until the commit ends."""

    @property
    def live(self) -> bool:
        return bool(self.open)

    @property
    def last_ending(self) -> Ending:
        return list(self.done.values())[-1]


@dataclass(slots=True)
class ModelGroup:
    """Where every stored message from `base` on is, for one group."""

    name: str
    base: int
    standings: dict[int, Standing] = field(default_factory=dict)
    delayed: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Nacked together: start -> (end, ready again at)."""
    buried: dict[int, int] = field(default_factory=dict)
    """Buried together: start -> end."""
    owner_client_id: str = ""
    owner_epoch: int = 0
    last_used_ms: int = 0
    """When a consumer last used it, as far as that was noted."""
    waits: bool = False
    """Whether a consumer asked for more than there was and has had no notice since."""

    def offer(self, run: Published) -> None:
        for offset in run.offsets:
            if offset >= self.base:
                self.standings[offset] = Standing(run)

    def in_place(self, *places: Place) -> list[int]:
        return sorted(o for o, each in self.standings.items() if each.place in places)

    def place(self, offset: int) -> Place:
        """What came before the group counts as settled."""
        standing = self.standings.get(offset)
        return Place.SETTLED if standing is None else standing.place

    @property
    def unsettled(self) -> list[int]:
        return sorted(o for o, each in self.standings.items() if each.place is not Place.SETTLED)

    def has_settled(self, run: Published) -> bool:
        return all(
            self.standings[offset].place is Place.SETTLED
            for offset in run.offsets
            if offset in self.standings
        )

    def reachable(self) -> list[int]:
        """What is ready and not held back by a delayed message before it, of the same key."""
        held_from: dict[str, int] = {}
        for offset in self.in_place(Place.DELAYED):
            if self.standings[offset].holds:
                held_from.setdefault(self.standings[offset].run.fairness_key, offset)
        return [
            offset
            for offset in self.in_place(Place.READY)
            if offset < held_from.get(self.standings[offset].run.fairness_key, offset + 1)
        ]

    def deliverable(self, now_ms: int, max_attempts: int) -> list[int]:
        return [
            offset
            for offset in self.reachable()
            if not self.standings[offset].undeliverable(now_ms, max_attempts)
        ]

    def slices(self, offsets: Iterable[int]) -> list[Span]:
        """Neighbours with the same history, as spans."""
        return [
            span
            for _, same in groupby(sorted(offsets), key=lambda o: self.standings[o].history)
            for span in spans_of(same)
        ]

    def dying(self, run: Published) -> list[Span]:
        """What the group has not settled of a run, cut where the attempts differ."""
        offsets = [o for o in run.offsets if self.place(o) is not Place.SETTLED]
        return [
            span
            for _, same in groupby(offsets, key=lambda o: self.standings[o].attempts)
            for span in spans_of(same)
        ]

    def drop(self, run: Published) -> None:
        """The run is gone, for whatever reason."""
        for offset in run.offsets:
            self.standings.pop(offset, None)
            self.delayed.pop(offset, None)
            self.buried.pop(offset, None)


@dataclass(slots=True)
class QueueModel:
    """One queue."""

    queue_id: int
    name: str
    next_offset: int = 0
    runs: dict[int, Published] = field(default_factory=dict)
    groups: dict[str, ModelGroup] = field(default_factory=dict)
    reservations: dict[int, ModelReservation] = field(default_factory=dict)
    scheduled: dict[int, tuple[int, Published]] = field(default_factory=dict)
    """Schedule id -> (due, run without its offset)."""
    paused: bool = False
    loaded: bool = True
    tracked: bool = False
    last_used_ms: int = 0

    @property
    def messages(self) -> int:
        return sum(run.messages for run in self.runs.values())

    @property
    def live(self) -> list[ModelReservation]:
        return [each for each in self.reservations.values() if each.live]

    def live_of(self, group: str) -> list[ModelReservation]:
        return [each for each in self.live if each.group == group]

    def append(self, run: Published) -> Published:
        run = run._replace(first_offset=self.next_offset)
        self.next_offset = run.end
        self.runs[run.first_offset] = run
        for group in self.groups.values():
            group.offer(run)
        return run

    def add_group(self, name: str, base: int = 0) -> ModelGroup:
        group = self.groups[name] = ModelGroup(name, base)
        for run in self.runs.values():
            group.offer(run)
        return group

    def remove_group(self, name: str) -> None:
        del self.groups[name]
        for each in [each for each in self.reservations.values() if each.group == name]:
            del self.reservations[each.reservation_id]

    def is_held(self, run: Published) -> bool:
        return any(each.run == run for each in self.live)

    def waiting_spans(self, run: Published) -> list[Span]:
        """What some group has not settled; everything where there is no group."""
        if not self.groups:
            return [(run.first_offset, run.end)]
        return spans_of(
            offset
            for offset in run.offsets
            if any(
                offset in group.standings and group.standings[offset].place is not Place.SETTLED
                for group in self.groups.values()
            )
        )

    def delete_run(self, run: Published) -> None:
        del self.runs[run.first_offset]
        for group in self.groups.values():
            group.drop(run)

    def delete_settled(self, runs: Sequence[Published]) -> None:
        """Delete those of the runs that every group has settled (R2)."""
        for run in runs:
            settled = all(group.has_settled(run) for group in self.groups.values())
            if self.groups and settled and run.first_offset in self.runs:
                self.delete_run(run)

    def evict(self) -> None:
        """Storage unloads the queue and forgets what it kept for repeated settlements."""
        for each in self.reservations.values():
            each.forgotten = each.forgotten or not each.live
        self.unload()

    def unload(self) -> None:
        """The queue is not in memory any more, however that came."""
        self.loaded = self.tracked = False
        for group in self.groups.values():
            group.waits = False

    def fade_settled(self) -> None:
        """There are more settled reservations than storage remembers."""
        for each in self.reservations.values():
            each.fading = each.fading or not each.live


def spans_of(offsets: Iterable[int]) -> list[Span]:
    """Consecutive numbers, which ascend, as spans."""
    return [(each[0], each[-1] + 1) for each in _consecutive(offsets)]


def _consecutive(offsets: Iterable[int]) -> Iterator[list[int]]:
    together: list[int] = []
    for offset in offsets:
        if together and offset != together[-1] + 1:
            yield together
            together = []
        together.append(offset)
    if together:
        yield together
