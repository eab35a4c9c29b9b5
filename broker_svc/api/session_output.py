"""Output of a session: everything that is to be sent to one client, gathered into frames.

Owns what is not sent yet and the room that deliveries may take while the client reads slowly.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final

from broker_svc.consume.consumer import Room
from tidemark.api.broker.v1 import broker_pb2, message_pb2

UNSENT_BYTES_MAX: Final = 4 * 1024 * 1024
"""Deliveries that a session may have reserved and not sent."""

DELIVERY_OVERHEAD_BYTES: Final = 256
"""What a delivery costs in addition to its bytes: many small ones add up."""


class SessionOutput:
    """The next frame to one client."""

    def __init__(self) -> None:
        self.frame = broker_pb2.SessionResponse()
        self.wakeup = asyncio.Event()
        """Set when there is something to send, or when the session may have ended."""
        self.room = Room(UNSENT_BYTES_MAX)
        self._unsent_bytes = 0

    def add_delivery(self, body_bytes: int) -> message_pb2.Delivery:
        """Room for a delivery, to be filled."""
        self._unsent_bytes += body_bytes + DELIVERY_OVERHEAD_BYTES
        self.room.taken_bytes += body_bytes + DELIVERY_OVERHEAD_BYTES
        return self.frame.deliveries.add()

    def add_receipts(
        self,
        request_ids: Sequence[int],
        queue_ids: Iterable[int],
        first_offsets: Iterable[int],
        publisher_ids: Iterable[int],
    ) -> None:
        """Receipts of runs that came in columns. They share one part of the frame."""
        arrays = self.frame.published_arrays
        receipts = arrays[0] if arrays else arrays.add()
        receipts.request_ids.extend(request_ids)
        receipts.queue_ids.extend(queue_ids)
        receipts.first_offsets.extend(first_offsets)
        receipts.publisher_ids.extend(publisher_ids)

    def take(self) -> tuple[broker_pb2.SessionResponse, int]:
        """What has gathered, and the bytes of room that it takes until it is sent."""
        frame, self.frame = self.frame, broker_pb2.SessionResponse()
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
            + sum(len(each.request_ids) for each in frame.published_arrays)
        )
