"""Builds the protos of batches and settlements, and raises the errors that results carry.

Pure: it sends nothing and keeps no state.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

from google.rpc.status_pb2 import Status

from tidemark.api.broker.v1 import broker_pb2, message_pb2, subscription_pb2
from tidemark.api.broker.v1.message_pb2 import (
    Ack,
    DeadLetter,
    Extend,
    Nack,
    PublishReceipt,
    Release,
    Settlement,
    SettleResult,
)
from tidemark.rpc.statuses import from_status

Action: TypeAlias = Ack | Nack | DeadLetter | Extend | Release
Target: TypeAlias = int | bytes
"""The target of a settlement: a delivery tag of this session, or a receipt from any session."""

Stored: TypeAlias = tuple[int, int, int]
"""The fields that a receipt in columns adds to a run: queue_id, first_offset and publisher_id."""

Range: TypeAlias = tuple[int, int]
"""Messages of a delivery, counted from 0: first inclusive, last exclusive."""


ACTION_NAMES: Final[Mapping[type[Action], str]] = {
    Ack: "ack",
    Nack: "nack",
    DeadLetter: "dead_letter",
    Extend: "extend",
    Release: "release",
}
"""Their fields in a settlement."""


def settlement_of(
    target: Target, action: Action, ranges: Iterable[Range] = (), request_id: int = 0
) -> Settlement:
    settlement = Settlement(request_id=request_id)
    fill_settlement(settlement, target, action, ranges)
    return settlement


def fill_settlement(
    settlement: Settlement, target: Target, action: Action, ranges: Iterable[Range]
) -> None:
    if isinstance(target, bytes):
        settlement.receipt = target
    else:
        settlement.delivery_tag = target
    for start, end in ranges:
        settlement.ranges.add(start=start, end=end)
    match action:
        case Ack():
            settlement.ack.SetInParent()
        case Nack():
            settlement.nack.CopyFrom(action)
        case DeadLetter():
            settlement.dead_letter.CopyFrom(action)
        case Extend():
            settlement.extend.CopyFrom(action)
        case Release():
            settlement.release.CopyFrom(action)


def deliveries_in_order(
    frame: broker_pb2.SessionResponse,
) -> Iterable[message_pb2.Delivery | message_pb2.DeliveryArray]:
    """The deliveries of a frame in the order of their tags."""
    if not frame.delivery_arrays:
        return frame.deliveries
    if not frame.deliveries:
        return frame.delivery_arrays
    parts: list[message_pb2.Delivery | message_pb2.DeliveryArray] = [*frame.deliveries]
    parts += frame.delivery_arrays
    return sorted(parts, key=lambda part: tags_of(part)[0])


def tags_of(part: message_pb2.Delivery | message_pb2.DeliveryArray) -> Sequence[int]:
    if isinstance(part, message_pb2.Delivery):
        return (part.delivery_tag,)
    return part.delivery_tags


def receipt_of(result: message_pb2.PublishResult) -> PublishReceipt:
    """The receipt of a stored run; raises the error of a rejected one."""
    if result.HasField("error"):
        raise from_status(result.error)
    return result.receipt


def check(
    result: SettleResult | broker_pb2.OpenPublisherResult | subscription_pb2.SubscriptionResult,
) -> None:
    """Raise the error that a result carries, if any."""
    if result.HasField("error"):
        error: Status = result.error
        raise from_status(error)
