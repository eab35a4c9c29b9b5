"""Delivering in the model: reserve, settle, extend, expire, revoke.

Which messages a hand-out takes is for storage to choose: the model checks what was chosen.
"""

from itertools import pairwise
from typing import Any

from storage_svc.operations.acks import Acked, AckReservations
from storage_svc.operations.expire import Expired, ExpireDue, ExpireReservation, ReadyDelayed
from storage_svc.operations.operation import Acted, ActionOutcome
from storage_svc.operations.outbox import DeadReason
from storage_svc.operations.renew import HeldReservation, Renew, Renewed
from storage_svc.operations.reserve import Reserve, Reserved, ReservedSlice
from storage_svc.operations.settle import Extend, Settle, Settled
from storage_svc.operations.standing import Recall, Recalled
from storage_svc.partition.deadlines import BUCKET_MS
from storage_svc.queue.reservation import Ending, Span
from tests.model.reference import outbox
from tests.model.reference.queue import (
    ModelGroup,
    ModelReservation,
    Place,
    Published,
    QueueModel,
    spans_of,
)
from tests.model.reference.state import (
    STALE,
    ModelStanding,
    ModelState,
    Refused,
    check_owner,
)
from tidemark.api.broker.v1.message_pb2 import MessageBatch
from tidemark.errors import (
    AlreadySettled,
    Fenced,
    InvalidArgument,
    ReservationExpired,
    ReservationNotFound,
    TidemarkError,
)
from tidemark.receipts import Receipt

_REFUSALS: dict[Ending, type[TidemarkError]] = {
    Ending.EXPIRED: ReservationExpired,
    Ending.REVOKED: Fenced,
}


def reserve(model: ModelState, asked: Reserve, answer: Any) -> object:
    queue = model.get(asked.lmq_name)
    group = queue.groups.get(asked.group)
    if model.settings(queue).exclusive and (group is None or not group.owner_client_id):
        raise Refused(Fenced)
    if group is None:
        group = model.add_group(queue, asked.group)
    check_owner(group, asked.owner_epoch)
    model.note_use(queue, group)
    messages_max = asked.messages_max + _replaced(model, asked)
    if queue.paused:
        group.waits = True
        model.left_behind.pop((queue.name, group.name), None)
        return Reserved((), False, _stand(model, asked, messages_max))
    assert isinstance(answer, Reserved), f"{asked}: {answer!r}"
    if answer.slices or len(group.reachable()) > len(_deliverable(model, queue, group)):
        model.touched.add(queue.queue_id)
    messages, handed_bytes = _take_slices(model, queue, group, asked, answer)
    assert messages <= messages_max
    assert handed_bytes <= asked.bytes_max or messages == 1, "the bytes are kept, but for one"
    left = _deliverable(model, queue, group)
    told = (queue.name, group.name) in model.told
    largest = max((group.standings[o].run.message_bytes for o in left), default=0)
    fits_more = messages < messages_max and handed_bytes + largest <= asked.bytes_max
    model.left_behind.pop((queue.name, group.name), None)  # a later reserve answers for it
    stands = 0 if answer.more else _stand(model, asked, messages_max - messages)
    # One that stands hands out the rest when the commit ends, or is checked then.
    if (fits_more or not answer.more) and left and not (told or stands or model.lost):
        model.left_behind[queue.name, group.name] = f"{asked} left {left} behind"
    # Only an answer without `more` leaves an interest behind; any other ends an earlier one.
    group.waits = not answer.more and not told
    return Reserved(answer.slices, answer.more, stands)


def _take_slices(
    model: ModelState, queue: QueueModel, group: ModelGroup, asked: Reserve, answer: Reserved
) -> tuple[int, int]:
    """Check and reserve what was handed out; returns its messages and bytes."""
    messages = handed_bytes = 0
    for slice_ in answer.slices:
        run = _hand_out(model, queue, group, slice_)
        messages += slice_.messages
        handed_bytes += slice_.messages * run.message_bytes
        visibility_ms = asked.visibility_ms or model.settings(queue).visibility_timeout_ms
        assert slice_.visibility_ms == visibility_ms
        queue.reservations[slice_.reservation_id] = ModelReservation(
            slice_.reservation_id,
            group.name,
            run,
            slice_.first_offset,
            slice_.first_offset + slice_.messages,
            model.now_ms + visibility_ms,
            group.owner_epoch,
            set(range(slice_.first_offset, slice_.first_offset + slice_.messages)),
            slice_.first_offset + (0 if asked.reports_hand_outs else slice_.messages),
        )
    model.took_some.add((queue.name, group.name))
    return messages, handed_bytes


def _replaced(model: ModelState, asked: Reserve) -> int:
    """What a standing reserve had left that this one takes over; any other of the group ends."""
    for standing_id, standing in list(model.standing.items()):
        of_group = standing.place == (asked.lmq_name, asked.group)
        if not of_group or standing_id in model.ends_standing:
            continue
        if standing_id == asked.replaces:
            del model.standing[standing_id]
            return standing.left
        model.ends_standing.add(standing_id)
    return 0


def _stand(model: ModelState, asked: Reserve, left: int) -> int:
    """How many messages the reserve may hand out later; 0 if it does not stand."""
    messages = min(asked.standing_messages, left)
    if not asked.standing_id or not messages:
        return 0
    model.standing[asked.standing_id] = ModelStanding(asked, messages)
    return messages


def recall(model: ModelState, asked: Recall, _: object) -> object:
    standing = model.standing.get(asked.standing_id)
    if standing is None or standing.place != (asked.lmq_name, asked.group):
        return Recalled(False)
    stood = asked.standing_id not in model.ends_standing
    model.ends_standing.add(asked.standing_id)
    return Recalled(stood)


def handed_out(model: ModelState, result: Reserved) -> None:
    """A standing reserve has handed out at the end of a commit, or has ended with it."""
    standing = model.standing.get(result.standing_id)
    assert standing is not None, f"{result}: no such reserve stands"
    messages = 0
    queue = model.queues.get(standing.asked.lmq_name)
    group = None if queue is None else queue.groups.get(standing.asked.group)
    if result.more and group is not None:  # its broker asks again, without another notice
        group.waits = False
    if result.slices:
        assert queue is not None, f"{result}: the queue is gone"
        assert group is not None, f"{result}: the group is gone"
        assert group.owner_epoch == standing.asked.owner_epoch, "it is the owner's"
        assert not queue.paused, f"{queue.name} is paused"
        messages, handed_bytes = _take_slices(model, queue, group, standing.asked, result)
        assert messages <= standing.left
        assert handed_bytes <= standing.asked.standing_bytes
        standing.told = False
        group.waits = not result.more and standing.place not in model.told
    standing.left -= messages
    assert result.standing_messages in (0, standing.left), f"{result}: {standing}"
    if not result.standing_messages:
        del model.standing[result.standing_id]


def check_standing(model: ModelState) -> None:
    """Every reserve that had to end has ended; the others have left nothing behind."""
    assert not model.ends_standing & model.standing.keys(), "each gets one last result"
    for standing in model.standing.values():
        queue = model.queues[standing.asked.lmq_name]
        group = queue.groups[standing.asked.group]
        left = [] if queue.paused else _deliverable(model, queue, group)
        standing.told = standing.told or standing.place in model.told
        assert not left or standing.told, f"{standing} left {left} behind"


def _hand_out(
    model: ModelState, queue: QueueModel, group: ModelGroup, slice_: ReservedSlice
) -> Published:
    """Check a slice that was handed out: the right messages, in order, as published."""
    first, end = slice_.first_offset, slice_.first_offset + slice_.messages
    ready = [
        offset
        for offset in _deliverable(model, queue, group)
        if group.standings[offset].run.fairness_key == slice_.fairness_key
    ]
    ready.sort(key=lambda offset: group.standings[offset].rank(offset))
    assert ready[: end - first] == list(range(first, end)), f"{slice_} out of turn: {ready}"
    run = group.standings[first].run
    for offset in range(first, end):
        standing = group.standings[offset]
        assert standing.run == run
        assert standing.attempts == slice_.attempt_count, f"{slice_}: {standing}"
        max_attempts = model.settings(queue).max_attempts
        assert slice_.last_attempt == (standing.attempts + 1 == max_attempts), f"{slice_}"
        standing.deliveries += 1
        assert standing.deliveries == slice_.delivery_count, f"{slice_}: {standing}"
        standing.place = Place.RESERVED
        standing.retry_of = standing.after = 0
        standing.holds = False
    if slice_.body:
        body = MessageBatch.FromString(slice_.body)
        assert tuple(each.payload for each in body.messages) == run.payloads_of(first, end)
        assert slice_.publish_time_ms == run.publish_time_ms
    model.reservation_id += 1
    receipt = Receipt(0, queue.queue_id, model.reservation_id, group.owner_epoch)
    assert slice_.receipt == receipt.encode()
    assert slice_.reservation_id == model.reservation_id
    return run


def _deliverable(model: ModelState, queue: QueueModel, group: ModelGroup) -> list[int]:
    return group.deliverable(model.now_ms, model.settings(queue).max_attempts)


def settle(model: ModelState, asked: Settle, answer: object) -> Settled:
    by_broker = asked.ending in (Ending.RELEASE, Ending.DISCONNECT) and not asked.client_id
    queue, reservation = _find_reservation(model, asked, answer, by_broker=by_broker)
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
    not_before_ms = model.now_ms + asked.delay_ms if asked.delay_ms else 0
    wanted = spans or [(reservation.start, reservation.end)]
    ended = [
        span
        for start, end in wanted
        for span in spans_of(sorted(reservation.open & set(range(start, end))))
    ]
    if asked.ending is Ending.DISCONNECT and ended:
        _note_given(reservation, asked.given_messages)
    _end(model, queue, reservation, ended, asked.ending, not_before_ms)
    if asked.ending is Ending.DEAD_LETTER:
        for start, end in ended:
            outbox.dispose(model, queue, reservation.run, start, end, DeadReason.REJECTED)
    return Settled(sum(end - start for start, end in ended), len(reservation.open))


def extend(model: ModelState, asked: Extend, answer: object) -> object:
    queue, reservation = _find_reservation(model, asked, answer)
    if not reservation.live:
        raise Refused(_REFUSALS.get(reservation.last_ending, AlreadySettled))
    visibility_ms = asked.visibility_ms or model.settings(queue).visibility_timeout_ms
    reservation.deadline_ms = model.now_ms + visibility_ms
    model.touched.add(queue.queue_id)
    if asked.given_messages is not None:
        _note_given(reservation, asked.given_messages)
    return Settled(len(reservation.open), len(reservation.open), visibility_ms)


def renew(model: ModelState, asked: Renew, answer: object) -> object:
    """Those that are refused do not keep the others from being renewed."""
    refusals = dict(answer.refused) if isinstance(answer, Renewed) else {}
    refused: dict[int, tuple[type[TidemarkError], ...]] = {}
    for index, held in enumerate(asked.held):
        refusal = refusals.get(index)
        try:
            queue, reservation = _find_reservation(
                model, held, refusal, by_broker=asked.keep_deadlines
            )
            if not reservation.live:
                raise Refused(_REFUSALS.get(reservation.last_ending, AlreadySettled))
        except Refused as expected:
            refused[index] = expected.kinds
            continue
        if not held.at_least or held.given_messages > reservation.given - reservation.start:
            _note_given(reservation, held.given_messages)
        visibility_ms = asked.visibility_ms or model.settings(queue).visibility_timeout_ms
        if not asked.keep_deadlines:
            reservation.deadline_ms = max(reservation.deadline_ms, model.now_ms + visibility_ms)
        model.touched.add(queue.queue_id)
    if isinstance(answer, Renewed):
        _check_refused(asked, refusals, refused)
    return answer


def acks(model: ModelState, asked: AckReservations, answer: object) -> object:
    """The same for those that are acknowledged."""
    refusals = dict(answer.refused) if isinstance(answer, Acked) else {}
    refused: dict[int, tuple[type[TidemarkError], ...]] = {}
    messages = [0] * len(asked.receipts)
    for index, receipt in enumerate(asked.receipts):
        one = Settle(receipt, Ending.ACK, client_id=asked.client_id)
        try:
            messages[index] = settle(model, one, refusals.get(index)).messages
        except Refused as expected:
            refused[index] = expected.kinds
    if isinstance(answer, Acked):
        _check_refused(asked, refusals, refused)
    return Acked(tuple(messages), tuple(refusals.items()))


def _check_refused(
    asked: object,
    refusals: dict[int, TidemarkError],
    expected: dict[int, tuple[type[TidemarkError], ...]],
) -> None:
    assert refusals.keys() == expected.keys(), f"{asked}: {refusals}, not {expected}"
    for index, kinds in expected.items():
        assert isinstance(refusals[index], kinds), f"{asked}: {refusals}, not {expected}"


def _note_given(reservation: ModelReservation, messages: int | None) -> None:
    end = reservation.end if messages is None else reservation.start + messages
    reservation.given = min(end, reservation.end)


def expire_due(model: ModelState, asked: ExpireDue, _: object) -> object:
    due = sorted(
        (each.deadline_ms, queue.queue_id, each.reservation_id)
        for queue in model.queues.values()
        for each in queue.live
        if each.deadline_ms <= model.now_ms
    )
    delays = sorted(
        (at_ms, queue.queue_id, group.name, start)
        for queue in model.queues.values()
        for group in queue.groups.values()
        for start, (_, at_ms) in group.delayed.items()
        if at_ms <= model.now_ms
    )
    messages = 0
    for deadline_ms, queue_id, reservation_id in due[: asked.limit]:
        expire = ExpireReservation(queue_id, reservation_id, deadline_ms)
        messages += expire_reservation(model, expire, None).messages
    for at_ms, queue_id, group_name, start in delays[: asked.limit]:
        ready = ReadyDelayed(queue_id, group_name, start, at_ms)
        messages += ready_delayed(model, ready, None).messages
    return Expired(messages)


def is_due(model: ModelState) -> bool:
    """Whether a commit expires something: deadlines are looked at in buckets."""
    deadlines_ms = [each.deadline_ms for queue in model.queues.values() for each in queue.live]
    deadlines_ms += (
        at_ms
        for queue in model.queues.values()
        for group in queue.groups.values()
        for _, at_ms in group.delayed.values()
    )
    return any((each_ms // BUCKET_MS + 1) * BUCKET_MS <= model.now_ms for each_ms in deadlines_ms)


def expire_reservation(model: ModelState, asked: ExpireReservation, _: object) -> Acted:
    if asked.expected_deadline_ms > model.now_ms:
        return STALE
    queue = model.use_id(asked.queue_id, briefly=True)
    reservation = None if queue is None else queue.reservations.get(asked.reservation_id)
    if queue is None or reservation is None or not reservation.live:
        return STALE
    if reservation.deadline_ms != asked.expected_deadline_ms:
        return STALE
    ended = spans_of(sorted(reservation.open))
    _end(model, queue, reservation, ended, Ending.EXPIRED)
    model.expired.append(reservation.reservation_id)
    return Acted(ActionOutcome.DONE, sum(end - start for start, end in ended))


def ready_delayed(model: ModelState, asked: ReadyDelayed, _: object) -> Acted:
    if asked.expected_not_before_ms > model.now_ms:
        return STALE
    queue = model.use_id(asked.queue_id, briefly=True)
    group = None if queue is None else queue.groups.get(asked.group)
    if queue is None or group is None:
        return STALE
    end, at_ms = group.delayed.get(asked.start, (0, 0))
    if at_ms != asked.expected_not_before_ms:
        return STALE
    del group.delayed[asked.start]
    model.touched.add(queue.queue_id)
    _return(model, queue, group, (asked.start, end))
    return Acted(ActionOutcome.DONE, end - asked.start)


def revoke(model: ModelState, queue: QueueModel, group: ModelGroup) -> tuple[int, ...]:
    """Take back what the group holds, without counting an attempt."""
    revoked = queue.live_of(group.name)
    for reservation in revoked:
        spans = spans_of(sorted(reservation.open))
        _end(model, queue, reservation, spans, Ending.REVOKED)
    return tuple(reservation.reservation_id for reservation in revoked)


def _find_reservation(
    model: ModelState,
    asked: Settle | Extend | HeldReservation,
    answer: object,
    *,
    by_broker: bool = False,
) -> tuple[QueueModel, ModelReservation]:
    named = Receipt.decode(asked.receipt)
    queue = model.use_id(named.queue_id)
    reservation = None if queue is None else queue.reservations.get(named.reservation_id)
    if queue is None or reservation is None:
        raise Refused(ReservationNotFound)
    may_be_gone = reservation.fading or reservation.forgotten
    if may_be_gone and isinstance(answer, ReservationNotFound):
        del queue.reservations[named.reservation_id]
        raise Refused(ReservationNotFound)
    check_owner(
        queue.groups[reservation.group],
        asked.owner_epoch or named.owner_epoch,
        None if by_broker else asked.client_id,
    )
    return queue, reservation


def _end(
    model: ModelState,
    queue: QueueModel,
    reservation: ModelReservation,
    spans: list[Span],
    ending: Ending,
    not_before_ms: int = 0,
) -> None:
    group = queue.groups[reservation.group]
    for start, end in spans:
        model.touched.add(queue.queue_id)
        reservation.open -= set(range(start, end))
        reservation.done.update((offset, ending) for offset in range(start, end))
        if ending in (Ending.ACK, Ending.DEAD_LETTER):
            for offset in range(start, end):
                group.standings[offset].place = Place.SETTLED
                row = (queue.queue_id, group.name, offset)
                model.consumed[row] = model.consumed.get(row, 0) + 1
            continue
        charged = end
        if ending in (Ending.RELEASE, Ending.REVOKED):
            charged = start
        elif ending in (Ending.DISCONNECT, Ending.EXPIRED):  # only for what was given (K1)
            charged = min(max(start, reservation.given), end)
        for offset in range(start, charged):
            group.standings[offset].attempts += 1
        retried = ending in (Ending.NACK, Ending.EXPIRED) and not not_before_ms
        for part, is_retry in (((start, charged), retried), ((charged, end), False)):
            if part[0] < part[1]:
                at_ms = not_before_ms
                if is_retry:
                    at_ms = _plan_retry(model, queue, group, part, reservation.reservation_id)
                _return(model, queue, group, part, at_ms)
    if spans:
        if ending not in (Ending.EXPIRED, Ending.REVOKED):
            model.note_use(queue, group)
        model.delete_settled(queue, [reservation.run])
    if sum(not each.live for each in queue.reservations.values()) > model.remembered_max:
        queue.fade_settled()


def _plan_retry(
    model: ModelState, queue: QueueModel, group: ModelGroup, span: Span, reservation_id: int
) -> int:
    """Where messages go whose delivery failed, and when: 0 for at once (V9)."""
    settings = model.settings(queue)
    delay_ms = settings.retry_delay_ms * 2 ** (group.standings[span[0]].attempts - 1)
    delay_ms = min(delay_ms, settings.retry_delay_ms_max)
    for offset in range(*span):
        group.standings[offset].holds = settings.retries_first
        group.standings[offset].retry_of = 0 if settings.retries_first else reservation_id
    return model.now_ms + delay_ms if delay_ms else 0


def _return(
    model: ModelState, queue: QueueModel, group: ModelGroup, span: Span, not_before_ms: int = 0
) -> None:
    start, end = span
    place = Place.DELAYED if not_before_ms else Place.READY
    if 0 < model.settings(queue).max_attempts <= group.standings[start].attempts:
        place = Place.BURIED
        group.buried[start] = end
    elif not_before_ms:
        group.delayed[start] = (end, not_before_ms)
    for offset in range(start, end):
        standing = group.standings[offset]
        standing.place = place
        if place is Place.READY and standing.retry_of:
            standing.after = queue.next_offset
