"""Deliveries: reservations that clients hold, by delivery tag or by receipt.

A tag is the broker's number for one delivery on one connection, and stands for the receipt. Tags
and settlements under way are counted on the tracked queue, so that cleanup sees them (I4). When a
client is gone, everything it holds goes back at once (V6).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from broker_svc.consume.consumer import FeedKey
from broker_svc.consume.hand_outs import HandOuts, Place
from broker_svc.idle.tracking import TrackedQueue
from tidemark.api.broker.v1 import message_pb2
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.errors import (
    AlreadySettled,
    Fenced,
    NotOwner,
    ReservationExpired,
    ReservationNotFound,
    TidemarkError,
    UnknownDeliveryTag,
)
from tidemark.telemetry import messaging, tracer
from tidemark.telemetry.messaging import Messages

_tracer = tracer(__name__)

ReservationKey = tuple[int, int]
"""Partition and reservation id: ids are given per partition."""

ENDED_MAX: Final = 10_000
"""Tags whose reservations storage ended, for each connection: a client may never settle them."""


@dataclass(slots=True, eq=False)
class HeldDelivery:
    """One reservation in the hands of a client."""

    reservation_id: int
    receipt: bytes
    queue: TrackedQueue
    messages: int
    open_messages: int
    owner_epoch: int
    traceparent: str = ""
    """Trace context of the publisher, for the spans of delivery and settlement."""
    group: str = ""
    first_offset: int = 0
    visibility_ms: int = 0
    deadline_ms: int = 0
    """When the reservation runs out unless it is renewed, by the broker's monotonic clock."""
    place: Place | None = None
    """In the order of a consumer that reports hand-outs."""
    noted_messages: int = 0
    """How many of the given messages storage has recorded."""
    given_at_least: int = 0
    """How many a client has reported that named it by its receipt."""
    ended: Callable[[int], None] | None = None
    """Called with its tag if it ends without being settled."""
    key: ReservationKey = field(init=False)
    tag: int = 0
    """Under which its client knows it."""

    def __post_init__(self) -> None:
        self.key = self.queue.partition, self.reservation_id

    @staticmethod
    def of(
        slice_: exchange_pb2.ReservedSlice,
        queue: TrackedQueue,
        group: str,
        hand_outs: HandOuts | None = None,
        now_ms: int = 0,
    ) -> "HeldDelivery":
        """The record of a reserved slice that is sent to a client."""
        place = None
        if hand_outs is not None:
            place = hand_outs.place(
                slice_.count, slice_.attempt_count, last_attempt=slice_.last_attempt
            )
        return HeldDelivery(
            slice_.reservation_id,
            slice_.receipt,
            queue,
            slice_.count,
            slice_.count,
            slice_.owner_epoch,
            slice_.traceparent,
            group,
            slice_.first_offset,
            slice_.visibility_ms,
            now_ms + slice_.visibility_ms,
            place,
        )

    @property
    def given_messages(self) -> int:
        """How many of its messages, from the first, the application was or may have been given."""
        return self.messages if self.place is None else max(self.place.given, self.given_at_least)

    @property
    def feed_key(self) -> FeedKey:
        """Where the messages came from, and go when they are given back."""
        return self.queue.partition, self.queue.lmq_name, self.group


class Deliveries:
    """The deliveries of one client. Tags count up and are never used again on a connection."""

    def __init__(self, directory: "DeliveryDirectory") -> None:
        self._directory = directory
        self._by_tag: dict[int, HeldDelivery] = {}
        self._tags: dict[ReservationKey, int] = {}
        self._last_tag = 0
        self._ended: dict[int, Callable[[], TidemarkError]] = {}
        """Tags that the client did not settle here in time, each with the reason."""
        self.check_at_ms: int | None = None
        """When `given_notes` checks them next."""

    def __len__(self) -> int:
        return len(self._by_tag)

    def __iter__(self) -> Iterator[HeldDelivery]:
        return iter(self._by_tag.values())

    def add(self, held: HeldDelivery) -> int:
        """Issue the tag of a new delivery."""
        tag = self._last_tag = held.tag = self._last_tag + 1
        self._by_tag[tag] = held
        self._tags[held.key] = tag
        held.queue.deliveries += 1
        self._directory.add(held.key, self)
        return tag

    def get(self, tag: int) -> HeldDelivery:
        """Raises UnknownDeliveryTag for one never issued here, or settled since.

        Raises ReservationExpired for one that ran out, Fenced for one that was revoked, and
        NotOwner for one whose partition has left this broker.
        """
        held = self._by_tag.get(tag)
        if held is None:
            ended = self._ended.get(tag)
            if ended is not None:
                raise ended()
            raise UnknownDeliveryTag(
                f"delivery tag {tag} is not held by this connection", delivery_tag=str(tag)
            )
        return held

    def find(self, key: ReservationKey) -> HeldDelivery | None:
        tag = self._tags.get(key)
        return None if tag is None else self._by_tag[tag]

    def drop(self, key: ReservationKey) -> None:
        """The reservation has ended; a second time is harmless."""
        tag = self._tags.pop(key, None)
        if tag is not None:
            held = self._by_tag.pop(tag)
            held.queue.deliveries -= 1
            self._directory.drop(key)

    def expire(self, key: ReservationKey) -> None:
        """It ran out: it is held no longer, and settling it is refused with RESERVATION_EXPIRED."""
        self._end(key, _expired)

    def revoke(self, key: ReservationKey) -> None:
        """Another client took the queue: the same with FENCED."""
        self._end(key, _revoked)

    def left(self, key: ReservationKey, refusal: Callable[[], TidemarkError]) -> None:
        """Its partition has left this broker: the client still holds it, and settles elsewhere."""
        tag = self._tags.get(key)
        if tag is not None:
            self._remember(tag, refusal)
            self.drop(key)

    def _end(self, key: ReservationKey, refusal: Callable[[str, int, int], TidemarkError]) -> None:
        tag = self._tags.get(key)
        if tag is not None:
            held = self._by_tag[tag]
            place = (held.queue.lmq_name, held.first_offset, held.owner_epoch)
            self._remember(tag, partial(refusal, *place))
            self.drop(key)
            if held.ended is not None:
                held.ended(tag)

    def _remember(self, tag: int, refusal: Callable[[], TidemarkError]) -> None:
        """Why a tag that the client may still use is refused."""
        self._ended[tag] = refusal
        if len(self._ended) > ENDED_MAX:
            del self._ended[next(iter(self._ended))]

    def take_all(self) -> list[HeldDelivery]:
        """Everything the client holds, which it holds no longer."""
        held = list(self._by_tag.values())
        for each in held:
            self.drop(each.key)
        return held


class DeliveryDirectory:
    """Which client holds which reservation, over all connections of the broker."""

    def __init__(self) -> None:
        self._holders: dict[ReservationKey, Deliveries] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, key: ReservationKey, holder: Deliveries) -> None:
        self._holders[key] = holder

    def drop(self, key: ReservationKey) -> None:
        self._holders.pop(key, None)

    def holder(self, key: ReservationKey) -> Deliveries | None:
        return self._holders.get(key)

    def ended(self, key: ReservationKey) -> None:
        """Storage ended a reservation: it expired."""
        holder = self._holders.get(key)
        if holder is not None:
            holder.expire(key)

    def revoked(self, key: ReservationKey) -> None:
        """Storage took a reservation back for another owner."""
        holder = self._holders.get(key)
        if holder is not None:
            holder.revoke(key)

    def revoked_below(self, feed_key: FeedKey, epoch: int) -> None:
        """Storage took back what was handed out before `epoch`; looks at everything held."""
        for key, holder in list(self._holders.items()):
            held = holder.find(key)
            if held is not None and held.feed_key == feed_key and held.owner_epoch < epoch:
                holder.revoke(key)

    def partition_left(self, partition: int, refusal: Callable[[], TidemarkError]) -> None:
        """Another broker holds the partition: settling by tag is refused from now on."""
        for key, holder in list(self._holders.items()):
            if key[0] == partition:
                holder.left(key, partial(_moved, partition, refusal))

    def receipts(self, partition: int) -> list[bytes]:
        """Of everything that clients hold of a partition."""
        held = (holder.find(key) for key, holder in self._holders.items() if key[0] == partition)
        return [each.receipt for each in held if each is not None]


def _moved(partition: int, refusal: Callable[[], TidemarkError]) -> TidemarkError:
    """Also if the partition has come back: the receipt is good there, and the tag is not."""
    reason = refusal()
    if isinstance(reason, NotOwner):
        return reason
    return NotOwner(
        f"partition {partition} has moved since: settle by receipt", partition=str(partition)
    )


def drop_refused(holder: Deliveries, held: HeldDelivery, refusal: TidemarkError) -> None:
    """Storage has refused to settle or renew a delivery; the client holds it no longer if nothing
    of the reservation is open any more."""
    if isinstance(refusal, AlreadySettled):
        ended = refusal.metadata.get("open_messages") == "0"
    elif isinstance(refusal, Fenced):
        # Under its own epoch, only the client was refused: the owner holds it still.
        ended = refusal.metadata.get("epoch") != str(held.owner_epoch)
    else:
        ended = isinstance(refusal, ReservationExpired | ReservationNotFound)
    if ended and isinstance(refusal, ReservationExpired):
        holder.expire(held.key)
    if ended:
        holder.drop(held.key)


def _expired(lmq_name: str, first_offset: int, _owner_epoch: int) -> TidemarkError:
    return ReservationExpired(
        f"the reservation of {lmq_name} from offset {first_offset} on has run out",
        queue=lmq_name,
        offset=str(first_offset),
    )


def _revoked(_lmq_name: str, _first_offset: int, owner_epoch: int) -> TidemarkError:
    return Fenced(
        "another client took the queue and the reservation with it", epoch=str(owner_epoch)
    )


def fill_delivery(
    delivery: message_pb2.Delivery,
    slice_: exchange_pb2.ReservedSlice,
    lmq_name: str,
    group: str,
    partition: int,
) -> None:
    """Fill in a reserved slice; tag and consumer belong to the connection."""
    delivery.receipt = slice_.receipt
    delivery.lmq_name = lmq_name
    delivery.group = group
    delivery.first_offset = slice_.first_offset
    delivery.count = slice_.count
    delivery.batch.MergeFromString(slice_.body)
    delivery.attempt_count = slice_.attempt_count
    delivery.delivery_count = slice_.delivery_count
    delivery.epoch = slice_.owner_epoch
    delivery.visibility_ms = slice_.visibility_ms
    delivery.publish_time_ms = slice_.publish_time_ms
    delivery.fairness_key = slice_.fairness_key
    delivery.traceparent = slice_.traceparent
    delivery.partition = partition
    delivery.last_attempt = slice_.last_attempt
    if slice_.traceparent:
        delivered = Messages(lmq_name, slice_.count, group, partition, slice_.attempt_count)
        messaging.moment(_tracer, messaging.DELIVER, delivered, slice_.traceparent)
