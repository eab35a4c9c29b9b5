"""A partition, as simple as it can be told: what every operation must answer and change.

`perform` carries an operation out on the model and compares the real answer with its own. Where an
answer was lost with a failed commit the model goes by itself. Where storage is free to
choose (which messages a hand-out takes, which of them are set aside as undeliverable) the model
checks what was chosen instead of choosing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from storage_svc import operations as op
from storage_svc.operations import Acted, ActionOutcome, DeadReason, Eviction, Result, Settled
from storage_svc.reservations import Ending, Span
from tests.conformance.queue_model import (
    ModelGroup,
    ModelReservation,
    Place,
    Published,
    QueueModel,
    spans_of,
)
from tidemark.api.broker.v1.message_pb2 import MessageBatch
from tidemark.errors import (
    AlreadySettled,
    Fenced,
    GroupNotFound,
    InvalidArgument,
    PartitionFaulty,
    QueueNotFound,
    ReservationExpired,
    ReservationNotFound,
    RunNotScheduled,
    SequenceConflict,
    SequenceTooOld,
    TidemarkError,
    Unavailable,
)
from tidemark.limits import PRODUCER_SEQUENCES_MAX, PRODUCER_WINDOW_MS
from tidemark.names import LmqName
from tidemark.receipts import Receipt
from tidemark.topics import TopicSettings

_DAY_MS = 24 * 60 * 60 * 1000
_STALE = Acted(ActionOutcome.STALE)
_REFUSALS: dict[Ending, type[TidemarkError]] = {
    Ending.EXPIRED: ReservationExpired,
    Ending.REVOKED: Fenced,
}


class Refused(Exception):
    """The operation must fail with one of these."""

    def __init__(self, *kinds: type[TidemarkError]) -> None:
        super().__init__(kinds)
        self.kinds = kinds


class Dead(NamedTuple):
    """A slice that left for the dead-letter topic."""

    payloads: tuple[bytes, ...]
    lmq_name: str
    first_offset: int
    reason: DeadReason
    fairness_key: str


@dataclass(slots=True)
class ModelProducer:
    """What one producer published."""

    answers: dict[int, tuple[op.Append, op.Appended]] = field(default_factory=dict)
    last_day: int = 0


class PartitionModel:
    """Everything that a partition must know."""

    def __init__(self, topics: Mapping[str, TopicSettings], remembered_max: int) -> None:
        self.topics = dict(topics)
        self.queues: dict[str, QueueModel] = {}
        self.outbox: dict[int, Dead] = {}
        self.producers: dict[str, ModelProducer] = {}
        self.consumed: dict[tuple[int, str, int], int] = {}
        """(queue_id, group, offset) -> how often it was recorded as consumed."""
        self.deleted: dict[str, int] = {}
        """Queue -> messages that left for good, by a sweep or a purge."""
        self.now_ms = 0
        self.time_is_suspicious = False
        self.reservation_id = 0
        self.told: set[tuple[str, str]] = set()
        """(queue, group) that the last commit has told of ready messages."""
        self.took_some: set[tuple[str, str]] = set()
        """(queue, group) that the commit handed out of: undeliverable messages may be buried."""
        self._remembered_max = remembered_max
        self._queue_id = self._schedule_id = self._owner_epoch = 0
        self._outbox_sequence = self._high_water = 0
        self._touched: set[int] = set()
        self._lost = False
        self._handlers: dict[type, Callable[[Any, Any], Result | None]] = {
            op.Materialize: self._materialize,
            op.Unmaterialize: self._unmaterialize,
            op.KeepHouse: self._keep_house,
            op.Append: self._append,
            op.Reserve: self._reserve,
            op.Settle: self._settle,
            op.Extend: self._extend,
            op.ExpireDue: self._expire_due,
            op.ExpireReservation: self._expire_reservation,
            op.ReadyDelayed: self._ready_delayed,
            op.PromoteScheduled: self._promote,
            op.Unschedule: self._unschedule,
            op.Bury: self._bury,
            op.AppendFromOutbox: self._append_from_outbox,
            op.ClearOutbox: self._clear_outbox,
            op.TakeOwnership: self._take_ownership,
            op.ConfirmOwnership: self._confirm_ownership,
            op.DropOwnership: self._drop_ownership,
            op.PlaceGroup: self._place_group,
            op.RemoveGroup: self._remove_group,
            op.RemoveQueue: self._remove_queue,
            op.Purge: self._purge,
            op.PutTopic: self._put_topic,
        }

    def begin(self, now_ms: int, told: set[tuple[str, str]]) -> None:
        """A commit begins."""
        self.now_ms = now_ms
        self.told = told
        self.took_some.clear()
        self._touched.clear()

    def perform(
        self, operation: op.Operation, answer: Result | None, *, lost: bool = False
    ) -> None:
        """Carry an operation out and check its answer.

        Where the answer was lost there is None, but for a hand-out: that is read back from storage,
        which does not tell a refused one from an empty one.
        """
        self._lost = lost
        try:
            expected = self._handlers[type(operation)](operation, answer)
        except Refused as refused:
            empty = lost and answer in (None, op.Reserved(()))
            if not empty and not isinstance(answer, refused.kinds):
                raise AssertionError(f"{operation}: {answer!r}, not {refused.kinds}") from None
        else:
            assert lost or answer == expected, f"{operation}: {answer!r} != {expected!r}"

    def reloaded(self) -> None:
        """The partition was opened again: nothing is materialized, nobody is known to wait."""
        for queue in self.queues.values():
            queue.unload()

    def settings(self, queue: QueueModel) -> TopicSettings:
        return self.topics[LmqName.parse(queue.name).topic]

    def by_id(self, queue_id: int) -> QueueModel | None:
        return next((each for each in self.queues.values() if each.queue_id == queue_id), None)

    # --- loading -------------------------------------------------------------------------------

    def _materialize(self, asked: op.Materialize, answer: Result | None) -> Result:
        existing = self.queues.get(asked.lmq_name)
        was_cold = existing is None or not existing.loaded
        queue = self._get_or_create(asked.lmq_name) if asked.create else self._get(asked.lmq_name)
        queue.tracked = True
        stamp = answer.activity_stamp if isinstance(answer, op.Materialized) else 0
        queue.stamps[stamp] = queue.uses
        return op.Materialized(queue.queue_id, stamp, was_cold, existing is None)

    def _unmaterialize(self, asked: op.Unmaterialize, _: Result | None) -> Result:
        queue = self.queues.get(asked.lmq_name)
        if queue is None:
            return Eviction.NOT_PRESENT
        if not queue.loaded:
            return Eviction.NOT_MATERIALIZED
        if queue.live:
            return Eviction.HAS_INFLIGHT
        stamp = asked.expected_activity_stamp
        if (stamp and queue.stamps.get(stamp) != queue.uses) or queue.queue_id in self._touched:
            return Eviction.RACE_LOST
        queue.evict()
        return Eviction.EVICTED

    def _keep_house(self, _: op.KeepHouse, __: Result | None) -> Result:
        idle = [
            queue
            for queue in self.queues.values()
            if queue.loaded
            and not queue.tracked
            and not queue.live
            and self.now_ms - queue.last_used_ms >= 2 * self.settings(queue).idle_after_ms
        ]
        for queue in idle:
            queue.evict()
        for name, producer in () if self.time_is_suspicious else list(self.producers.items()):
            if producer.last_day < (self.now_ms - PRODUCER_WINDOW_MS) // _DAY_MS:
                del self.producers[name]
        return op.Removed(len(idle))

    def _find(self, lmq_name: str) -> QueueModel | None:
        """A queue, which this is a use of."""
        queue = self.queues.get(lmq_name)
        if queue is not None:
            queue.loaded = True
            queue.uses += 1
            queue.last_used_ms = self.now_ms
        return queue

    def _get(self, lmq_name: str) -> QueueModel:
        queue = self._find(lmq_name)
        if queue is None:
            raise Refused(QueueNotFound)
        return queue

    def _get_or_create(self, lmq_name: str) -> QueueModel:
        queue = self._find(lmq_name)
        if queue is None:
            self._queue_id += 1
            queue = self.queues[lmq_name] = QueueModel(self._queue_id, lmq_name)
            queue.last_used_ms = self.now_ms
            self._touched.add(queue.queue_id)
        return queue

    def _use_id(self, queue_id: int) -> QueueModel | None:
        queue = self.by_id(queue_id)
        return None if queue is None else self._find(queue.name)

    # --- publishing ----------------------------------------------------------------------------

    def _append(self, asked: op.Append, answer: Result | None) -> Result:
        producer = self.producers.get(asked.producer_id, ModelProducer())
        highest = max(producer.answers, default=0)
        first = producer.answers.get(asked.sequence) if asked.sequence else None
        too_old = 0 < asked.sequence <= highest - PRODUCER_SEQUENCES_MAX
        if too_old and (first is None or isinstance(answer, SequenceTooOld)):
            raise Refused(SequenceTooOld)
        if first is not None:
            if (first[0].lmq_name, first[0].body) != (asked.lmq_name, asked.body):
                raise Refused(SequenceConflict)
            return first[1]._replace(duplicate=True)
        queue = self._get_or_create(asked.lmq_name)
        ttl_ms = asked.ttl_ms
        messages = MessageBatch.FromString(asked.body).messages
        run = Published(
            0,
            tuple(message.payload for message in messages),
            len(asked.body),
            asked.fairness_key,
            self.now_ms,
            self.now_ms + ttl_ms if ttl_ms else 0,
        )
        self._touched.add(queue.queue_id)
        if asked.delay_ms:
            self._schedule_id += 1
            queue.scheduled[self._schedule_id] = (self.now_ms + asked.delay_ms, run)
            appended = op.Appended(queue.queue_id, 0, self._schedule_id)
        else:
            appended = op.Appended(queue.queue_id, queue.append(run).first_offset)
        if asked.sequence:
            producer.answers[asked.sequence] = (asked, appended)
            producer.last_day = self.now_ms // _DAY_MS
            self.producers[asked.producer_id] = producer
        return appended

    def _promote(self, asked: op.PromoteScheduled, _: Result | None) -> Result:
        for queue in self.queues.values():
            if asked.schedule_id not in queue.scheduled:
                continue
            due_ms, run = queue.scheduled[asked.schedule_id]
            if due_ms == asked.expected_due_ms <= self.now_ms:
                self._find(queue.name)
                del queue.scheduled[asked.schedule_id]
                queue.append(run)
                self._touched.add(queue.queue_id)
                return Acted(ActionOutcome.DONE, run.messages)
        return _STALE

    def _unschedule(self, asked: op.Unschedule, _: Result | None) -> Result:
        queue = self._get(asked.lmq_name)
        if asked.schedule_id not in queue.scheduled:
            raise Refused(RunNotScheduled)
        if queue.scheduled[asked.schedule_id][0] <= self.now_ms:
            raise Refused(RunNotScheduled)  # due already, though nobody has promoted it yet
        run = queue.scheduled.pop(asked.schedule_id)[1]
        self._touched.add(queue.queue_id)
        return op.Removed(run.messages)

    # --- delivering ----------------------------------------------------------------------------

    def _reserve(self, asked: op.Reserve, answer: Any) -> Result:
        queue = self._get(asked.lmq_name)
        settings = self.settings(queue)
        group = queue.groups.get(asked.group)
        if settings.exclusive and (group is None or not group.owner_client_id):
            raise Refused(Fenced)
        if group is None:
            group = queue.add_group(asked.group)
            self._touched.add(queue.queue_id)
        _check_owner(group, asked.owner_epoch)
        assert isinstance(answer, op.Reserved), f"{asked}: {answer!r}"
        if answer.slices or len(group.in_place(Place.READY)) > len(self._deliverable(queue, group)):
            self._touched.add(queue.queue_id)
        messages = handed_bytes = 0
        for slice_ in answer.slices:
            run = self._hand_out(queue, group, slice_)
            messages += slice_.messages
            handed_bytes += slice_.messages * run.message_bytes
            deadline_ms = self.now_ms + slice_.visibility_ms
            visibility_ms = asked.visibility_ms or settings.visibility_timeout_ms
            assert slice_.visibility_ms == visibility_ms
            queue.reservations[slice_.reservation_id] = ModelReservation(
                slice_.reservation_id,
                group.name,
                run,
                slice_.first_offset,
                slice_.first_offset + slice_.messages,
                deadline_ms,
                group.owner_epoch,
                set(range(slice_.first_offset, slice_.first_offset + slice_.messages)),
            )
        self.took_some.add((queue.name, group.name))
        assert messages <= asked.messages_max
        assert handed_bytes <= asked.bytes_max or messages == 1, "the bytes are kept, but for one"
        left = self._deliverable(queue, group)
        told = (queue.name, group.name) in self.told
        largest = max((group.standings[o].run.message_bytes for o in left), default=0)
        if messages < asked.messages_max and handed_bytes + largest <= asked.bytes_max:
            assert told or not left or self._lost, f"{asked} left {left} behind"
            group.waits = not told
        return answer

    def _hand_out(
        self, queue: QueueModel, group: ModelGroup, slice_: op.ReservedSlice
    ) -> Published:
        """Check a slice that was handed out: the right messages, in order, as published."""
        first, end = slice_.first_offset, slice_.first_offset + slice_.messages
        ready = [
            offset
            for offset in self._deliverable(queue, group)
            if group.standings[offset].run.fairness_key == slice_.fairness_key
        ]
        # What came back goes first, then what never left, each in the order of offsets (S2).
        ready.sort(key=lambda offset: (group.standings[offset].deliveries == 0, offset))
        assert ready[: end - first] == list(range(first, end)), f"{slice_} out of turn: {ready}"
        run = group.standings[first].run
        for offset in range(first, end):
            standing = group.standings[offset]
            assert standing.run == run
            assert standing.attempts == slice_.attempt_count, f"{slice_}: {standing}"
            standing.deliveries += 1
            assert standing.deliveries == slice_.delivery_count, f"{slice_}: {standing}"
            standing.place = Place.RESERVED
        if slice_.body:
            body = MessageBatch.FromString(slice_.body)
            assert tuple(each.payload for each in body.messages) == run.payloads_of(first, end)
            assert slice_.publish_time_ms == run.publish_time_ms
        self.reservation_id += 1
        receipt = Receipt(0, queue.queue_id, self.reservation_id, group.owner_epoch)
        assert slice_.receipt == receipt.encode()
        assert slice_.reservation_id == self.reservation_id
        return run

    def _deliverable(self, queue: QueueModel, group: ModelGroup) -> list[int]:
        return group.deliverable(self.now_ms, self.settings(queue).max_attempts)

    def _settle(self, asked: op.Settle, answer: Result | None) -> Result:
        queue, reservation = self._find_reservation(asked.receipt, asked.owner_epoch, answer)
        first = reservation.start
        spans = [(first + start, first + end) for start, end in asked.index_ranges]
        if any(start >= end or end > reservation.end for start, end in spans):
            raise Refused(InvalidArgument)
        if any(one[1] > other[0] for one, other in pairwise(spans)):
            raise Refused(InvalidArgument)
        if not spans and not reservation.live and reservation.last_ending is not asked.ending:
            raise Refused(_REFUSALS.get(reservation.last_ending, AlreadySettled))
        others = {
            how
            for offset, how in reservation.done.items()
            if how is not asked.ending and any(start <= offset < end for start, end in spans)
        }
        if others:
            raise Refused(*(_REFUSALS.get(how, AlreadySettled) for how in others))
        not_before_ms = self.now_ms + asked.delay_ms if asked.delay_ms else 0
        wanted = spans or [(reservation.start, reservation.end)]
        ended = [
            span
            for start, end in wanted
            for span in spans_of(sorted(reservation.open & set(range(start, end))))
        ]
        self._end(queue, reservation, ended, asked.ending, not_before_ms)
        if asked.ending is Ending.DEAD_LETTER:
            for start, end in ended:
                self._dispose(queue, reservation.run, start, end, DeadReason.REJECTED)
        return Settled(sum(end - start for start, end in ended))

    def _extend(self, asked: op.Extend, answer: Result | None) -> Result:
        queue, reservation = self._find_reservation(asked.receipt, asked.owner_epoch, answer)
        if not reservation.live:
            raise Refused(_REFUSALS.get(reservation.last_ending, AlreadySettled))
        visibility_ms = asked.visibility_ms or self.settings(queue).visibility_timeout_ms
        reservation.deadline_ms = self.now_ms + visibility_ms
        self._touched.add(queue.queue_id)
        return Settled(len(reservation.open), visibility_ms)

    def _expire_due(self, asked: op.ExpireDue, _: Result | None) -> Result:
        due = sorted(
            (each.deadline_ms, queue.queue_id, each.reservation_id)
            for queue in self.queues.values()
            for each in queue.live
            if each.deadline_ms <= self.now_ms
        )
        delays = sorted(
            (at_ms, queue.queue_id, group.name, start)
            for queue in self.queues.values()
            for group in queue.groups.values()
            for start, (_, at_ms) in group.delayed.items()
            if at_ms <= self.now_ms
        )
        messages = 0
        for deadline_ms, queue_id, reservation_id in due[: asked.limit]:
            expire = op.ExpireReservation(queue_id, reservation_id, deadline_ms)
            messages += self._expire_reservation(expire, None).messages
        for at_ms, queue_id, group_name, start in delays[: asked.limit]:
            ready = op.ReadyDelayed(queue_id, group_name, start, at_ms)
            messages += self._ready_delayed(ready, None).messages
        return op.Expired(messages)

    def _expire_reservation(self, asked: op.ExpireReservation, _: Result | None) -> Acted:
        if asked.expected_deadline_ms > self.now_ms:
            return _STALE
        queue = self._use_id(asked.queue_id)
        reservation = None if queue is None else queue.reservations.get(asked.reservation_id)
        if queue is None or reservation is None or not reservation.live:
            return _STALE
        if reservation.deadline_ms != asked.expected_deadline_ms:
            return _STALE
        ended = spans_of(sorted(reservation.open))
        self._end(queue, reservation, ended, Ending.EXPIRED)
        return Acted(ActionOutcome.DONE, sum(end - start for start, end in ended))

    def _ready_delayed(self, asked: op.ReadyDelayed, _: Result | None) -> Acted:
        if asked.expected_not_before_ms > self.now_ms:
            return _STALE
        queue = self._use_id(asked.queue_id)
        group = None if queue is None else queue.groups.get(asked.group)
        if queue is None or group is None:
            return _STALE
        end, at_ms = group.delayed.get(asked.start, (0, 0))
        if at_ms != asked.expected_not_before_ms:
            return _STALE
        del group.delayed[asked.start]
        self._touched.add(queue.queue_id)
        self._return(queue, group, (asked.start, end))
        return Acted(ActionOutcome.DONE, end - asked.start)

    def _find_reservation(
        self, receipt: bytes, owner_epoch: int, answer: Result | None
    ) -> tuple[QueueModel, ModelReservation]:
        named = Receipt.decode(receipt)
        queue = self._use_id(named.queue_id)
        reservation = None if queue is None else queue.reservations.get(named.reservation_id)
        if queue is None or reservation is None:
            raise Refused(ReservationNotFound)
        may_be_gone = reservation.fading or reservation.forgotten
        if may_be_gone and isinstance(answer, ReservationNotFound):
            del queue.reservations[named.reservation_id]
            raise Refused(ReservationNotFound)
        _check_owner(queue.groups[reservation.group], owner_epoch or named.owner_epoch)
        return queue, reservation

    def _end(
        self,
        queue: QueueModel,
        reservation: ModelReservation,
        spans: list[Span],
        ending: Ending,
        not_before_ms: int = 0,
    ) -> None:
        group = queue.groups[reservation.group]
        for start, end in spans:
            self._touched.add(queue.queue_id)
            reservation.open -= set(range(start, end))
            reservation.done.update((offset, ending) for offset in range(start, end))
            if ending in (Ending.ACK, Ending.DEAD_LETTER):
                for offset in range(start, end):
                    group.standings[offset].place = Place.SETTLED
                    row = (queue.queue_id, group.name, offset)
                    self.consumed[row] = self.consumed.get(row, 0) + 1
                continue
            if ending not in (Ending.RELEASE, Ending.REVOKED):
                for offset in range(start, end):
                    group.standings[offset].attempts += 1
            self._return(queue, group, (start, end), not_before_ms)
        if spans:
            self._delete_settled(queue, [reservation.run])
        if sum(not each.live for each in queue.reservations.values()) > self._remembered_max:
            queue.fade_settled()

    def _return(
        self, queue: QueueModel, group: ModelGroup, span: Span, not_before_ms: int = 0
    ) -> None:
        start, end = span
        place = Place.DELAYED if not_before_ms else Place.READY
        if 0 < self.settings(queue).max_attempts <= group.standings[start].attempts:
            place = Place.BURIED
            group.buried[start] = end
        elif not_before_ms:
            group.delayed[start] = (end, not_before_ms)
        for offset in range(start, end):
            group.standings[offset].place = place

    # --- owners and groups ---------------------------------------------------------------------

    def _take_ownership(self, asked: op.TakeOwnership, answer: Any) -> Result:
        queue = self._get_or_create(asked.lmq_name)
        group = queue.groups.get(asked.group)
        if group is None:
            group = queue.add_group(asked.group)
            self._touched.add(queue.queue_id)
        if group.owner_client_id == asked.client_id:
            return op.Ownership(group.owner_client_id, group.owner_epoch, matched=False)
        revoked = self._revoke(queue, group)
        if asked.start is not None:
            group = self._move(queue, group, asked.start)
        return self._owned(queue, group, asked.client_id, revoked)

    def _confirm_ownership(self, asked: op.ConfirmOwnership, _: Result | None) -> Result:
        group = self._get(asked.lmq_name).groups.get(asked.group)
        if group is None:
            return op.Ownership("", 0, matched=False)
        owner = (group.owner_client_id, group.owner_epoch)
        matched = bool(owner[0]) and owner == (asked.client_id, asked.epoch)
        return op.Ownership(*owner, matched)

    def _drop_ownership(self, asked: op.DropOwnership, _: Result | None) -> Result:
        queue, group = self._get_group(asked.lmq_name, asked.group)
        owner = (group.owner_client_id, group.owner_epoch)
        if owner != (asked.client_id, asked.epoch):
            return op.Ownership(*owner, matched=False)
        return self._owned(queue, group, "", self._revoke(queue, group))

    def _owned(
        self, queue: QueueModel, group: ModelGroup, client_id: str, revoked: tuple[int, ...]
    ) -> Result:
        self._owner_epoch += 1
        group.owner_client_id, group.owner_epoch = client_id, self._owner_epoch
        self._touched.add(queue.queue_id)
        return op.Ownership(client_id, group.owner_epoch, True, revoked)

    def _place_group(self, asked: op.PlaceGroup, answer: Any) -> Result:
        queue = self._get_or_create(asked.lmq_name)
        group = queue.groups.get(asked.group)
        created = group is None
        if group is None:
            group = queue.add_group(asked.group)
            self._touched.add(queue.queue_id)
        if asked.owner_epoch:
            _check_owner(group, asked.owner_epoch)
        revoked: tuple[int, ...] = ()
        if asked.start is not None:
            revoked = self._revoke(queue, group)
            group = self._move(queue, group, asked.start)
        cursor = min([queue.next_offset, *group.unsettled])
        if isinstance(answer, op.GroupPlaced) and answer.cursor <= cursor:
            cursor = answer.cursor  # storage may know less, as long as it is on the safe side
        return op.GroupPlaced(cursor, created, revoked)

    def _remove_group(self, asked: op.RemoveGroup, _: Result | None) -> Result:
        queue, group = self._get_group(asked.lmq_name, asked.group)
        queue.remove_group(group.name)
        self._touched.add(queue.queue_id)
        self._delete_settled(queue, list(queue.runs.values()))
        return op.Removed(0)

    def _get_group(self, lmq_name: str, name: str) -> tuple[QueueModel, ModelGroup]:
        queue = self._get(lmq_name)
        if name not in queue.groups:
            raise Refused(GroupNotFound)
        return queue, queue.groups[name]

    def _revoke(self, queue: QueueModel, group: ModelGroup) -> tuple[int, ...]:
        revoked = queue.live_of(group.name)
        for reservation in revoked:
            spans = spans_of(sorted(reservation.open))
            self._end(queue, reservation, spans, Ending.REVOKED)
        return tuple(reservation.reservation_id for reservation in revoked)

    def _move(self, queue: QueueModel, group: ModelGroup, start: op.Start) -> ModelGroup:
        base = {
            op.StartAt.EARLIEST: 0,
            op.StartAt.LATEST: queue.next_offset,
            op.StartAt.LAST: max(0, queue.next_offset - start.number),
            op.StartAt.OFFSET: min(queue.next_offset, start.number),
        }[start.at]
        queue.remove_group(group.name)
        moved = queue.add_group(group.name, base)
        moved.owner_client_id, moved.owner_epoch = group.owner_client_id, group.owner_epoch
        moved.waits = group.waits
        self._touched.add(queue.queue_id)
        self._delete_settled(queue, list(queue.runs.values()))
        return moved

    # --- deleting ------------------------------------------------------------------------------

    def _remove_queue(self, asked: op.RemoveQueue, _: Result | None) -> Result:
        queue = self._get(asked.lmq_name)
        if asked.expected_queue_id not in (0, queue.queue_id):
            raise Refused(QueueNotFound)
        del self.queues[asked.lmq_name]
        messages = sum(run.messages for run in queue.runs.values())
        messages += sum(run.messages for _, run in queue.scheduled.values())
        return op.Removed(messages, sum(run.body_bytes for run in queue.runs.values()))

    def _put_topic(self, asked: op.PutTopic, answer: Result | None) -> Result | None:
        self.topics[asked.topic.name] = asked.topic.settings
        return answer

    def _purge(self, asked: op.Purge, _: Result | None) -> Result:
        queue = self._get(asked.lmq_name)
        held = [run for run in queue.runs.values() if queue.is_held(run)]
        free = [run for run in queue.runs.values() if not queue.is_held(run)]
        for run in free:
            queue.delete_run(run)
            self._touched.add(queue.queue_id)
        messages = sum(run.messages for run in free)
        self._count_deleted(queue, messages)
        skipped = sum(run.messages for run in held)
        return op.Removed(messages, sum(run.body_bytes for run in free), skipped)

    def _bury(self, asked: op.Bury, _: Result | None) -> Result:
        if self.time_is_suspicious:
            raise Refused(PartitionFaulty)
        queue = self._use_id(asked.queue_id)
        if queue is None:
            return _STALE
        if asked.reason is DeadReason.TIME_TO_LIVE:
            return self._bury_run(queue, asked)
        group = queue.groups.get(asked.group)
        end = None if group is None else group.buried.get(asked.first_offset)
        if group is None or end is None:
            return _STALE
        standing = group.standings[asked.first_offset]
        if standing.attempts != asked.expected_attempts:
            return _STALE
        del group.buried[asked.first_offset]
        for offset in range(asked.first_offset, end):
            group.standings[offset].place = Place.SETTLED
        late = 0 < standing.run.dead_deadline_ms <= self.now_ms
        exhausted = 0 < self.settings(queue).max_attempts <= standing.attempts
        reason = asked.reason if exhausted or not late else DeadReason.TIME_TO_LIVE
        self._dispose(queue, standing.run, asked.first_offset, end, reason)
        self._touched.add(queue.queue_id)
        self._delete_settled(queue, [standing.run])
        return Acted(ActionOutcome.DONE, end - asked.first_offset)

    def _bury_run(self, queue: QueueModel, asked: op.Bury) -> Result:
        run = queue.runs.get(asked.first_offset)
        if run is None or queue.is_held(run):
            return _STALE
        if not run.dead_deadline_ms == asked.expected_dead_deadline_ms <= self.now_ms:
            return _STALE
        waiting = queue.waiting_spans(run)
        queue.delete_run(run)
        self._touched.add(queue.queue_id)
        for start, end in waiting:
            self._dispose(queue, run, start, end, DeadReason.TIME_TO_LIVE)
        return Acted(ActionOutcome.DONE, sum(end - start for start, end in waiting))

    def _dispose(
        self, queue: QueueModel, run: Published, start: int, end: int, reason: DeadReason
    ) -> None:
        if not self.settings(queue).dead_letter_topic:
            self._count_deleted(queue, end - start)
            return
        self._outbox_sequence += 1
        payloads = run.payloads_of(start, end)
        dead = Dead(payloads, queue.name, start, reason, run.fairness_key)
        self.outbox[self._outbox_sequence] = dead

    def _append_from_outbox(self, asked: op.AppendFromOutbox, _: Result | None) -> Result:
        entry = asked.entry
        if entry.sequence <= self._high_water:
            return Acted(ActionOutcome.STALE, entry.messages)
        if entry.previous > self._high_water:
            raise Refused(Unavailable)
        self._high_water = entry.sequence
        queue = self._get_or_create(entry.destination_lmq_name)
        payloads = tuple(each.payload for each in MessageBatch.FromString(entry.body).messages)
        key = entry.fairness_key
        queue.append(Published(0, payloads, len(entry.body), key, self.now_ms, 0))
        self._touched.add(queue.queue_id)
        return Acted(ActionOutcome.DONE, entry.messages)

    def _clear_outbox(self, asked: op.ClearOutbox, _: Result | None) -> Result:
        dead = self.outbox.pop(asked.sequence, None)
        return _STALE if dead is None else Acted(ActionOutcome.DONE, len(dead.payloads))

    def _delete_settled(self, queue: QueueModel, runs: list[Published]) -> None:
        if not self.settings(queue).retention_enabled:
            queue.delete_settled(runs)

    def _count_deleted(self, queue: QueueModel, messages: int) -> None:
        if messages:
            self.deleted[queue.name] = self.deleted.get(queue.name, 0) + messages


def _check_owner(group: ModelGroup, owner_epoch: int) -> None:
    if group.owner_epoch and owner_epoch != group.owner_epoch:
        raise Refused(Fenced)
