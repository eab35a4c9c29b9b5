"""A group's progress over one queue: messages reserved, given back, and next to be handed out.

Pure. Every unsettled message of the queue is, for each group, in exactly one place: never handed
out (in a lane, from its position on), in a live reservation, ready again (in a lane), delayed, or
buried (its attempts are exhausted or its time to live has passed, and a sweep will remove it).
Everything before a lane's position that is in none of these is settled; so settling needs no
separate record, and the cost of progress depends on the messages in flight (ADR 4).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from storage_svc.queue.drr import Ring
from storage_svc.queue.lane import Container, Lane
from storage_svc.queue.purge import PurgeMark
from storage_svc.queue.reservation import Reservation
from storage_svc.queue.retry import starts_of, starts_within
from storage_svc.queue.returned import Returned, ReturnPlace
from storage_svc.queue.run import Run, Slice
from storage_svc.queue.standing import Standing
from tidemark.errors import Fenced

PASSED_MAX = 1000
"""Slices that one hand-out sets aside, so that a backlog past its time costs no long commit."""

IDLE_LANES_MAX = 1024
"""Unused lanes that a group may have before it is checked for those that can be forgotten."""


class Taken(NamedTuple):
    """The result of `Group.take`."""

    slices: list[Slice]
    passed: list[Slice]
    """Not to be handed out: past their time to live, or their attempts are exhausted."""
    needs_page: Lane | None
    """The lane that must read its next page before more can be taken."""
    too_large: bool = False
    """Whether the next message alone exceeds the bytes that are left."""
    answer_full: bool = False
    """Whether the run of the next messages might not fit the answer."""


class Group:
    """One group on one queue."""

    __slots__ = (
        "base",
        "buried",
        "delayed",
        "has_waiters",
        "held",
        "lanes",
        "lanes_max",
        "last_used_ms",
        "live",
        "name",
        "outstanding",
        "owner_client_id",
        "owner_epoch",
        "ring",
        "settled",
        "standing",
    )

    def __init__(self, name: str, base: int, weights: Mapping[str, int]) -> None:
        self.name = name
        self.base = base
        """Where the group started: messages before it are not part of its progress."""
        self.settled = 0
        """Messages from `base` on that are settled or were never there."""
        self.lanes: dict[str, Lane] = {}
        self.lanes_max = IDLE_LANES_MAX
        """With more lanes than that, those of `idle_lanes` are checked and forgotten."""
        self.ring = Ring(weights)
        self.outstanding: dict[int, int] = {}
        """Messages handed out and not settled, by the first offset of their run."""
        self.live: dict[int, Reservation] = {}
        self.held: dict[int, int] = {}
        """Live reservations by the first offset of their run: how many hold messages of it."""
        self.delayed: dict[int, Returned] = {}
        """Slices by their start that are ready again at a time."""
        self.buried: dict[int, Slice] = {}
        """Slices by their start that are not handed out again."""
        self.owner_client_id = ""
        self.owner_epoch = 0
        self.last_used_ms = 0
        """When a consumer last used it, as far as that was noted (R14)."""
        self.has_waiters = False
        """Whether the last hand-out fell short of the request, so that consumers wait for more."""
        self.standing: Standing | None = None
        """The consumer that gets messages as they become ready. It may be of an earlier broker."""

    @property
    def has_returned(self) -> bool:
        """Whether any message that was handed out is ready again, delayed or buried."""
        return bool(
            self.delayed or self.buried or any(lane.all_returned for lane in self.lanes.values())
        )

    @property
    def returned_undelayed(self) -> list[int]:
        """The starts of slices that have a separate record and no delay."""
        in_lanes = (each.start for lane in self.lanes.values() for each in lane.all_returned)
        return [*self.buried, *in_lanes]

    @property
    def in_flight_records(self) -> int:
        """Live reservations, returned slices and lanes."""
        in_lanes = sum(1 + len(lane.all_returned) for lane in self.lanes.values())
        return len(self.live) + len(self.delayed) + len(self.buried) + in_lanes

    def add_lane(self, key: str, position: int, read_from: int | None) -> None:
        """A lane that exists in the engine."""
        self.lanes[key] = Lane(key, position, read_from)
        if read_from is not None:
            self.ring.activate(key)

    def idle_lanes(self) -> list[Lane]:
        """Lanes with nothing to hand out; they can be forgotten if no run of theirs is stored.

        The one without a key is part of the group's record, and stays.
        """
        idle = [lane for lane in self.lanes.values() if lane.key and lane.drained]
        return [lane for lane in idle if lane.key not in self.ring]

    def forget_lanes(self, lanes: Sequence[Lane]) -> None:
        """Forget lanes of which no run is stored; a later run starts a new lane."""
        for lane in lanes:
            del self.lanes[lane.key]
        self.lanes_max = 2 * len(self.lanes) + IDLE_LANES_MAX

    def offer(self, run: Run) -> None:
        """Add a run that was appended to the queue."""
        lane = self.lanes.get(run.fairness_key)
        if lane is None:
            lane = self.lanes[run.fairness_key] = Lane(run.fairness_key, self.base)
        lane.offer(run)
        self.ring.activate(run.fairness_key)

    def take(
        self,
        messages_max: int,
        bytes_max: int,
        now_ms: int,
        *,
        max_attempts: int = 0,
        at_least_one: bool = True,
        room_bytes: float = math.inf,
    ) -> Taken:
        """Messages to hand out next, in fair turns; with `at_least_one`, the first of any size.

        Bytes are those of the mean message of a run. Any part of a run may hold nearly all its
        bytes, so each that is taken needs room for the whole run.
        """
        taken = Taken([], [], None)
        ring = self.ring
        while messages_max > 0 and len(taken.passed) < PASSED_MAX:
            key = ring.current()
            if key is None:
                return taken
            lane = self.lanes[key]
            head = lane.head()
            if head is None:
                if lane.needs_page:
                    return taken._replace(needs_page=lane)
                ring.retire()
                continue
            if 0 < head.run.dead_deadline_ms <= now_ms or 0 < max_attempts <= head.attempts:
                taken.passed.append(lane.take(head.messages))
                continue
            message_bytes = head.run.message_bytes
            if bytes_max < message_bytes and (taken.slices or not at_least_one):
                return taken._replace(too_large=True)
            if room_bytes < head.run.body_bytes:
                return taken._replace(answer_full=True)
            allowed = head.messages if ring.alone else ring.allowance_bytes() // message_bytes
            if allowed <= 0:
                ring.rotate()
                continue
            count = min(head.messages, allowed, messages_max, max(1, bytes_max // message_bytes))
            taken.slices.append(lane.take(count))
            ring.spend(count * message_bytes)
            messages_max -= count
            bytes_max -= count * message_bytes
            room_bytes -= head.run.body_bytes
            if lane.drained:
                ring.retire()  # also at the limit: the consumer need not ask again
        return taken

    def only_run(self) -> Run | None:
        """The run that is all there is to hand out, if nothing of it was handed out before: as
        nearly always in a queue that is consumed at once."""
        key = self.ring.only
        if key is None or self.delayed or self.buried or len(self.lanes) > self.lanes_max:
            return None
        lane = self.lanes[key]
        fresh = lane.fresh
        if len(fresh) != 1 or lane.returned or lane.retries or lane.holding or lane.unread:
            return None
        run = fresh[0]
        return run if lane.position <= run.first_offset else None

    def take_only(self, run: Run) -> None:
        """Hand out what `only_run` returned, as `take` and `hand_out` do."""
        lane = self.lanes[run.fairness_key]
        lane.fresh.clear()
        lane.position = run.end
        self.ring.retire()
        self.outstanding[run.first_offset] = run.messages

    def hand_out(self, slice_: Slice) -> None:
        """Count messages that leave their lane, unless they were handed out before."""
        if not slice_.deliveries:
            self.count_outstanding(slice_.run, slice_.messages)

    def count_outstanding(self, run: Run, messages: int) -> None:
        """Count messages of a run that are handed out and not settled."""
        first = run.first_offset
        self.outstanding[first] = self.outstanding.get(first, 0) + messages

    def settle(self, run: Run, count: int) -> bool:
        """Settle messages of a run; returns whether that settles the whole run."""
        first = run.first_offset
        self.settled += count
        left = self.outstanding[first] - count
        if left:
            self.outstanding[first] = left
            return False
        del self.outstanding[first]
        lane = self.lanes.get(run.fairness_key)
        if lane is not None and lane.position >= first + run.messages:
            return True  # as nearly always
        return self.has_settled(run)

    def has_settled(self, run: Run) -> bool:
        if run.end <= self.base or not run.is_for(self.name):
            return True
        lane = self.lanes.get(run.fairness_key)
        handed_out = lane is not None and lane.position >= run.end
        return handed_out and run.first_offset not in self.outstanding

    def has_settled_message(self, run: Run, offset: int) -> bool:
        """Whether one message is settled. Slow: for peeking, not for delivering."""
        lane = self.lanes.get(run.fairness_key)
        if offset < self.base or not run.is_for(self.name):
            return True
        if lane is None or offset >= lane.position:
            return False
        slices = [*lane.all_returned, *self.buried.values()]
        slices += (each.slice for each in self.delayed.values())
        spans = [(each.start, each.end) for each in slices]
        spans += (span for each in self.live.values() for span in each.open)
        return not any(start <= offset < end for start, end in spans)

    def holds(self, run: Run) -> bool:
        """Whether a live reservation covers messages of the run."""
        return run.first_offset in self.held

    def hold(self, reservation: Reservation) -> None:
        """Add a live reservation."""
        self.live[reservation.reservation_id] = reservation
        first = reservation.slice.run.first_offset
        self.held[first] = self.held.get(first, 0) + 1

    def let_go(self, reservation: Reservation) -> None:
        """Remove a reservation that is live no longer."""
        del self.live[reservation.reservation_id]
        first = reservation.slice.run.first_offset
        left = self.held[first] - 1
        if left:
            self.held[first] = left
        else:
            del self.held[first]

    def unsettled_spans(self, run: Run) -> list[tuple[int, int]]:
        """The messages of a run that no live reservation holds and that are not settled."""
        return [(each.start, each.end) for each in self.waiting_slices(run)]

    def waiting_slices(self, run: Run) -> list[Slice]:
        """The same with their attempts, in the order of offsets."""
        if not run.is_for(self.name):
            return []
        lane = self.lanes.get(run.fairness_key)
        position = max(self.base, self.base if lane is None else lane.position, run.first_offset)
        slices = [
            *([] if lane is None else lane.returned_of(run)),
            *(self.delayed[start].slice for start in starts_within([run], self.delayed)),
            *(self.buried[start] for start in starts_within([run], self.buried)),
        ]
        if position < run.end:
            slices.append(Slice(position, run.end, run))
        return sorted(slices)

    def drop_runs(self, runs: Sequence[Run]) -> list[tuple[int, int]]:
        """Forget runs of one lane that are deleted; no live reservation may hold any.

        Returns the starts of their slices that had a separate record, each with the end of its
        delay (0 without one).
        """
        lane = self.lanes.get(runs[0].fairness_key)
        position = self.base if lane is None else max(self.base, lane.position)
        self.settled += sum(
            run.first_offset + run.messages - max(position, run.first_offset)
            for run in runs
            if run.first_offset + run.messages > position and run.is_for(self.name)
        )
        first_offsets = {run.first_offset for run in runs}
        returned = lane.drop(runs) if lane is not None else []
        handed_out = first_offsets & self.outstanding.keys()
        if not handed_out:
            return []  # the usual case: nothing of them was given back either
        assert not handed_out & self.held.keys(), "a live reservation protects its run"
        self.settled += sum(self.outstanding.pop(first) for first in handed_out)
        came_back = [run for run in runs if run.first_offset in handed_out]
        delayed = [
            (start, self.end_delay(start).not_before_ms)
            for start in starts_within(came_back, self.delayed)
        ]
        buried = starts_within(came_back, self.buried)
        for start in buried:
            del self.buried[start]
        return [(start, 0) for start in returned + buried] + delayed

    @property
    def records(self) -> int:
        """Rows that belong to the group, about: of its lanes and of returned messages."""
        return len(self.lanes) + len(self.outstanding)

    def unsettled_of(self, runs: Iterable[Run]) -> int:
        """The messages of runs that the group has not settled, reserved ones included."""
        unsettled = 0
        for run in runs:
            if run.is_for(self.name):
                first = run.first_offset
                lane = self.lanes.get(run.fairness_key)
                handed_out = self.base if lane is None else max(self.base, lane.position)
                unsettled += max(0, run.end - max(handed_out, first))
                unsettled += self.outstanding.get(first, 0)
        return unsettled

    def drop_purged(self, mark: PurgeMark, spared: Mapping[int, Run]) -> list[Container]:
        """Forget everything that a purge covers; runs that live reservations hold are spared.

        Its cost depends on the spared runs. Returns the containers of the rest, for the caller to
        free.
        """
        dropped: list[Container] = [self.delayed, self.buried]
        if not self.outstanding.keys() <= spared.keys():
            dropped.append(self.outstanding)
            kept = self.outstanding.keys() & spared.keys()
            self.outstanding = {first: self.outstanding[first] for first in kept}
        if len(self.delayed) > len(spared):
            starts = starts_within(list(spared.values()), self.delayed)
        else:
            starts = [s for s, e in self.delayed.items() if e.slice.run.first_offset in spared]
        self.delayed = {start: self.delayed[start] for start in starts}
        self.buried = {start: self.buried[start] for start in starts_of(spared, self.buried)}
        for lane in self.lanes.values():
            dropped += lane.drop_purged(mark, spared)
            if lane.holding:
                lane.holding &= self.delayed.keys()
                self.ring.activate(lane.key)  # messages that they held back may be handed out
        return dropped

    def delay(self, returned: Returned) -> None:
        """Messages that came back are ready again later."""
        slice_ = returned.slice
        self.delayed[slice_.start] = returned
        if returned.place is ReturnPlace.HOLDING:
            self.lanes[slice_.run.fairness_key].hold_back(slice_.start)

    def end_delay(self, start: int) -> Returned:
        """Delayed messages are ready or gone; messages that they held back may be handed out."""
        returned = self.delayed.pop(start)
        if returned.place is ReturnPlace.HOLDING:
            key = returned.slice.run.fairness_key
            self.lanes[key].let_pass(start)
            self.ring.activate(key)
        return returned

    def settle_rest(self, run: Run) -> tuple[Lane, list[tuple[int, int]]]:
        """Settle the rest of a run of which a message was handed out or precedes the group.

        No live reservation may hold any of it. Returns the lane, whose position has moved past the
        run, and the slices that `drop_runs` returns.
        """
        came_back = self.drop_runs((run,))
        lane = self.lanes.setdefault(run.fairness_key, Lane(run.fairness_key, self.base))
        lane.position = max(lane.position, run.end)
        return lane, came_back

    def exhausted_runs(self, max_attempts: int) -> Iterator[int]:
        """First offsets of runs with messages that are set aside, or would be when taken next."""
        yield from (each.run.first_offset for each in self.buried.values())
        if max_attempts:
            for lane in self.lanes.values():
                for each in lane.all_returned:
                    if each.attempts >= max_attempts:
                        yield each.run.first_offset

    def check_owner(self, owner_epoch: int) -> None:
        """An owned queue serves its owner alone (E8)."""
        if self.owner_epoch and owner_epoch != self.owner_epoch:
            raise Fenced(
                f"the queue is owned under epoch {self.owner_epoch}, not {owner_epoch}",
                epoch=str(self.owner_epoch),
            )

    def check_settler(self, owner_epoch: int, client_id: str) -> None:
        """Raise Fenced unless the owner of the queue settles (E8)."""
        self.check_owner(owner_epoch)
        if self.owner_epoch and client_id != self.owner_client_id:
            raise Fenced(
                f"client {client_id!r} does not own the queue", epoch=str(self.owner_epoch)
            )

    def cursor(self, next_offset: int) -> int:
        """Every message before it is settled, as far as the state in memory shows."""
        marks = [next_offset, *self.delayed, *self.buried]
        marks += (lane.next_offset for lane in self.lanes.values() if not lane.drained)
        marks += (each.open[0][0] for each in self.live.values())
        return min(marks)
