"""A queue state over a journal that keeps tables in dictionaries, as the partition uses the two.

The journal is a real one: a state that is built from these tables must behave like the one that
wrote them. Nothing here knows what a right answer is.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

from storage_svc.queue import lane as lanes
from storage_svc.queue.group import Group
from storage_svc.queue.lane import Lane
from storage_svc.queue.queue import QueueState
from storage_svc.queue.record import QueueRecord, Rules
from storage_svc.queue.reservation import Ending, Reservation, Span
from storage_svc.queue.returned import Returned
from storage_svc.queue.run import Run, Slice
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
    """A journal that applies changes to tables in memory. `commit` ends a commit."""

    def __init__(self) -> None:
        self.record: QueueRecord | None = None
        self.groups: dict[str, GroupRow] = {}
        self.marks: dict[tuple[str, str], tuple[int, int]] = {}
        self.runs: dict[int, Run] = {}
        self.bodies: dict[int, bytes] = {}
        self.reservations: dict[int, Reservation] = {}
        self.deadlines: set[tuple[int, int]] = set()
        self.returned: dict[tuple[str, int], Returned] = {}
        self.delays: set[tuple[int, str, int]] = set()
        self.consumption: list[tuple[str, Span]] = []
        self.first_deliveries: list[int] = []
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
        self.record = replace(record, groups={}, held={})

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

    def forget_oldest_settled(self, record: QueueRecord, reservation: Reservation) -> None:
        del self.reservations[reservation.reservation_id]

    def replace_settled(
        self, record: QueueRecord, gone: Sequence[Reservation], kept: Sequence[Reservation]
    ) -> None:
        self.unload_settled(record, gone)

    def unload_settled(self, record: QueueRecord, settled: Sequence[Reservation]) -> None:
        for reservation in settled:
            del self.reservations[reservation.reservation_id]

    def put_deadline(self, record: QueueRecord, reservation: Reservation) -> None:
        self.deadlines.add((reservation.deadline_ms, reservation.reservation_id))

    def delete_deadline(self, record: QueueRecord, reservation: Reservation) -> None:
        self.deadlines.remove((reservation.deadline_ms, reservation.reservation_id))

    def put_returned(self, record: QueueRecord, group: Group, returned: Returned) -> None:
        self.returned[group.name, returned.slice.start] = returned
        if returned.not_before_ms:
            self.delays.add((returned.not_before_ms, group.name, returned.slice.start))

    def delete_returned(
        self, record: QueueRecord, group: Group, start: int, not_before_ms: int = 0
    ) -> None:
        self.returned.pop((group.name, start), None)
        if not_before_ms:
            self.delays.remove((not_before_ms, group.name, start))

    def consumed(self, record: QueueRecord, group: str, span: Span, slice_: Slice) -> None:
        self.consumption.append((group, span))
        self.first_deliveries.append(slice_.first_delivery_ms)

    def ready(self, record: QueueRecord, group: Group) -> None:
        self.told.append(group.name)

    def forget(self, name: str) -> None:
        """Delete the rows of a group."""
        for mark in [mark for mark in self.marks if mark[0] == name]:
            del self.marks[mark]
        for row in [row for row in self.returned if row[0] == name]:
            del self.returned[row]

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
        state = QueueState(replace(self.record, groups={}), rules)
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
        for (name, _), returned in sorted(self.returned.items()):
            state.recover_returned(state.groups[name], returned)
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
        group = self.state.add_group(name, base, stored, self.now_ms, self.tables)
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
            if found.needs_page is None:
                break
            self.tables.feed(found.needs_page)
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
        delay_ms: int = 0,
        chance: float = 0.0,
    ) -> list[Span]:
        changed = self.state.settle(
            reservation,
            spans,
            ending,
            self.now_ms,
            self.tables,
            delay_ms=delay_ms,
            chance=chance,
        )
        self.tables.commit()
        return changed

    def remove_group(self, name: str) -> None:
        """As an operator does: with every record of the group, and what only it had kept."""
        group = self.state.group(name)
        self.state.revoke(group, self.tables)
        for start, delayed in group.delayed.items():
            not_before_ms = delayed.not_before_ms
            self.tables.delete_returned(self.state.record, group, start, not_before_ms)
        self.tables.forget(name)
        self.state.remove_group(name, self.tables)
        self.state.erase_settled(sorted(self.tables.runs.values()), self.tables)
        self.tables.commit()

    def obey(self, rules: Rules) -> None:
        """The settings of the topic have changed."""
        self.rules = rules
        self.state.obey(rules, self.tables)

    def restart(self) -> None:
        self.state = self.tables.rebuilt(self.rules)


def spans_of(reservations: Sequence[Reservation]) -> list[tuple[int, int, int, int]]:
    """Start, end, attempts and deliveries of each."""
    return [
        (each.slice.start, each.slice.end, each.slice.attempts, each.slice.deliveries)
        for each in reservations
    ]
