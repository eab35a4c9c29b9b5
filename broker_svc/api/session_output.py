"""Output of a session: everything to send to one client, gathered into frames.

Owns the unsent output and the room that deliveries may take while the client reads slowly.
"""

import asyncio
from collections.abc import Sequence
from itertools import chain
from typing import Final

from broker_svc.consume.consumer import HandedOut, Room
from broker_svc.publish.publishers import Publisher
from broker_svc.publish.run_arrays import Run
from tidemark.api.broker.v1 import broker_pb2, message_pb2

UNSENT_BYTES_MAX: Final = 4 * 1024 * 1024
"""Deliveries that a session may have reserved and not sent."""

DELIVERY_OVERHEAD_BYTES: Final = 256
"""The cost of a delivery in addition to its bytes: many small ones add up."""

ARRAY_DELIVERIES_MAX: Final = 1000
"""Deliveries in one array: a standing reserve hands out 4 KiB at once, so it fits a frame."""


_RESULTS: Final = frozenset(
    {
        "published",
        "settled",
        "errors",
        "publishers",
        "synced",
        "unsubscribed",
        "ended",
        "hand_outs",
        "renewed",
        "acked",
    }
)
"""Fields of a frame with results and notices."""


class SessionOutput:
    """The next frame to one client."""

    def __init__(self) -> None:
        self.frame = broker_pb2.SessionResponse()
        self.wakeup = asyncio.Event()
        """Set when there is something to send, or when the session may have ended."""
        self.room = Room(UNSENT_BYTES_MAX)
        self._unsent_bytes = 0
        self._stored_runs: list[Run] = []
        self._stored_places: list[int] = []
        self._publishers: list[Publisher] = []
        """What receipts are made of, with two numbers for the place of each run. Partitions add
        theirs one after another, and most have few: receipts are made once for all."""
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
        runs: Sequence[Run],
        places: Sequence[int],
        publishers: Sequence[Publisher],
    ) -> None:
        """Receipts of runs that came in columns: `places` has the queue id and the first offset of
        each. They share one part of the frame."""
        if 2 * len(runs) != len(places):
            raise ValueError("not as many results as runs")
        if not self._stored_runs:  # else it is set already
            self.wakeup.set()
        self._stored_runs += runs
        self._stored_places += places
        self._publishers += publishers

    def take(self) -> tuple[broker_pb2.SessionResponse, int]:
        """The gathered output, and the bytes of room that it takes until it is sent."""
        frame, self.frame, self._array = self.frame, broker_pb2.SessionResponse(), None
        if self._stored_runs:
            places = self._stored_places
            request_ids = [request_id for _, _, (request_id, _, _, _) in self._stored_runs]
            publisher_ids = [each.publisher_id for each in self._publishers]
            receipts = zip(request_ids, places[::2], places[1::2], publisher_ids, strict=True)
            frame.published_arrays.add(receipts=chain.from_iterable(receipts))
            self._stored_runs, self._stored_places, self._publishers = [], [], []
        unsent_bytes, self._unsent_bytes = self._unsent_bytes, 0
        return frame, unsent_bytes

    @property
    def results(self) -> int:
        """How many results and notices wait to be sent."""
        results = len(self._stored_runs)
        for field, part in self.frame.ListFields():
            if field.name in _RESULTS:
                results += len(part)
        return results
