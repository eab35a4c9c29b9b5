"""Output of a session: everything to send to one client, gathered into frames.

Owns the unsent output and the room that deliveries may take while the client reads slowly.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final

from broker_svc.consume.consumer import HandedOut, Room
from tidemark.api.broker.v1 import broker_pb2, message_pb2

UNSENT_BYTES_MAX: Final = 4 * 1024 * 1024
"""Deliveries that a session may have reserved and not sent."""

DELIVERY_OVERHEAD_BYTES: Final = 256
"""The cost of a delivery in addition to its bytes: many small ones add up."""

ARRAY_DELIVERIES_MAX: Final = 1000
"""Deliveries in one array: a standing reserve hands out 4 KiB at once, so it fits a frame."""


class _Receipts:
    """Receipts for the next frame. Partitions add theirs one after another, which lists take at a
    fraction of the cost of message fields."""

    __slots__ = ("first_offsets", "publisher_ids", "queue_ids", "request_ids")

    def __init__(self) -> None:
        self.request_ids: list[int] = []
        self.queue_ids: list[int] = []
        self.first_offsets: list[int] = []
        self.publisher_ids: list[int] = []


class SessionOutput:
    """The next frame to one client."""

    def __init__(self) -> None:
        self.frame = broker_pb2.SessionResponse()
        self.wakeup = asyncio.Event()
        """Set when there is something to send, or when the session may have ended."""
        self.room = Room(UNSENT_BYTES_MAX)
        self._unsent_bytes = 0
        self._receipts = _Receipts()
        self._array: message_pb2.DeliveryArray | None = None
        """The array that further deliveries can join."""

    def add_delivery(self, body_bytes: int) -> message_pb2.Delivery:
        """Room for a delivery, to be filled."""
        self._take_room(body_bytes + DELIVERY_OVERHEAD_BYTES)
        self._array = None  # deliveries of an array follow each other
        return self.frame.deliveries.add()

    def add_deliveries(
        self, consumer_id: int, group: str, tags: Sequence[int], handed_out: Sequence[HandedOut]
    ) -> None:
        """Plain deliveries of one consumer, in columns."""
        array = self._array
        if (
            array is None
            or array.consumer_id != consumer_id
            or len(array.delivery_tags) + len(tags) > ARRAY_DELIVERIES_MAX
        ):
            array = self.frame.delivery_arrays.add(consumer_id=consumer_id, group=group)
            self._array = array
        feeds, _, receipts, first_offsets, counts, bodies, visibility_ms, times_ms, epochs = zip(
            *handed_out, strict=True
        )
        array.delivery_tags.extend(tags)
        array.receipts.extend(receipts)
        array.lmq_names.extend([feed.lmq_name for feed in feeds])
        array.first_offsets.extend(first_offsets)
        array.counts.extend(counts)
        array.bodies.extend(bodies)
        array.visibility_ms.extend(visibility_ms)
        array.publish_times_ms.extend(times_ms)
        array.partitions.extend([feed.partition for feed in feeds])
        array.epochs.extend(epochs)
        self._take_room(sum(map(len, bodies)) + len(tags) * DELIVERY_OVERHEAD_BYTES)

    def _take_room(self, size: int) -> None:
        self._unsent_bytes += size
        self.room.taken_bytes += size

    def add_receipts(
        self,
        request_ids: Sequence[int],
        queue_ids: Iterable[int],
        first_offsets: Iterable[int],
        publisher_ids: Iterable[int],
    ) -> None:
        """Receipts of runs that came in columns. They share one part of the frame."""
        receipts = self._receipts
        receipts.request_ids += request_ids
        receipts.queue_ids += queue_ids
        receipts.first_offsets += first_offsets
        receipts.publisher_ids += publisher_ids

    def take(self) -> tuple[broker_pb2.SessionResponse, int]:
        """The gathered output, and the bytes of room that it takes until it is sent."""
        frame, self.frame, self._array = self.frame, broker_pb2.SessionResponse(), None
        if self._receipts.request_ids:
            receipts, self._receipts = self._receipts, _Receipts()
            frame.published_arrays.add(
                request_ids=receipts.request_ids,
                queue_ids=receipts.queue_ids,
                first_offsets=receipts.first_offsets,
                publisher_ids=receipts.publisher_ids,
            )
        unsent_bytes, self._unsent_bytes = self._unsent_bytes, 0
        return frame, unsent_bytes

    @property
    def results(self) -> int:
        """How many results and notices wait to be sent."""
        frame = self.frame
        return (
            len(frame.published)
            + len(frame.settled)
            + len(frame.errors)
            + len(frame.publishers)
            + len(frame.synced)
            + len(frame.unsubscribed)
            + len(frame.ended)
            + len(frame.hand_outs)
            + len(frame.renewed)
            + len(frame.acked)
            + len(self._receipts.request_ids)
        )
