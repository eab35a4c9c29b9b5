"""A queue against its model: nothing is lost, nothing settled returns, memory and tables agree."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from storage_svc.queue import lane as lanes
from storage_svc.queue.group import Group
from storage_svc.queue.queue import QueueState
from storage_svc.queue.record import Returned, Rules
from storage_svc.queue.reservation import Ending, Reservation, Span
from storage_svc.queue.run import Run
from tests.support.queue_in_tables import PLENTY, Queue
from tidemark.errors import AlreadySettled, Fenced, ReservationExpired

WAITING, RESERVED, READY, DELAYED, BURIED, SETTLED = (
    "waiting",
    "reserved",
    "ready",
    "delayed",
    "buried",
    "settled",
)
GIVES_BACK = (
    Ending.NACK,
    Ending.RELEASE,
    Ending.DISCONNECT,
    Ending.EXPIRED,
    Ending.REVOKED,
)


@dataclass
class Message:
    """One message as one group sees it."""

    run: Run
    place: str = WAITING
    attempts: int = 0
    deliveries: int = 0


class AQueueMachine(RuleBasedStateMachine):
    """Random operations on a queue, and the same on one record per message and group."""

    def __init__(self) -> None:
        super().__init__()
        self.window = lanes.LANE_RUNS_MAX
        lanes.LANE_RUNS_MAX = 2
        self.model: dict[str, dict[int, Message]] = {}
        self.held: dict[int, tuple[str, set[int]]] = {}
        self.erased: set[int] = set()

    def teardown(self) -> None:
        lanes.LANE_RUNS_MAX = self.window

    @initialize(max_attempts=st.sampled_from([0, 1, 3]), keeps=st.booleans(), heavy=st.booleans())
    def begin(self, max_attempts: int, keeps: bool, heavy: bool) -> None:
        weights = {"b": 3} if heavy else {}
        self.queue = Queue(Rules(max_attempts, keeps, weights))
        self.place_group("one", 0.0)

    # --- operations ---

    @rule(
        messages=st.integers(1, 6),
        key=st.sampled_from(["", "", "a", "b"]),
        each_bytes=st.sampled_from([1, 10, 40_000]),
        ttl_ms=st.sampled_from([0, 0, 0, 300]),
    )
    def append(self, messages: int, key: str, each_bytes: int, ttl_ms: int) -> None:
        dead_ms = self.queue.now_ms + ttl_ms if ttl_ms else 0
        run = self.queue.append(messages, key, each_bytes=each_bytes, dead_ms=dead_ms)
        for messages_of in self.model.values():
            for offset in range(run.first_offset, run.end):
                messages_of[offset] = Message(run)

    @precondition(lambda self: len(self.model) < 3)
    @rule(name=st.sampled_from(["two", "three"]), share=st.sampled_from([0.0, 0.0, 0.5, 1.0]))
    def place_group(self, name: str, share: float) -> None:
        if name in self.model:
            return
        base = int(self.queue.state.record.next_offset * share)
        self.queue.add_group(name, base)
        self.model[name] = {
            offset: Message(run)
            for run in self.queue.tables.runs.values()
            for offset in range(max(base, run.first_offset), run.end)
        }

    @rule(
        data=st.data(),
        messages_max=st.sampled_from([1, 2, 5, PLENTY]),
        bytes_max=st.sampled_from([1, 100, 50_000, PLENTY]),
    )
    def reserve(self, data: st.DataObject, messages_max: int, bytes_max: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        mine = self.model[name]
        buried_before = set(self.queue.state.groups[name].buried)

        reservations = self.queue.reserve(name, messages_max, bytes_max)

        for start, slice_ in self.queue.state.groups[name].buried.items():
            if start in buried_before:
                continue
            for offset in range(slice_.start, slice_.end):
                assert 0 < slice_.run.dead_deadline_ms <= self.queue.now_ms
                assert mine[offset].place in (WAITING, READY)
                mine[offset].place = BURIED
        for reservation in reservations:
            self._hand_out(mine, reservation)
        taken = sum(each.slice.messages for each in reservations)
        assert taken <= messages_max
        if not taken or (taken < messages_max and bytes_max == PLENTY):
            assert not [each for each in mine.values() if each.place in (WAITING, READY)]

    def _hand_out(self, mine: dict[int, Message], reservation: Reservation) -> None:
        slice_ = reservation.slice
        key = slice_.run.fairness_key
        again = slice_.deliveries > 1
        assert slice_.run.first_offset <= slice_.start < slice_.end <= slice_.run.end
        candidates = [
            offset
            for offset, each in mine.items()
            if each.run.fairness_key == key and each.place == (READY if again else WAITING)
        ]
        assert slice_.start == min(candidates), "order holds within a fairness key"
        if not again:
            assert not any(
                each.place == READY and each.run.fairness_key == key for each in mine.values()
            ), "what came back goes first"
        for offset in range(slice_.start, slice_.end):
            message = mine[offset]
            assert message.run == slice_.run
            assert message.place == (READY if again else WAITING)
            message.place = RESERVED
            message.deliveries += 1
            assert (slice_.attempts, slice_.deliveries) == (message.attempts, message.deliveries)
        offsets = set(range(slice_.start, slice_.end))
        self.held[reservation.reservation_id] = (reservation.group, offsets)

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(),
        ending=st.sampled_from([Ending.ACK, Ending.ACK, Ending.DEAD_LETTER, *GIVES_BACK]),
        delay_ms=st.sampled_from([0, 0, 200]),
    )
    def settle(self, data: st.DataObject, ending: Ending, delay_ms: int) -> None:
        reservation_id = data.draw(st.sampled_from(sorted(self.held)))
        name, offsets = self.held[reservation_id]
        reservation = self.queue.state.find(reservation_id)
        spans: list[Span] = []
        if data.draw(st.booleans()) and ending not in (Ending.EXPIRED, Ending.REVOKED):
            indexes = st.integers(0, reservation.slice.messages)
            cuts = sorted(data.draw(st.sets(indexes, min_size=2, max_size=4)))
            spans = reservation.spans(zip(cuts[::2], cuts[1::2], strict=False))
        wanted = {offset for start, end in spans for offset in range(start, end)} or set(offsets)
        if wanted - offsets:
            before = copy.deepcopy(reservation.open)
            endings = {how for start, end, how in reservation.done if _meets(start, end, wanted)}
            if endings != {ending}:
                with pytest.raises((AlreadySettled, Fenced, ReservationExpired)):
                    self.queue.settle(reservation, ending, *spans)
                assert reservation.open == before
                return
        not_before_ms = self.queue.now_ms + delay_ms if delay_ms and ending is Ending.NACK else 0

        changed = self.queue.settle(reservation, ending, *spans, not_before_ms=not_before_ms)

        ended = {offset for start, end in changed for offset in range(start, end)}
        assert ended == wanted & offsets
        self._end(name, reservation_id, ended, ending, delayed=bool(not_before_ms))

    def _end(
        self, name: str, reservation_id: int, ended: set[int], ending: Ending, *, delayed: bool
    ) -> None:
        mine = self.model[name]
        for offset in ended:
            message = mine[offset]
            assert message.place == RESERVED
            if ending not in GIVES_BACK:
                message.place = SETTLED
                continue
            message.attempts += ending not in (Ending.RELEASE, Ending.REVOKED)
            if 0 < self.queue.rules.max_attempts <= message.attempts:
                message.place = BURIED
            else:
                message.place = DELAYED if delayed else READY
        offsets = self.held[reservation_id][1]
        offsets -= ended
        if not offsets:
            del self.held[reservation_id]
        if ending not in GIVES_BACK:
            self._erase(mine[offset].run for offset in sorted(ended))

    def _erase(self, runs: Iterator[Run]) -> None:
        for run in set(runs):
            if not self.queue.rules.keeps_settled and all(
                messages[offset].place == SETTLED
                for messages in self.model.values()
                for offset in range(run.first_offset, run.end)
                if offset in messages
            ):
                self.erased.add(run.first_offset)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), more_ms=st.integers(1, 1_000))
    def extend(self, data: st.DataObject, more_ms: int) -> None:
        reservation = self.queue.state.find(data.draw(st.sampled_from(sorted(self.held))))
        self.queue.state.extend(reservation, self.queue.now_ms + more_ms, self.queue.tables)

    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        group = self.queue.state.groups[name]

        revoked = self.queue.state.revoke(group, self.queue.tables)
        self.queue.tables.commit()

        assert sorted(revoked) == sorted(key for key, held in self.held.items() if held[0] == name)
        for reservation_id in revoked:
            offsets = set(self.held[reservation_id][1])
            self._end(name, reservation_id, offsets, Ending.REVOKED, delayed=False)

    @rule(step_ms=st.sampled_from([1, 50, 300]))
    def pass_time(self, step_ms: int) -> None:
        """Expire what is due, in the order of the index, and end the delays that are over."""
        self.queue.now_ms += step_ms
        for deadline_ms, reservation_id in sorted(self.queue.tables.deadlines):
            if deadline_ms <= self.queue.now_ms:
                name, offsets = self.held[reservation_id]
                reservation = self.queue.state.find(reservation_id)
                self.queue.settle(reservation, Ending.EXPIRED)
                self._end(name, reservation_id, set(offsets), Ending.EXPIRED, delayed=False)
        for not_before_ms, name, start in sorted(self.queue.tables.delays):
            if not_before_ms <= self.queue.now_ms:
                group = self.queue.state.groups[name]
                end = group.delayed[start][0].end
                self.queue.state.ready_delayed(group, start, self.queue.tables)
                self.queue.tables.commit()
                for offset in range(start, end):
                    assert self.model[name][offset].place == DELAYED
                    self.model[name][offset].place = READY

    @rule(data=st.data())
    def take_buried_away(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        group = self.queue.state.groups[name]
        if not group.buried:
            return
        start = data.draw(st.sampled_from(sorted(group.buried)))

        slice_ = self.queue.state.settle_buried(group, start, self.queue.tables)
        self.queue.tables.commit()

        for offset in range(slice_.start, slice_.end):
            assert self.model[name][offset].place == BURIED
            self.model[name][offset].place = SETTLED
        self._erase(iter([slice_.run]))

    @precondition(lambda self: self.queue.tables.runs)
    @rule(data=st.data())
    def delete_run(self, data: st.DataObject) -> None:
        first = data.draw(st.sampled_from(sorted(self.queue.tables.runs)))
        run = self.queue.tables.runs[first]
        held = {offset for _, offsets in self.held.values() for offset in offsets}
        assert self.queue.state.is_held(run) == any(
            offset in held for offset in range(run.first_offset, run.end)
        )
        if self.queue.state.is_held(run):
            return

        self.queue.state.delete_runs([run], self.queue.tables)
        self.queue.tables.commit()

        for messages in self.model.values():
            for offset in range(run.first_offset, run.end):
                if offset in messages:
                    messages[offset].place = SETTLED
        self.erased.add(first)

    @precondition(lambda self: len(self.model) > 1)
    @rule(data=st.data())
    def remove_group(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))

        self.queue.remove_group(name)

        del self.model[name]
        self.held = {key: held for key, held in self.held.items() if held[0] != name}
        left = set(self.queue.tables.runs.values())
        self._erase(
            message.run for messages in self.model.values() for message in messages.values()
        )
        assert not {run for run in left if run.first_offset in self.erased}

    @rule()
    def restart(self) -> None:
        """A state from the tables goes on where the live one was, as if nothing had happened."""
        rebuilt = self.queue.tables.rebuilt(self.queue.rules)

        assert picture(self.queue, rebuilt) == picture(self.queue, self.queue.state)

        self.queue.state = rebuilt

    @rule()
    def unload(self) -> None:
        if not self.queue.state.has_inflight:
            self.queue.state.prepare_to_unload(self.queue.tables)
            assert self.queue.tables.reservations == {}
            self.restart()

    # --- what always holds ---

    @invariant()
    def every_message_is_in_exactly_one_place(self) -> None:
        state, tables = self.queue.state, self.queue.tables
        for name, mine in self.model.items():
            group = state.groups[name]
            places = {offset: each.place for offset, each in mine.items()}
            counts = {place: list(places.values()).count(place) for place in set(places.values())}
            reserved = sum(each.open_messages for each in group.live.values())
            delayed = sum(each.messages for each, _ in group.delayed.values())
            buried = sum(each.messages for each in group.buried.values())
            ready = sum(each.messages for lane in group.lanes.values() for each in lane.returned)

            never_there = state.record.next_offset - group.base - len(mine)
            assert group.settled == counts.get(SETTLED, 0) + never_there
            assert reserved == counts.get(RESERVED, 0)
            assert delayed == counts.get(DELAYED, 0)
            assert buried == counts.get(BURIED, 0)
            assert ready == counts.get(READY, 0)
            out = sum(group.outstanding.values())
            assert out == reserved + delayed + buried + ready
            for run in tables.runs.values():
                own = [places[at] for at in range(run.first_offset, run.end) if at in places]
                assert group.has_settled(run) == all(place == SETTLED for place in own)
                free = [at for start, end in group.unsettled_spans(run) for at in range(start, end)]
                assert free == [
                    at
                    for at in range(run.first_offset, run.end)
                    if places.get(at, SETTLED) not in (SETTLED, RESERVED)
                ]
                for at in range(run.first_offset, run.end):
                    settled = places.get(at, SETTLED) == SETTLED
                    assert group.has_settled_message(run, at) == settled
            unsettled = [at for at, place in places.items() if place != SETTLED]
            next_offset = state.record.next_offset
            assert group.cursor(next_offset) <= min(unsettled, default=next_offset)

    @invariant()
    def runs_are_there_until_every_group_has_settled_them(self) -> None:
        record, runs = self.queue.state.record, self.queue.tables.runs
        assert not self.erased & set(runs)
        for messages in self.model.values():
            for offset, message in messages.items():
                assert (
                    message.run.first_offset in runs or message.run.first_offset in self.erased
                ), offset
        assert record.messages == sum(run.messages for run in runs.values())
        assert record.body_bytes == sum(run.body_bytes for run in runs.values())
        assert self.queue.tables.record == record

    @invariant()
    def the_indexes_say_what_the_records_say(self) -> None:
        state, tables = self.queue.state, self.queue.tables
        live = [each for each in state.reservations.values() if each.live]
        assert sorted(self.held) == sorted(each.reservation_id for each in live)
        assert tables.deadlines == {(each.deadline_ms, each.reservation_id) for each in live}
        assert tables.delays == {
            (not_before_ms, group.name, start)
            for group in state.groups.values()
            for start, (_, not_before_ms) in group.delayed.items()
        }
        assert set(tables.reservations) == set(state.reservations)
        assert tables.returned == {
            (group.name, returned.slice.start): returned
            for group in state.groups.values()
            for returned in exceptions_of(group)
        }


def _meets(start: int, end: int, offsets: set[int]) -> bool:
    return any(start <= offset < end for offset in offsets)


def exceptions_of(group: Group) -> Iterator[Returned]:
    for lane in group.lanes.values():
        yield from (Returned(each) for each in lane.returned)
    yield from (Returned(each, at_ms) for each, at_ms in group.delayed.values())
    yield from (Returned(each, buried=True) for each in group.buried.values())


def picture(queue: Queue, state: QueueState) -> dict[str, Any]:
    """Everything that a state would do next, as values that can be compared."""
    shown: dict[str, Any] = {"record": replace(state.record)}
    for reservation_id, each in state.reservations.items():
        fate = (each.open, sorted(each.done), each.deadline_ms, each.owner_epoch, each.group)
        shown[f"reservation {reservation_id}"] = (*fate, each.slice)
    for name, group in copy.deepcopy(state.groups).items():
        slices, passed = queue.take(group)
        to_come: dict[str, list[tuple[int, int, int]]] = {}
        for slice_ in slices:
            to_come.setdefault(slice_.run.fairness_key, []).extend(
                (offset, slice_.attempts, slice_.deliveries)
                for offset in range(slice_.start, slice_.end)
            )
        shown[f"group {name}"] = (
            to_come,
            sorted(passed),
            sorted(group.live),
            group.delayed,
            group.buried,
            group.settled,
            group.outstanding,
        )
    return shown


TestAQueue = AQueueMachine.TestCase
TestAQueue.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    phases=[phase for phase in Phase if phase is not Phase.explain],  # slow, and tells little here
)
