"""The state of one queue: its runs, its groups and their reservations, as rules without I/O.

Pure: no engine, no clock, no wire format. Every method either raises and changes nothing, or
changes the state and writes the change to a `Journal`, so that memory and engine always agree.
Works in runs and slices: a thousand messages that share their history are one record.
"""

from collections.abc import Iterable, Sequence

from storage_svc.queue.group import Group
from storage_svc.queue.lane import Container, Lane
from storage_svc.queue.record import Journal, QueueRecord, Rules
from storage_svc.queue.reservation import Ending, Reservation, Span
from storage_svc.queue.retry import Turn
from storage_svc.queue.returned import Returned, ReturnPlace, as_retry, ready
from storage_svc.queue.run import Run, Slice
from storage_svc.queue.settled import SettledBudget, SettledReservations
from tidemark.errors import GroupNotFound, ReservationNotFound

_SETTLING = (Ending.ACK, Ending.DEAD_LETTER)
_WITHOUT_USE = (Ending.EXPIRED, Ending.REVOKED)
"""Endings that no consumer has asked for."""


class QueueState:
    """A materialized queue."""

    __slots__ = ("_settled", "groups", "record", "reservations", "rules")

    def __init__(
        self, record: QueueRecord, rules: Rules, budget: SettledBudget | None = None
    ) -> None:
        self.record = record
        self.rules = rules
        self.groups = record.groups
        self.reservations: dict[int, Reservation] = {}
        self._settled = SettledReservations(budget or SettledBudget())

    # --- runs ----------------------------------------------------------------------------------

    def append(self, run: Run, body: bytes, now_ms: int, journal: Journal) -> None:
        """Give a run the next offsets."""
        record = self.record
        first_offset, messages, body_bytes, published_ms, _, fairness_key, _, only_for = run
        assert first_offset == record.next_offset, "offsets have no gaps"
        record.next_offset = first_offset + messages
        record.messages += messages
        record.body_bytes += body_bytes
        record.last_activity_ms = now_ms
        if fairness_key:
            record.keyed = True
        if not 0 < record.waiting_since_ms <= published_ms:
            record.note_waiting(published_ms)
        if published_ms < now_ms:
            record.unordered = True
        if only_for:
            record.addressed = True
        journal.put_run(record, run, body)
        journal.queue_changed(record)
        for group in self.groups.values():
            if not only_for or run.is_for(group.name):
                group.offer(run)
                if group.has_waiters:
                    self.notify_waiters(group, journal)
            else:
                group.settled += run.messages
                journal.group_changed(record, group)

    def delete_runs(self, runs: Sequence[Run], journal: Journal) -> None:
        """Delete runs of one lane in every group; no live reservation may hold any."""
        for group in self.groups.values():
            came_back = group.drop_runs(runs)
            for start, not_before_ms in came_back:
                journal.delete_returned(self.record, group, start, not_before_ms)
            if came_back:
                self.notify_waiters(group, journal)  # too many may have blocked the group
            journal.group_changed(self.record, group)
        self._erase(runs, journal)

    def is_held(self, run: Run) -> bool:
        """Whether any live reservation covers messages of the run."""
        return any(group.holds(run) for group in self.groups.values())

    def held_runs(self) -> set[int]:
        """The first offsets of all runs that live reservations cover."""
        return {first for group in self.groups.values() for first in group.held}

    def is_settled(self, run: Run) -> bool:
        """Whether there are groups, and every one has settled the run."""
        return bool(self.groups) and all(group.has_settled(run) for group in self.groups.values())

    def settle_rest(self, run: Run, journal: Journal) -> None:
        """Settle the messages that groups have not settled of a run that each was handed in part.

        No live reservation may hold any of it.
        """
        for group in self.groups.values():
            if group.has_settled(run):
                continue
            lane, came_back = group.settle_rest(run)
            for start, not_before_ms in came_back:
                journal.delete_returned(self.record, group, start, not_before_ms)
            journal.lane_moved(self.record, group, lane)
            journal.group_changed(self.record, group)
            self.notify_waiters(group, journal)  # too many may have blocked the group
        self._erase_if_done(run, journal)

    def exhausted_runs(self) -> set[int]:
        """The first offsets of runs with messages that a sweep has to dispose of (L5)."""
        return {
            first_offset
            for group in self.groups.values()
            for first_offset in group.exhausted_runs(self.rules.max_attempts)
        }

    # --- rules and pauses ----------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        """Whether consumers get nothing: the queue or its topic is paused (L10)."""
        return self.rules.paused or self.record.paused

    def obey(self, rules: Rules, journal: Journal) -> None:
        """The topic has changed; consumers that waited for it to be resumed get a notice."""
        was_paused = self.paused
        self.rules = rules
        for group in self.groups.values():
            group.ring.weights = rules.weights
        if was_paused:
            self._notify_resumed(journal)

    def pause(self, paused: bool, journal: Journal) -> bool:
        """Pause the queue or resume it; returns whether that changes it."""
        if self.record.paused == paused:
            return False
        self.record.paused = paused
        journal.queue_changed(self.record)
        self._notify_resumed(journal)
        return True

    # --- groups --------------------------------------------------------------------------------

    def group(self, name: str) -> Group:
        try:
            return self.groups[name]
        except KeyError:
            raise GroupNotFound(f"there is no group {name}", group=name) from None

    def add_group(
        self, name: str, base: int, stored_from_base: int, now_ms: int, journal: Journal
    ) -> Group:
        """A group that starts at `base`, where `stored_from_base` messages are still stored."""
        group = Group(name, base, self.rules.weights)
        group.last_used_ms = now_ms
        self.record.note_group(now_ms)
        group.settled = max(0, self.record.next_offset - base - stored_from_base)
        self.groups[name] = group
        self._note_all_waiting(journal)
        journal.group_changed(self.record, group)
        return group

    def note_use(self, group: Group, now_ms: int, journal: Journal) -> None:
        """A consumer uses a group; stored now and then only (R14)."""
        if now_ms - group.last_used_ms >= self.rules.use_noted_ms:
            group.last_used_ms = now_ms
            journal.group_changed(self.record, group)

    def remove_group(self, name: str, journal: Journal) -> Group:
        """Remove a group; returns it. Its live reservations are revoked."""
        group = self.group(name)
        self.revoke(group, journal)
        gone = [each for each in self.reservations.values() if each.group == name]
        for reservation in gone:
            self._forget(reservation.reservation_id)
        journal.replace_settled(self.record, gone, self._settled_reservations())
        del self.groups[name]
        self._note_all_waiting(journal)
        journal.group_removed(self.record, group)
        return group

    def erase_settled(self, runs: Iterable[Run], journal: Journal) -> None:
        """Delete runs that every group has settled, after a group was removed or moved on."""
        for run in runs:
            if self.groups:
                self._erase_if_done(run, journal)

    # --- reservations --------------------------------------------------------------------------

    def reserve(
        self,
        group: Group,
        slices: Sequence[Slice],
        first_reservation_id: int,
        deadline_ms: int,
        now_ms: int,
        journal: Journal,
        *,
        broker_incarnation: int = 0,
        given_messages: int | None = None,
    ) -> list[Reservation]:
        """Reserve the slices that `Group.take` returned; the reservation ids are consecutive.

        `given_messages` is 0 where hand-outs to the application are reported.
        """
        record = self.record
        reservations = []
        lanes: dict[str, Lane] = {}
        for reservation_id, slice_ in enumerate(slices, first_reservation_id):
            self._leave_lane(group, slice_, lanes, journal)
            reservation = Reservation(
                reservation_id,
                group.name,
                slice_.handed_out(now_ms),
                deadline_ms,
                owner_epoch=group.owner_epoch,
                broker_incarnation=broker_incarnation,
                given_messages=given_messages,
            )
            self.reservations[reservation_id] = reservation
            group.hold(reservation)
            journal.put_reservation(record, reservation)
            journal.put_deadline(record, reservation)
            reservations.append(reservation)
        for lane in lanes.values():
            journal.lane_moved(record, group, lane)
        if reservations:
            record.last_activity_ms = now_ms
            journal.queue_changed(record)
        return reservations

    def reserve_only(
        self,
        group: Group,
        run: Run,
        reservation_id: int,
        deadline_ms: int,
        now_ms: int,
        journal: Journal,
        *,
        broker_incarnation: int,
        given_messages: int | None,
    ) -> None:
        """Reserve the run that `Group.only_run` returned, which has no fairness key: the same as
        `reserve`, in fewer steps."""
        record = self.record
        group.take_only(run)
        reservation = Reservation(
            reservation_id,
            group.name,
            Slice(run.first_offset, run.first_offset + run.messages, run, 0, 1, now_ms),
            deadline_ms,
            owner_epoch=group.owner_epoch,
            broker_incarnation=broker_incarnation,
            given_messages=given_messages,
        )
        self.reservations[reservation_id] = reservation
        group.hold(reservation)
        record.last_activity_ms = now_ms
        journal.put_reservation(record, reservation)
        journal.put_deadline(record, reservation)
        journal.group_changed(record, group)

    def bury(self, group: Group, slices: Sequence[Slice], journal: Journal) -> None:
        """Set aside messages that are past their time to live or their attempts, for a sweep."""
        lanes: dict[str, Lane] = {}
        self.record.returned = True
        journal.queue_changed(self.record)
        for slice_ in slices:
            self._leave_lane(group, slice_, lanes, journal)
            group.buried[slice_.start] = slice_
            journal.put_returned(self.record, group, Returned(slice_, place=ReturnPlace.BURIED))
        for lane in lanes.values():
            journal.lane_moved(self.record, group, lane)

    def postpone(
        self, group: Group, slices: Sequence[Slice], not_before_ms: int, journal: Journal
    ) -> None:
        """Delay messages that were taken but cannot be handed out now; no attempt is counted."""
        lanes: dict[str, Lane] = {}
        self.record.returned = True
        journal.queue_changed(self.record)
        for slice_ in slices:
            self._leave_lane(group, slice_, lanes, journal)
            # Counts as a hand-out: messages that were never handed out have no separate record.
            slice_ = slice_._replace(deliveries=max(1, slice_.deliveries))
            returned = Returned(slice_, not_before_ms)
            group.delay(returned)
            journal.put_returned(self.record, group, returned)
        for lane in lanes.values():
            journal.lane_moved(self.record, group, lane)

    def find(self, reservation_id: int) -> Reservation:
        reservation = self.reservations.get(reservation_id)
        if reservation is None:
            raise ReservationNotFound("there is no such reservation, or it was settled long ago")
        return reservation

    def settle(
        self,
        reservation: Reservation,
        spans: Sequence[Span],
        ending: Ending,
        now_ms: int,
        journal: Journal,
        *,
        delay_ms: int = 0,
        chance: float = 0.0,
        given_messages: int | None = None,
    ) -> list[Span]:
        """End messages of a reservation; returns those that were open until now.

        ACK and DEAD_LETTER settle them; the caller stores the dead letters. All others give them
        back: with one attempt more, except after RELEASE and REVOKED. DISCONNECT and EXPIRED count
        only for messages that the application was given (K1). An attempt that failed by EXPIRED, or
        by NACK without a delay, follows the retry policy of the topic (V9); `chance` is its
        randomness. `given_messages` replaces the number that was noted of them, unless nothing
        ends.
        """
        changed = reservation.finish(spans, ending)
        if not changed:
            return changed
        if given_messages is not None:
            reservation.note_given(given_messages)
        record = self.record
        group = self.groups[reservation.group]
        journal.put_reservation(record, reservation)
        if not reservation.open:
            group.let_go(reservation)
            journal.delete_deadline(record, reservation)
            self._remember(reservation, journal)
        for start, end in changed:
            if ending in _SETTLING:
                self._done(group, reservation.slice, (start, end), journal)
            else:
                for part, counted in reservation.charged((start, end), ending):
                    attempts = reservation.slice.attempts + counted
                    slice_ = reservation.slice._replace(
                        start=part[0], end=part[1], attempts=attempts
                    )
                    returned = Returned(slice_, now_ms + delay_ms if delay_ms else 0)
                    if counted and not delay_ms and ending in (Ending.NACK, Ending.EXPIRED):
                        turn = Turn(reservation_id=reservation.reservation_id)
                        returned = as_retry(slice_, turn, self.rules.retry, now_ms, chance)
                    self._return(group, returned, journal)
        record.last_activity_ms = now_ms
        is_use = ending not in _WITHOUT_USE
        if is_use and now_ms - group.last_used_ms >= self.rules.use_noted_ms:
            self.note_use(group, now_ms, journal)
        journal.queue_changed(record)
        journal.group_changed(record, group)
        return changed

    def renew(self, reservation: Reservation, deadline_ms: int, journal: Journal) -> None:
        """Store a live reservation with its notes; its deadline comes no earlier."""
        if deadline_ms > reservation.deadline_ms:
            self.extend(reservation, deadline_ms, journal)
        else:
            journal.put_reservation(self.record, reservation)

    def extend(self, reservation: Reservation, deadline_ms: int, journal: Journal) -> None:
        """Give a live reservation another deadline."""
        reservation.check_live()
        journal.delete_deadline(self.record, reservation)
        reservation.deadline_ms = deadline_ms
        journal.put_reservation(self.record, reservation)
        journal.put_deadline(self.record, reservation)

    def ready_delayed(self, group: Group, start: int, journal: Journal) -> int:
        """End the delay of nacked messages; returns how many became ready."""
        returned = group.end_delay(start)
        journal.delete_returned(self.record, group, start, returned.not_before_ms)
        self._return(group, returned._replace(not_before_ms=0), journal)
        if returned.place is ReturnPlace.HOLDING:
            self.notify_waiters(group, journal)  # others waited for it, also if it is buried now
        return returned.slice.messages

    def settle_buried(self, group: Group, start: int, journal: Journal) -> Slice:
        """Settle messages that were buried; the caller stores the dead letters."""
        slice_ = group.buried.pop(start)
        journal.delete_returned(self.record, group, start)
        if group.settle(slice_.run, slice_.messages):
            self._erase_if_done(slice_.run, journal)
        journal.group_changed(self.record, group)
        self.notify_waiters(group, journal)  # too many may have blocked the group
        return slice_

    def revoke(
        self, group: Group, journal: Journal, some: Sequence[Reservation] | None = None
    ) -> list[int]:
        """Revoke the reservations of a group, or some of them; no attempt is counted."""
        revoked = list(group.live.values()) if some is None else some
        for reservation in revoked:
            self.settle(reservation, (), Ending.REVOKED, self.record.last_activity_ms, journal)
        return [reservation.reservation_id for reservation in revoked]

    # --- recovery and unloading ----------------------------------------------------------------

    @property
    def inflight(self) -> int:
        return sum(
            reservation.open_messages
            for group in self.groups.values()
            for reservation in group.live.values()
        )

    @property
    def has_inflight(self) -> bool:
        return any(group.live for group in self.groups.values())

    @property
    def in_flight_records(self) -> int:
        """Live reservations, returned slices and lanes: loading the queue reads each of them."""
        return sum(group.in_flight_records for group in self.groups.values())

    @property
    def containers(self) -> list[Container]:
        """The containers that take memory, for freeing them in parts once the queue is dropped."""
        found: list[Container] = [self.reservations]
        for group in self.groups.values():
            found += [group.live, group.held, group.outstanding, group.delayed, group.buried]
            found += [lane.returned for lane in group.lanes.values()]
        return found

    def recover_reservation(self, reservation: Reservation) -> None:
        """Add a reservation that was read from the engine, live or settled."""
        self.reservations[reservation.reservation_id] = reservation
        if reservation.live:
            self.groups[reservation.group].hold(reservation)
        else:
            self._settled.add(reservation.reservation_id)

    def recover_returned(self, group: Group, returned: Returned) -> None:
        """Add messages that had been given back, as read from the engine."""
        slice_ = returned.slice
        if returned.place is ReturnPlace.BURIED:
            group.buried[slice_.start] = slice_
        elif returned.not_before_ms:
            group.delay(returned)
        else:
            self._join_lane(group, returned)

    def prepare_to_unload(self, journal: Journal) -> None:
        """Drop what was kept for repeated settlements, and note which tables hold nothing of it."""
        if self.record.returned and not any(group.has_returned for group in self.groups.values()):
            self.record.returned = False
            journal.queue_changed(self.record)
        journal.unload_settled(self.record, self._settled_reservations())
        self.forget_settled()

    def forget_settled(self) -> None:
        """The queue is dropped: its share of the budget goes to others."""
        if self.has_inflight:
            for reservation_id in list(self._settled):
                self._forget(reservation_id)
        else:
            self.reservations = {}
            self._settled.clear()

    # --- steps ---------------------------------------------------------------------------------

    def _leave_lane(
        self, group: Group, slice_: Slice, lanes: dict[str, Lane], journal: Journal
    ) -> None:
        """Messages were taken out of a lane: change the records that placed them there."""
        lane = group.lanes[slice_.run.fairness_key]
        if slice_.deliveries:
            journal.delete_returned(self.record, group, slice_.start)
            rest = lane.record_at(slice_.end)
            if rest is not None:
                journal.put_returned(self.record, group, ready(*rest))
        else:
            lanes[lane.key] = lane
        group.hand_out(slice_)

    def _done(self, group: Group, slice_: Slice, span: Span, journal: Journal) -> None:
        if self.rules.records_consumption:
            journal.consumed(self.record, group.name, span, slice_)
        if group.settle(slice_.run, span[1] - span[0]):
            if len(self.groups) == 1 and not self.rules.keeps_settled:
                self._erase((slice_.run,), journal)  # no other group to ask
            else:
                self._erase_if_done(slice_.run, journal)

    def _return(self, group: Group, returned: Returned, journal: Journal) -> None:
        """Messages are given back: ready, delayed, or buried if their attempts are exhausted."""
        slice_ = returned.slice
        self.record.returned = True
        if 0 < self.rules.max_attempts <= slice_.attempts:
            group.buried[slice_.start] = slice_
            journal.put_returned(self.record, group, Returned(slice_, place=ReturnPlace.BURIED))
        elif returned.not_before_ms:
            group.delay(returned)
            journal.put_returned(self.record, group, returned)
        else:
            if returned.place is ReturnPlace.BEHIND:
                turn = returned.turn._replace(after_offset=self.record.next_offset)
                returned = returned._replace(turn=turn)
            merged, swallowed = self._join_lane(group, returned)
            for start in swallowed:
                journal.delete_returned(self.record, group, start)
            journal.put_returned(self.record, group, merged)
            self.notify_waiters(group, journal)

    def _join_lane(self, group: Group, returned: Returned) -> tuple[Returned, list[int]]:
        """Messages are ready again; returns them merged, and the starts of the merged slices."""
        slice_ = returned.slice
        lane = group.lanes[slice_.run.fairness_key]
        turn = returned.turn if returned.place is ReturnPlace.BEHIND else None
        merged, swallowed = lane.give_back(slice_) if turn is None else lane.retry(slice_, turn)
        group.ring.activate(lane.key)
        return ready(merged, turn), swallowed

    def notify_waiters(self, group: Group, journal: Journal) -> None:
        """Consumers that wait for messages of a group ask again."""
        if group.has_waiters and not self.paused:
            group.has_waiters = False
            journal.ready(self.record, group)

    def _notify_resumed(self, journal: Journal) -> None:
        """Announce messages that became ready while the queue was paused."""
        for group in self.groups.values():
            if group.ring:
                self.notify_waiters(group, journal)

    def _erase_if_done(self, run: Run, journal: Journal) -> None:
        if self.rules.keeps_settled:
            self._keep(run, journal)
        elif all(group.has_settled(run) for group in self.groups.values()):
            self._erase((run,), journal)

    def _keep(self, run: Run, journal: Journal) -> None:
        record = self.record
        is_older = not 0 < record.settled_since_ms <= run.publish_time_ms
        if is_older and self.is_settled(run):
            record.note_settled(run.publish_time_ms)
        elif record.kept:
            return
        record.kept = True
        journal.queue_changed(record)

    def _note_all_waiting(self, journal: Journal) -> None:
        """Messages that every group had settled may wait again: groups have changed."""
        record = self.record
        before_ms = record.waiting_since_ms
        if record.settled_since_ms:
            record.note_waiting(record.settled_since_ms)
        if record.waiting_since_ms != before_ms:
            journal.queue_changed(record)

    def _erase(self, runs: Sequence[Run], journal: Journal) -> None:
        record = self.record
        for run in runs:
            record.messages -= run.messages
            record.body_bytes -= run.body_bytes
        journal.delete_runs(record, runs)
        journal.queue_changed(record)

    def _remember(self, reservation: Reservation, journal: Journal) -> None:
        if not self._settled.add(reservation.reservation_id):
            return
        for reservation_id in self._settled.surplus():
            oldest = self.reservations[reservation_id]
            self._forget(reservation_id)
            journal.forget_oldest_settled(self.record, oldest)

    def _settled_reservations(self) -> list[Reservation]:
        """Oldest first."""
        return [self.reservations[each] for each in self._settled]

    def _forget(self, reservation_id: int) -> None:
        del self.reservations[reservation_id]
        self._settled.discard(reservation_id)
