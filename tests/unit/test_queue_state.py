"""The rules of a queue: nothing is lost, nothing settled comes back, memory and engine agree.

The journal here is a real one: it keeps tables in dictionaries, and a state that is built from
these tables must behave like the one that wrote them.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from storage_svc import lanes, queue_state
from storage_svc.group_state import Group
from storage_svc.lanes import Lane, Run, Slice
from storage_svc.queue_state import QueueRecord, QueueState, Returned, Rules
from storage_svc.reservations import Ending, Reservation, Span
from tidemark.errors import (
    AlreadySettled,
    Fenced,
    GroupNotFound,
    ReservationExpired,
    ReservationNotFound,
)
from tidemark.limits import RUN_MESSAGES_MAX

PLENTY = 10**9


@dataclass
class GroupRow:
    """What the engine knows of a group, with the mark of its lane without a key."""

    base: int
    settled: int
    owner_client_id: str
    owner_epoch: int
    mark: tuple[int, int]


class Tables:
    """A journal that applies what it is told to tables in memory. `commit` ends a commit."""

    def __init__(self) -> None:
        self.record: QueueRecord | None = None
        self.groups: dict[str, GroupRow] = {}
        self.marks: dict[tuple[str, str], tuple[int, int]] = {}
        self.runs: dict[int, Run] = {}
        self.bodies: dict[int, bytes] = {}
        self.reservations: dict[int, Reservation] = {}
        self.deadlines: set[tuple[int, int]] = set()
        self.exceptions: dict[tuple[str, int], Returned] = {}
        self.delays: set[tuple[int, str, int]] = set()
        self.consumption: list[tuple[str, Span]] = []
        self.told: list[str] = []
        self._changed: dict[str, Group] = {}

    def commit(self) -> None:
        for name, group in self._changed.items():
            lane = group.lanes.get("")
            self.groups[name] = GroupRow(
                group.base,
                group.settled,
                group.owner_client_id,
                group.owner_epoch,
                (group.base, group.base) if lane is None else lane.mark,
            )
        self._changed.clear()

    def queue_changed(self, record: QueueRecord) -> None:
        self.record = replace(record)

    def group_changed(self, record: QueueRecord, group: Group) -> None:
        self._changed[group.name] = group

    def group_removed(self, record: QueueRecord, group: Group) -> None:
        self._changed.pop(group.name, None)
        self.groups.pop(group.name, None)

    def lane_moved(self, record: QueueRecord, group: Group, lane: Lane) -> None:
        if lane.key:
            self.marks[group.name, lane.key] = lane.mark
        else:
            self.group_changed(record, group)

    def put_run(self, record: QueueRecord, run: Run, body: bytes) -> None:
        assert run.first_offset not in self.runs
        self.runs[run.first_offset] = run
        self.bodies[run.first_offset] = body

    def delete_runs(self, record: QueueRecord, runs: Sequence[Run]) -> None:
        for run in runs:
            del self.runs[run.first_offset]
            del self.bodies[run.first_offset]

    def put_reservation(self, record: QueueRecord, reservation: Reservation) -> None:
        self.reservations[reservation.reservation_id] = copy.deepcopy(reservation)

    def delete_reservation(self, record: QueueRecord, reservation_id: int) -> None:
        del self.reservations[reservation_id]

    def put_deadline(self, record: QueueRecord, reservation: Reservation) -> None:
        self.deadlines.add((reservation.deadline_ms, reservation.reservation_id))

    def delete_deadline(self, record: QueueRecord, reservation: Reservation) -> None:
        self.deadlines.remove((reservation.deadline_ms, reservation.reservation_id))

    def put_exception(self, record: QueueRecord, group: Group, returned: Returned) -> None:
        self.exceptions[group.name, returned.slice.start] = returned
        if returned.not_before_ms:
            self.delays.add((returned.not_before_ms, group.name, returned.slice.start))

    def delete_exception(
        self, record: QueueRecord, group: Group, start: int, not_before_ms: int = 0
    ) -> None:
        self.exceptions.pop((group.name, start), None)
        if not_before_ms:
            self.delays.remove((not_before_ms, group.name, start))

    def consumed(self, record: QueueRecord, group: str, span: Span) -> None:
        self.consumption.append((group, span))

    def ready(self, record: QueueRecord, group: Group) -> None:
        self.told.append(group.name)

    def forget(self, name: str) -> None:
        """Delete the rows of a group."""
        for mark in [mark for mark in self.marks if mark[0] == name]:
            del self.marks[mark]
        for row in [row for row in self.exceptions if row[0] == name]:
            del self.exceptions[row]

    def feed(self, lane: Lane) -> None:
        """Read the next page of a lane."""
        found = sorted(
            run
            for run in self.runs.values()
            if run.fairness_key == lane.key and run.first_offset >= lane.read_from
        )
        page = found[: lanes.LANE_RUNS_MAX]
        read_to = page[-1].end if page else lane.read_from
        lane.feed(page, read_to=read_to, last=len(page) < lanes.LANE_RUNS_MAX)

    def rebuilt(self, rules: Rules) -> QueueState:
        """A state from nothing but the tables, as after a restart."""
        assert self.record is not None
        state = QueueState(replace(self.record), rules)
        keys = sorted({run.fairness_key for run in self.runs.values()})
        for name, row in self.groups.items():
            group = state.groups[name] = Group(name, row.base, rules.weights)
            group.settled = row.settled
            group.owner_client_id, group.owner_epoch = row.owner_client_id, row.owner_epoch
            for key in keys:
                mark = self.marks.get((name, key)) if key else row.mark
                read_from, position = mark or (0, row.base)
                if read_from <= row.base:
                    read_from = max(0, row.base - RUN_MESSAGES_MAX)
                group.add_lane(key, position, read_from)
        for _, reservation in sorted(self.reservations.items()):
            state.recover_reservation(copy.deepcopy(reservation))
            if reservation.live:
                group = state.groups[reservation.group]
                _add(group, reservation.slice.run, reservation.open_messages)
        for (name, _), returned in sorted(self.exceptions.items()):
            state.recover_exception(state.groups[name], returned)
            _add(state.groups[name], returned.slice.run, returned.slice.messages)
        return state


def _add(group: Group, run: Run, messages: int) -> None:
    group.outstanding[run.first_offset] = group.outstanding.get(run.first_offset, 0) + messages


class Queue:
    """A queue state with its tables, as the partition uses the two."""

    def __init__(self, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self.tables = Tables()
        self.state = QueueState(QueueRecord(1, "topic/lite", 0, 0), self.rules)
        self.tables.queue_changed(self.state.record)
        self.now_ms = 1_000
        self.reservation_id = 0

    def append(
        self, messages: int, key: str = "", *, each_bytes: int = 10, dead_ms: int = 0
    ) -> Run:
        first = self.state.record.next_offset
        run = Run(first, messages, messages * each_bytes, self.now_ms, dead_ms, key, "")
        self.state.append(run, b"body", self.now_ms, self.tables)
        self.tables.commit()
        return run

    def add_group(self, name: str = "default", base: int = 0) -> Group:
        stored = sum(
            max(0, run.end - max(base, run.first_offset)) for run in self.tables.runs.values()
        )
        group = self.state.add_group(name, base, stored, self.tables)
        for key in sorted({run.fairness_key for run in self.tables.runs.values()}):
            group.add_lane(key, base, max(0, base - RUN_MESSAGES_MAX))
        self.tables.commit()
        return group

    def take(
        self, group: Group, messages_max: int = PLENTY, bytes_max: int = PLENTY
    ) -> tuple[list[Slice], list[Slice]]:
        """What is handed out, and what is too late for it, reading on where a lane is dry."""
        slices: list[Slice] = []
        passed: list[Slice] = []
        while messages_max > 0 and bytes_max > 0:
            found = group.take(
                messages_max, bytes_max, self.now_ms, max_attempts=self.rules.max_attempts
            )
            messages_max -= sum(each.messages for each in found.slices)
            bytes_max -= sum(each.messages * each.run.message_bytes for each in found.slices)
            slices += found.slices
            passed += found.passed
            if found.starved is None:
                break
            self.tables.feed(found.starved)
        return slices, passed

    def reserve(
        self, name: str = "default", messages_max: int = PLENTY, bytes_max: int = PLENTY
    ) -> list[Reservation]:
        group = self.state.group(name)
        slices, passed = self.take(group, messages_max, bytes_max)
        if passed:
            self.state.bury(group, passed, self.tables)
        reservations = self.state.reserve(
            group, slices, self.reservation_id + 1, self.now_ms + 500, self.now_ms, self.tables
        )
        self.reservation_id += len(reservations)
        self.tables.commit()
        return reservations

    def settle(
        self,
        reservation: Reservation,
        ending: Ending,
        *spans: Span,
        not_before_ms: int = 0,
    ) -> list[Span]:
        changed = self.state.settle(
            reservation, spans, ending, self.now_ms, self.tables, not_before_ms=not_before_ms
        )
        self.tables.commit()
        return changed

    def remove_group(self, name: str) -> None:
        """As an operator does: with every record of the group, and what only it had kept."""
        group = self.state.group(name)
        self.state.revoke(group, self.tables)
        for start, (_, not_before_ms) in group.delayed.items():
            self.tables.delete_exception(self.state.record, group, start, not_before_ms)
        self.tables.forget(name)
        self.state.remove_group(name, self.tables)
        self.state.erase_settled(sorted(self.tables.runs.values()), self.tables)
        self.tables.commit()

    def obey(self, rules: Rules) -> None:
        """The settings of the topic have changed."""
        self.rules = self.state.rules = rules

    def restart(self) -> None:
        self.state = self.tables.rebuilt(self.rules)


def spans_of(reservations: Sequence[Reservation]) -> list[tuple[int, int, int, int]]:
    """Start, end, attempts and deliveries of each."""
    return [
        (each.slice.start, each.slice.end, each.slice.attempts, each.slice.deliveries)
        for each in reservations
    ]


def test_a_run_is_reserved_and_acknowledged_as_one_record() -> None:
    """R2, R13: and its bytes go when the last group has settled it."""
    queue = Queue()
    queue.add_group()
    queue.append(1_000)

    (reservation,) = queue.reserve()
    assert spans_of([reservation]) == [(0, 1_000, 0, 1)]
    assert queue.settle(reservation, Ending.ACK) == [(0, 1_000)]

    assert queue.tables.runs == {}
    assert queue.tables.bodies == {}
    assert queue.tables.deadlines == set()
    assert queue.tables.exceptions == {}
    assert queue.tables.consumption == [("default", (0, 1_000))]
    assert (queue.state.record.messages, queue.state.record.body_bytes) == (0, 0)
    assert queue.state.group("default").settled == 1_000


def test_a_topic_that_keeps_settled_messages_erases_nothing() -> None:
    """R2: settled messages stay, for replay."""
    queue = Queue(Rules(keeps_settled=True, records_consumption=False))
    queue.add_group()
    run = queue.append(3)

    queue.settle(queue.reserve()[0], Ending.ACK)

    assert queue.tables.runs == {0: run}
    assert queue.tables.consumption == []
    assert queue.reserve() == []
    assert queue.state.group("default").has_settled(run)


def test_a_run_is_erased_only_when_every_group_has_settled_all_of_it() -> None:
    """R2."""
    queue = Queue()
    queue.add_group("one")
    queue.add_group("two")
    queue.append(4)
    one = queue.reserve("one")[0]
    first, second = queue.reserve("two", 2) + queue.reserve("two", 2)

    queue.settle(one, Ending.ACK)
    queue.settle(first, Ending.ACK)
    queue.settle(second, Ending.ACK, (2, 3))
    assert 0 in queue.tables.runs

    queue.settle(second, Ending.ACK)
    assert 0 not in queue.tables.runs


def test_a_group_does_not_wait_for_messages_before_its_base() -> None:
    """R2: they are none of its business."""
    queue = Queue()
    queue.append(4)
    group = queue.add_group(base=2)

    (reservation,) = queue.reserve()
    assert spans_of([reservation]) == [(2, 4, 0, 1)]

    queue.settle(reservation, Ending.ACK)
    assert queue.tables.runs == {}
    assert group.settled == 2


def test_a_group_that_comes_later_begins_with_what_is_still_there() -> None:
    """R2."""
    queue = Queue()
    queue.add_group("first")
    queue.append(2)
    queue.settle(queue.reserve("first")[0], Ending.ACK)
    queue.append(3)

    late = queue.add_group("late")

    assert spans_of(queue.reserve("late")) == [(2, 5, 0, 1)]
    assert late.settled == 2


@pytest.mark.parametrize(
    ("ending", "attempts"),
    [
        (Ending.EXPIRED, 1),
        (Ending.NACK, 1),
        (Ending.DISCONNECT, 1),
        (Ending.RELEASE, 0),
        (Ending.REVOKED, 0),
    ],
)
def test_messages_that_come_back_count_an_attempt_where_one_was_made(
    ending: Ending, attempts: int
) -> None:
    """V2, V8: attempts grow on expiry, nack and disconnect, deliveries with every hand-out."""
    queue = Queue()
    queue.add_group()
    queue.append(2)
    (reservation,) = queue.reserve()

    queue.settle(reservation, ending)

    assert spans_of(queue.reserve()) == [(0, 2, attempts, 2)]


def test_messages_that_came_back_are_handed_out_before_new_ones() -> None:
    """S2."""
    queue = Queue()
    queue.add_group()
    queue.append(4)
    queue.append(4)
    first, second = queue.reserve(messages_max=2), queue.reserve(messages_max=2)

    queue.settle(second[0], Ending.NACK)
    queue.settle(first[0], Ending.RELEASE)

    assert spans_of(queue.reserve(messages_max=5)) == [(0, 2, 0, 2), (2, 4, 1, 2), (4, 5, 0, 1)]


def test_a_delayed_nack_is_ready_when_its_delay_ends_and_not_before() -> None:
    """V8."""
    queue = Queue()
    group = queue.add_group()
    queue.append(2)
    (reservation,) = queue.reserve()

    queue.settle(reservation, Ending.NACK, not_before_ms=5_000)
    assert queue.reserve() == []
    assert queue.tables.delays == {(5_000, "default", 0)}

    assert queue.state.ready_delayed(group, 0, queue.tables) == 2
    assert queue.tables.delays == set()
    assert spans_of(queue.reserve()) == [(0, 2, 1, 2)]


def test_messages_are_handed_out_until_their_attempts_are_exhausted() -> None:
    """L5: and then never again; settling what was buried erases it."""
    queue = Queue(Rules(max_attempts=2))
    group = queue.add_group()
    run = queue.append(2)

    queue.settle(queue.reserve()[0], Ending.EXPIRED)
    queue.settle(queue.reserve()[0], Ending.NACK, not_before_ms=9_000)

    assert queue.reserve() == []
    assert group.buried == {0: Slice(0, 2, run, 2, 2)}
    assert queue.tables.delays == set()

    assert queue.state.settle_buried(group, 0, queue.tables) == Slice(0, 2, run, 2, 2)
    assert queue.tables.runs == {}
    assert queue.tables.exceptions == {}


def test_attempts_below_the_limit_are_never_buried() -> None:
    """L5: 0 is no limit."""
    queue = Queue()
    queue.add_group()
    queue.append(1)

    for attempts in range(20):
        (reservation,) = queue.reserve()
        assert reservation.slice.attempts == attempts
        queue.settle(reservation, Ending.NACK)


def test_a_message_whose_time_to_live_has_passed_is_not_handed_out() -> None:
    """L5: at its deadline it is too late, a millisecond before it is not."""
    queue = Queue()
    group = queue.add_group()
    queue.append(2, dead_ms=2_000)
    queue.append(1)

    queue.now_ms = 1_999
    (reservation,) = queue.reserve(messages_max=1)
    assert reservation.slice.start == 0

    queue.now_ms = 2_000
    assert spans_of(queue.reserve()) == [(2, 3, 0, 1)]
    assert list(group.buried) == [1]

    queue.settle(reservation, Ending.RELEASE)
    assert queue.reserve() == []
    assert sorted(group.buried) == [0, 1]


def test_an_extension_moves_the_deadline_of_a_live_reservation_only() -> None:
    """V6."""
    queue = Queue()
    queue.add_group()
    queue.append(2)
    (reservation,) = queue.reserve()

    queue.state.extend(reservation, 9_999, queue.tables)
    assert queue.tables.deadlines == {(9_999, 1)}

    queue.settle(reservation, Ending.EXPIRED)
    with pytest.raises(ReservationExpired):
        queue.state.extend(reservation, 20_000, queue.tables)
    assert queue.tables.deadlines == set()


def test_the_same_settlement_twice_is_one_and_another_is_refused() -> None:
    """V6."""
    queue = Queue()
    group = queue.add_group()
    queue.append(2)
    (reservation,) = queue.reserve()

    assert queue.settle(reservation, Ending.ACK) == [(0, 2)]
    assert queue.settle(reservation, Ending.ACK) == []

    with pytest.raises(AlreadySettled):
        queue.settle(reservation, Ending.NACK)
    assert group.settled == 2
    assert queue.reserve() == []


def test_a_settlement_after_expiry_fails_and_changes_nothing() -> None:
    """V6."""
    queue = Queue()
    queue.add_group()
    queue.append(2)
    (reservation,) = queue.reserve()
    queue.settle(reservation, Ending.EXPIRED)

    with pytest.raises(ReservationExpired):
        queue.settle(reservation, Ending.ACK)

    assert spans_of(queue.reserve()) == [(0, 2, 1, 2)]


def test_a_bounded_number_of_settled_reservations_is_remembered() -> None:
    """V6: long after, a repeat is told that there is no such reservation."""
    queue = Queue()
    queue.add_group()
    for _ in range(queue_state.REMEMBERED_MAX + 1):
        queue.append(1)
        queue.settle(queue.reserve()[0], Ending.ACK)

    with pytest.raises(ReservationNotFound):
        queue.state.find(1)

    assert queue.state.find(2).reservation_id == 2
    assert len(queue.tables.reservations) == queue_state.REMEMBERED_MAX

    queue.state.prepare_to_unload(queue.tables)
    assert queue.tables.reservations == {}
    with pytest.raises(ReservationNotFound):
        queue.state.find(2)


def test_a_takeover_revokes_what_the_old_owner_holds() -> None:
    """E8, E9: its settlement is fenced, and the messages go to the new owner uncounted."""
    queue = Queue()
    group = queue.add_group()
    queue.append(4)
    group.owner_epoch = 7
    (reservation,) = queue.reserve()
    assert reservation.owner_epoch == 7
    queue.settle(reservation, Ending.ACK, (0, 1))

    assert queue.state.revoke(group, queue.tables) == [reservation.reservation_id]
    group.owner_epoch = 8

    with pytest.raises(Fenced):
        queue.settle(reservation, Ending.ACK)
    with pytest.raises(Fenced):
        queue.state.check_owner(group, 7)
    queue.state.check_owner(group, 8)
    assert spans_of(queue.reserve()) == [(1, 4, 0, 2)]


def test_a_group_without_owner_serves_everybody() -> None:
    """E8."""
    queue = Queue()

    queue.state.check_owner(queue.add_group(), 0)
    queue.state.check_owner(queue.state.group("default"), 3)


def test_a_group_that_is_removed_is_gone_with_its_reservations() -> None:
    queue = Queue()
    queue.add_group()
    queue.add_group("other")
    queue.append(2)
    (other,) = queue.reserve("other")
    (settled,) = queue.reserve(messages_max=1)
    queue.settle(settled, Ending.ACK)
    (live,) = queue.reserve()

    queue.remove_group("default")

    assert not live.live
    assert list(queue.tables.groups) == ["other"]
    assert list(queue.tables.reservations) == [other.reservation_id]
    assert queue.tables.deadlines == {(other.deadline_ms, other.reservation_id)}
    assert queue.tables.exceptions == {}
    with pytest.raises(GroupNotFound):
        queue.state.group("default")
    with pytest.raises(ReservationNotFound):
        queue.state.find(settled.reservation_id)


def test_what_only_a_removed_group_had_kept_is_dropped_with_it() -> None:
    """R2: but nothing is dropped where no group is left, or one still waits for it."""
    queue = Queue()
    for name in ("quick", "slow", "slower"):
        queue.add_group(name)
    queue.append(2)
    queue.append(2)
    queue.settle(queue.reserve("quick", 2)[0], Ending.ACK)

    queue.remove_group("slow")
    assert sorted(queue.tables.runs) == [0, 2]

    queue.remove_group("slower")
    assert sorted(queue.tables.runs) == [2]

    queue.remove_group("quick")
    assert sorted(queue.tables.runs) == [2]


def test_a_lower_limit_of_attempts_holds_for_what_came_back_before_it() -> None:
    """L5, S7: ready again or delayed, it is not handed out once more."""
    queue = Queue()
    group = queue.add_group()
    queue.append(1)
    queue.append(1)
    first, second = queue.reserve()
    queue.settle(first, Ending.NACK)
    queue.settle(second, Ending.NACK, not_before_ms=5_000)

    queue.obey(Rules(max_attempts=1))
    queue.state.ready_delayed(group, 1, queue.tables)

    assert queue.reserve() == []
    assert sorted(group.buried) == [0, 1]
    assert all(each.buried for each in queue.tables.exceptions.values())


def test_a_short_hand_out_is_told_once_when_there_is_more() -> None:
    """V2: waiting consumers hear of it, once."""
    queue = Queue()
    group = queue.add_group()
    queue.append(1)
    (reservation,) = queue.reserve()
    queue.append(1)
    assert queue.tables.told == []

    group.short = True
    queue.settle(reservation, Ending.EXPIRED)
    queue.append(1)

    assert queue.tables.told == ["default"]


def test_a_run_that_is_deleted_is_gone_in_every_place_it_can_be() -> None:
    """R1, L6: never handed out, ready again, delayed or buried; what is held is protected."""
    queue = Queue(Rules(max_attempts=2))
    groups = [queue.add_group(name) for name in ("fresh", "ready", "delayed", "buried")]
    run = queue.append(2)
    queue.settle(queue.reserve("ready")[0], Ending.RELEASE)
    queue.settle(queue.reserve("delayed")[0], Ending.NACK, not_before_ms=9_000)
    queue.settle(queue.reserve("buried")[0], Ending.NACK)
    queue.settle(queue.reserve("buried")[0], Ending.NACK)
    (held,) = queue.reserve("fresh", 1)
    assert queue.state.is_held(run)
    queue.settle(held, Ending.RELEASE)
    assert not queue.state.is_held(run)

    queue.state.delete_runs([run], queue.tables)

    assert all(queue.reserve(group.name) == [] for group in groups)
    assert [group.settled for group in groups] == [2, 2, 2, 2]
    assert all(not group.outstanding for group in groups)
    assert queue.tables.runs == {}
    assert queue.tables.exceptions == {}
    assert queue.tables.delays == set()
    assert queue.state.record.messages == 0


def test_a_run_that_is_partly_settled_counts_its_messages_once_when_deleted() -> None:
    queue = Queue()
    group = queue.add_group()
    run = queue.append(6)
    queue.settle(queue.reserve(messages_max=2)[0], Ending.ACK)
    queue.settle(queue.reserve(messages_max=2)[0], Ending.RELEASE)

    queue.state.delete_runs([run], queue.tables)

    assert group.settled == 6


def test_what_a_restart_left_unread_survives_another_restart() -> None:
    """S2: a settlement between two restarts must not lose the rest of a run half handed out."""
    queue = Queue()
    queue.add_group()
    queue.append(10)
    (reservation,) = queue.reserve(messages_max=5)
    queue.restart()

    queue.settle(queue.state.find(reservation.reservation_id), Ending.ACK)
    queue.restart()

    assert spans_of(queue.reserve()) == [(5, 10, 0, 1)]


def test_a_running_reservation_survives_a_restart_with_its_receipt() -> None:
    """V4."""
    queue = Queue()
    queue.add_group()
    queue.append(4)
    (reservation,) = queue.reserve()
    queue.settle(reservation, Ending.ACK, (1, 2))

    queue.restart()

    found = queue.state.find(reservation.reservation_id)
    assert found.open == [(0, 1), (2, 4)]
    assert queue.state.inflight == 3
    assert queue.state.has_inflight
    assert queue.settle(found, Ending.ACK) == [(0, 1), (2, 4)]
    assert queue.tables.runs == {}
    assert not queue.state.has_inflight


# --- the same against a model ---------------------------------------------------------------------

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
        assert tables.exceptions == {
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
