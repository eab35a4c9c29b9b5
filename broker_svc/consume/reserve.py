"""A reserve on its way to storage, and whether what it brings can still be delivered.

Pure: the `dispatcher` decides when to reserve, for whom and how much.
"""

from typing import NamedTuple

from broker_svc.consume.consumer import RESERVE_BYTES_MAX, Consumer, Feed, Slices
from broker_svc.consume.standing import StandingReserve
from tidemark.api.storage.v1 import exchange_pb2


class Asked(NamedTuple):
    """The most that a reserve may return, and the wakeups of its feed when it was sent."""

    messages: int
    charged_bytes: int
    wakeups: int
    standing: StandingReserve | None
    """Set if it was asked to stand."""
    replaced: StandingReserve | None
    """The standing reserve of the consumer that this one takes over."""


def has_lost(consumer: Consumer, feed: Feed) -> bool:
    """Whether a consumer gets no more of a feed, for now or for good."""
    return (
        consumer.closed
        or consumer.stopped
        or feed.paused
        or feed.removed
        or feed.lmq_name not in consumer.leases
    )


def is_lost(consumer: Consumer, feed: Feed, slices: Slices) -> bool:
    """Whether slices cannot be delivered, also because the owner is another one by now."""
    current = all(each.owner_epoch == feed.owner_epoch for each in slices)
    return not current or has_lost(consumer, feed)


def reserve_operation(
    consumer: Consumer, feed: Feed, messages: int, bytes_max: int
) -> exchange_pb2.Operation:
    operation = exchange_pb2.Operation()
    reserve = operation.reserve
    reserve.lmq_name = feed.lmq_name
    reserve.group = feed.group
    reserve.max_messages = messages
    reserve.max_bytes = bytes_max
    reserve.visibility_ms = consumer.visibility_ms
    reserve.owner_epoch = feed.owner_epoch
    reserve.reports_hand_outs = consumer.hand_outs is not None
    # A message that is larger is asked for again, with room for the largest.
    reserve.strict_bytes = feed.reserve_bytes < RESERVE_BYTES_MAX
    return operation


def long_form(
    standing_id: int,
    left: int,
    reservation_id: int,
    receipt: bytes,
    first_offset: int,
    count: int,
    body: bytes,
    visibility_ms: int,
    publish_time_ms: int,
    owner_epoch: int,
) -> exchange_pb2.ReserveResult:
    """A hand-out that came in columns, in its long form."""
    reserved = exchange_pb2.ReserveResult(standing_id=standing_id, standing_messages=left)
    reserved.slices.add(
        reservation_id=reservation_id,
        receipt=receipt,
        first_offset=first_offset,
        count=count,
        body=body,
        delivery_count=1,
        visibility_ms=visibility_ms,
        publish_time_ms=publish_time_ms,
        owner_epoch=owner_epoch,
    )
    return reserved
