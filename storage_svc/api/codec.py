"""Operations on the wire: protos of the exchange to and from the operations of a partition.

Only translates. What the wire says wrongly (no operation, an unknown enum) is refused here; what it
says rightly and storage cannot do is refused by the operation itself.
"""

from collections.abc import Callable
from typing import Any

from storage_svc import operations as op
from storage_svc.partition.health import Health
from storage_svc.queue import bodies
from storage_svc.queue.reservation import Ending
from tidemark import limits
from tidemark.api.broker.v1 import subscription_pb2, topic_pb2
from tidemark.api.storage.v1 import action_pb2, exchange_pb2, partition_pb2
from tidemark.errors import InvalidArgument, TidemarkError
from tidemark.names import (
    LmqName,
    validate_client_id,
    validate_fairness_key,
    validate_group,
    validate_producer_id,
)
from tidemark.rpc.statuses import to_status
from tidemark.rpc.topic_codec import topic_from_proto

_ENDINGS = {
    exchange_pb2.SETTLE_ACTION_ACK: Ending.ACK,
    exchange_pb2.SETTLE_ACTION_NACK: Ending.NACK,
    exchange_pb2.SETTLE_ACTION_DEAD_LETTER: Ending.DEAD_LETTER,
    exchange_pb2.SETTLE_ACTION_RELEASE: Ending.RELEASE,
    exchange_pb2.SETTLE_ACTION_DISCONNECT: Ending.DISCONNECT,
}
_REASONS = {
    action_pb2.DEAD_REASON_ATTEMPTS_EXHAUSTED: op.DeadReason.ATTEMPTS_EXHAUSTED,
    action_pb2.DEAD_REASON_TIME_TO_LIVE: op.DeadReason.TIME_TO_LIVE,
    action_pb2.DEAD_REASON_REJECTED: op.DeadReason.REJECTED,
    action_pb2.DEAD_REASON_MAX_WAIT_TIME: op.DeadReason.MAX_WAIT_TIME,
    action_pb2.DEAD_REASON_REDRIVE: op.DeadReason.REDRIVE,
}
_REASON_PROTOS = {reason: proto for proto, reason in _REASONS.items()}


# --- operations -----------------------------------------------------------------------------------


def operation_of(proto: exchange_pb2.Operation) -> op.Operation:
    """Raises InvalidArgument or InvalidName for what cannot become one."""
    kind = proto.WhichOneof("kind")
    if kind is None:
        raise InvalidArgument("an operation without a kind", field="kind")
    try:
        return _READERS[kind](getattr(proto, kind))
    except ValueError as error:  # a time that is none, for example
        raise InvalidArgument(f"{kind}: {error}", field=kind) from None


def _materialize(proto: exchange_pb2.Materialize) -> op.Operation:
    return op.Materialize(_queue(proto.lmq_name), proto.create)


def _unmaterialize(proto: exchange_pb2.Unmaterialize) -> op.Operation:
    return op.Unmaterialize(_queue(proto.lmq_name), proto.expected_activity_stamp)


def _append(proto: exchange_pb2.Append) -> op.Operation:
    validate_fairness_key(proto.fairness_key)
    _body(proto.count, proto.body, limits.RUN_BYTES_MAX)
    _within("delay_ms", proto.delay_ms, 0, limits.DELAY_MS_MAX)
    _within("ttl_ms", proto.ttl_ms, 0, limits.TTL_MS_MAX)
    if proto.sequence:
        validate_producer_id(proto.producer_id)
    return op.Append(
        _queue(proto.lmq_name),
        proto.count,
        proto.body,
        proto.fairness_key,
        proto.delay_ms,
        proto.ttl_ms,
        proto.traceparent,
        proto.producer_id,
        proto.sequence,
        proto.topic_version,
    )


def _reserve(proto: exchange_pb2.Reserve) -> op.Operation:
    _within("max_messages", proto.max_messages, 1, limits.PULL_MESSAGES_MAX)
    _visibility(proto.visibility_ms)
    return op.Reserve(
        _queue(proto.lmq_name),
        _group(proto.group),
        proto.max_messages,
        min(proto.max_bytes or limits.RUN_BYTES_MAX, limits.RUN_BYTES_MAX),
        proto.visibility_ms,
        proto.session_id,
        proto.owner_epoch,
        proto.strict_bytes,
    )


def _settle(proto: exchange_pb2.SettleReservation) -> op.Operation:
    if proto.action == exchange_pb2.SETTLE_ACTION_EXTEND:
        _visibility(proto.duration_ms)
        return op.Extend(proto.receipt, proto.duration_ms, proto.owner_epoch)
    ending = _ENDINGS.get(proto.action)
    if ending is None:
        raise InvalidArgument("a settlement without an action", field="action")
    _within("duration_ms", proto.duration_ms, 0, limits.NACK_DELAY_MS_MAX)
    ranges = tuple((each.start, each.end) for each in proto.index_ranges)
    return op.Settle(
        proto.receipt, ending, ranges, proto.duration_ms, proto.detail, proto.owner_epoch
    )


def _expire_due(_: exchange_pb2.ExpireDue) -> op.Operation:
    return op.ExpireDue()


def _take_ownership(proto: exchange_pb2.TakeOwnership) -> op.Operation:
    validate_client_id(proto.client_id)
    start = _start(proto.start) if proto.HasField("start") else None
    return op.TakeOwnership(_queue(proto.lmq_name), _group(proto.group), proto.client_id, start)


def _confirm_ownership(proto: exchange_pb2.ConfirmOwnership) -> op.Operation:
    return op.ConfirmOwnership(
        _queue(proto.lmq_name), _group(proto.group), proto.client_id, proto.epoch
    )


def _drop_ownership(proto: exchange_pb2.DropOwnership) -> op.Operation:
    return op.DropOwnership(
        _queue(proto.lmq_name), _group(proto.group), proto.client_id, proto.epoch
    )


def _place_group(proto: exchange_pb2.PlaceGroup) -> op.Operation:
    start = _start(proto.start) if proto.HasField("start") else None
    return op.PlaceGroup(_queue(proto.lmq_name), _group(proto.group), start, proto.owner_epoch)


def _remove_group(proto: exchange_pb2.RemoveGroup) -> op.Operation:
    return op.RemoveGroup(_queue(proto.lmq_name), _group(proto.group))


def _remove_queue(proto: exchange_pb2.RemoveQueue) -> op.Operation:
    return op.RemoveQueue(_queue(proto.lmq_name), proto.expected_queue_id, proto.only_empty)


def _purge(proto: exchange_pb2.Purge) -> op.Operation:
    return op.Purge(_queue(proto.lmq_name))


def _unschedule(proto: exchange_pb2.Unschedule) -> op.Operation:
    return op.Unschedule(_queue(proto.lmq_name), proto.schedule_id)


def _redrive(proto: exchange_pb2.Redrive) -> op.Operation:
    return op.Redrive(
        _queue(proto.lmq_name),
        proto.reason,
        proto.source_lmq_name,
        proto.after_ms,
        proto.before_ms,
        proto.limit,
        proto.dry_run,
        proto.page_token,
    )


def _apply_topic(proto: exchange_pb2.ApplyTopic) -> op.Operation:
    return op.ApplyTopic(topic_from_proto(proto.topic), proto.deleted)


def action_of(proto: action_pb2.Action) -> op.Operation:
    """A planned action as an operation."""
    match proto.WhichOneof("kind"):
        case "expire_reservation":
            expire = proto.expire_reservation
            return op.ExpireReservation(
                expire.queue_id, expire.reservation_id, expire.expected_deadline_ms
            )
        case "bury_messages":
            bury = proto.bury_messages
            if bury.reason not in _REASONS:
                raise InvalidArgument("messages are buried for a reason", field="reason")
            return op.Bury(
                bury.queue_id,
                bury.group,
                bury.fairness_key,
                bury.first_offset,
                _REASONS[bury.reason],
                bury.expected_attempt_count,
                bury.expected_dead_deadline_ms,
            )
        case "promote_scheduled":
            promote = proto.promote_scheduled
            return op.PromoteScheduled(promote.schedule_id, promote.expected_due_ms)
        case "ready_delayed":
            ready = proto.ready_delayed
            return op.ReadyDelayed(
                ready.queue_id, ready.group, ready.first_offset, ready.expected_not_before_ms
            )
        case "append_from_outbox":
            append = proto.append_from_outbox
            return op.AppendFromOutbox(append.source_partition, _outbox_entry(append.entry))
        case "clear_outbox":
            return op.ClearOutbox(proto.clear_outbox.sequence)
    raise InvalidArgument("an action without a kind", field="kind")


def _outbox_entry(proto: action_pb2.OutboxEntry) -> op.OutboxEntry:
    # Headers of dead letters come on top of what a publisher may send.
    _body(proto.count, proto.body, 2 * limits.RUN_BYTES_MAX)
    return op.OutboxEntry(
        proto.sequence,
        _queue(proto.destination_lmq_name),
        proto.destination_partition,
        proto.count,
        proto.body,
        proto.fairness_key,
        _REASONS.get(proto.reason, op.DeadReason.REJECTED),
        proto.traceparent,
        proto.create_time_ms,
        proto.previous_sequence,
    )


_READERS: dict[str, Callable[[Any], op.Operation]] = {
    "materialize": _materialize,
    "unmaterialize": _unmaterialize,
    "append": _append,
    "reserve": _reserve,
    "settle": _settle,
    "expire_due": _expire_due,
    "take_ownership": _take_ownership,
    "confirm_ownership": _confirm_ownership,
    "drop_ownership": _drop_ownership,
    "place_group": _place_group,
    "remove_group": _remove_group,
    "remove_queue": _remove_queue,
    "purge": _purge,
    "unschedule": _unschedule,
    "redrive": _redrive,
    "action": action_of,
    "apply_topic": _apply_topic,
}


# --- results --------------------------------------------------------------------------------------


def write_result(proto: exchange_pb2.OperationResult, result: op.Result) -> None:
    """The answer to one operation."""
    match result:
        case op.Appended():
            proto.append.queue_id = result.queue_id
            proto.append.first_offset = result.first_offset
            proto.append.schedule_id = result.schedule_id
            proto.append.duplicate = result.duplicate
        case op.Reserved():
            proto.reserve.SetInParent()
            for each in result.slices:
                _write_slice(proto.reserve.slices.add(), each)
            proto.reserve.more = result.more
        case op.Settled():
            proto.settle.messages = result.messages
            proto.settle.open_messages = result.open_messages
            proto.settle.visibility_ms = result.visibility_ms
        case op.Materialized():
            proto.materialize.queue_id = result.queue_id
            proto.materialize.activity_stamp = result.activity_stamp
            proto.materialize.was_cold = result.was_cold
            proto.materialize.created = result.created
        case op.Eviction():
            outcome = topic_pb2.EvictionOutcome.Value(f"EVICTION_OUTCOME_{result.value}")
            proto.unmaterialize.outcome = outcome
        case op.Expired():
            proto.expire_due.messages = result.messages
        case op.Ownership():
            proto.ownership.client_id = result.client_id
            proto.ownership.epoch = result.epoch
            proto.ownership.matched = result.matched
            proto.ownership.revoked_reservation_ids.extend(result.revoked)
        case op.GroupPlaced():
            proto.place_group.cursor = result.cursor
            proto.place_group.created = result.created
            proto.place_group.revoked_reservation_ids.extend(result.revoked)
        case op.Removed():
            proto.removed.messages = result.messages
            proto.removed.skipped = result.skipped
            proto.removed.next_page_token = result.next_token
        case op.Acted():
            proto.action.CopyFrom(action_result_to(result))
        case op.TopicStored():
            proto.apply_topic.version = result.version
        case TidemarkError():
            proto.error.CopyFrom(to_status(result))
        case _:
            raise AssertionError(f"{result} is no answer of an exchange")


def action_result_to(result: op.Result) -> action_pb2.ActionResult:
    """The answer to one planned action; an error means that it was refused."""
    if isinstance(result, op.Acted):
        outcome = action_pb2.ActionOutcome.Value(f"ACTION_OUTCOME_{result.outcome.value}")
        return action_pb2.ActionResult(outcome=outcome, messages=result.messages)
    assert isinstance(result, TidemarkError), "an action is done, stale or refused"
    return action_pb2.ActionResult(
        outcome=action_pb2.ACTION_OUTCOME_REFUSED, error=to_status(result)
    )


def action_to(operation: op.Operation) -> action_pb2.Action:
    """An operation that a sweep may ask for, as an action."""
    proto = action_pb2.Action()
    match operation:
        case op.ExpireReservation():
            proto.expire_reservation.queue_id = operation.queue_id
            proto.expire_reservation.reservation_id = operation.reservation_id
            proto.expire_reservation.expected_deadline_ms = operation.expected_deadline_ms
        case op.Bury():
            bury = proto.bury_messages
            bury.queue_id = operation.queue_id
            bury.group = operation.group
            bury.fairness_key = operation.fairness_key
            bury.first_offset = operation.first_offset
            bury.reason = _REASON_PROTOS[operation.reason]
            bury.expected_attempt_count = operation.expected_attempts
            bury.expected_dead_deadline_ms = operation.expected_dead_deadline_ms
        case op.PromoteScheduled():
            proto.promote_scheduled.schedule_id = operation.schedule_id
            proto.promote_scheduled.expected_due_ms = operation.expected_due_ms
        case op.ReadyDelayed():
            ready = proto.ready_delayed
            ready.queue_id = operation.queue_id
            ready.group = operation.group
            ready.first_offset = operation.start
            ready.expected_not_before_ms = operation.expected_not_before_ms
        case op.AppendFromOutbox():
            proto.append_from_outbox.source_partition = operation.source_partition
            proto.append_from_outbox.entry.CopyFrom(outbox_entry_to(operation.entry))
        case _:
            raise AssertionError(f"{operation} is not planned by sweeps")
    return proto


def outbox_entry_to(entry: op.OutboxEntry) -> action_pb2.OutboxEntry:
    return action_pb2.OutboxEntry(
        sequence=entry.sequence,
        destination_lmq_name=entry.destination_lmq_name,
        destination_partition=entry.destination_partition,
        count=entry.messages,
        body=entry.body,
        fairness_key=entry.fairness_key,
        reason=_REASON_PROTOS[entry.reason],
        traceparent=entry.traceparent,
        create_time_ms=entry.create_time_ms,
        previous_sequence=entry.previous,
    )


def health_to(health: Health) -> partition_pb2.PartitionHealth:
    proto = partition_pb2.PartitionHealth(
        state=topic_pb2.PartitionState.Value(f"PARTITION_STATE_{health.state.value}"),
        openings=health.openings,
    )
    for fault in health.faults:
        added = proto.faults.add(reason=fault.reason.value, detail=fault.detail, alarm=fault.alarm)
        added.since_time.FromMilliseconds(fault.since_ms)
    return proto


def _write_slice(proto: exchange_pb2.ReservedSlice, slice_: op.ReservedSlice) -> None:
    proto.reservation_id = slice_.reservation_id
    proto.receipt = slice_.receipt
    proto.queue_id = slice_.queue_id
    proto.first_offset = slice_.first_offset
    proto.count = slice_.messages
    proto.body = slice_.body
    proto.attempt_count = slice_.attempt_count
    proto.delivery_count = slice_.delivery_count
    proto.owner_epoch = slice_.owner_epoch
    proto.visibility_ms = slice_.visibility_ms
    proto.publish_time_ms = slice_.publish_time_ms
    proto.fairness_key = slice_.fairness_key
    proto.traceparent = slice_.traceparent


# --- fields ---------------------------------------------------------------------------------------


def _queue(lmq_name: str) -> str:
    LmqName.parse(lmq_name)
    return lmq_name


def _group(group: str) -> str:
    validate_group(group)
    return group


def _start(proto: subscription_pb2.StartPosition) -> op.Start:
    position = proto.WhichOneof("position")
    if position is None:
        raise InvalidArgument("a start without a position", field="start")
    number = getattr(proto, position)
    if position == "last":
        _within("last", number, 1, 1_000_000)
    return op.Start(op.StartAt(position), int(number) if position in ("last", "offset") else 0)


def _body(count: int, body: bytes, bytes_max: int) -> None:
    _within("count", count, 1, limits.RUN_MESSAGES_MAX)
    _within("body", len(body), 0, bytes_max)
    # A body that cannot be cut later would poison its queue, so it is parsed here, once.
    if bodies.count(body) != count:
        raise InvalidArgument(f"the body does not hold {count} messages", field="body")


def _visibility(visibility_ms: int) -> None:
    if visibility_ms:
        low, high = limits.VISIBILITY_TIMEOUT_MS_MIN, limits.VISIBILITY_TIMEOUT_MS_MAX
        _within("visibility_ms", visibility_ms, low, high)


def _within(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidArgument(f"{field} is {low} to {high}, not {value}", field=field)
