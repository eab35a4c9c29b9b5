"""Standing reserves: consumers that wait for messages of a queue, known to storage.

A reserve that finds nothing stands in storage: what becomes ready later is handed out in the commit
that makes it ready, without another operation. It holds credit of its consumer while it stands, so
it is small, and it is recalled when the credit is needed elsewhere (ADR 21). Owns who may wait in
this way and the credit that is held; the `dispatcher` sends the reserves and delivers.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from broker_svc.consume.consumer import Consumer, Feed
from broker_svc.links.partition_link import PartitionLink
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.errors import TidemarkError
from tidemark.limits import SUBSCRIPTIONS_PER_SESSION_MAX

STANDING_MESSAGES_MAX: Final = 64
"""Messages that one standing reserve hands out before it is renewed."""

STANDING_BYTES: Final = 4 * 1024
"""Bytes that one commit hands out to it; a frame that carries more has its own reserve."""

LARGE_PER_CONNECTION_MAX: Final = 2048
"""Standing reserves of a connection with so many bytes."""

SMALL_STANDING_BYTES: Final = 512
"""Bytes of each one beyond that: of many queues, most get one small message at a time."""

STANDING_PER_CONNECTION_MAX: Final = SUBSCRIPTIONS_PER_SESSION_MAX
"""One for each subscription. Bounds what may arrive at once for a connection that is not read: 12
MiB."""


class StandingReserve:
    """One consumer that waits on one feed, from its reserve to the last result."""

    __slots__ = (
        "allotted",
        "bytes_max",
        "coming_messages",
        "consumer",
        "feed",
        "left_messages",
        "recalled",
        "standing_id",
    )

    def __init__(
        self, standing_id: int, consumer: Consumer, feed: Feed, allotted: int, bytes_max: int
    ) -> None:
        self.standing_id = standing_id
        self.consumer = consumer
        self.feed = feed
        self.allotted = allotted
        """Messages that it may hand out, as storage knows it."""
        self.bytes_max = bytes_max
        """Bytes that one commit hands out to it."""
        self.left_messages = 0
        """How many of them are left while it stands, which is the credit that it holds."""
        self.coming_messages = 0
        """Messages that are on the way to storage and will be handed out to it."""
        self.recalled = False

    def write_to(self, reserve: exchange_pb2.Reserve) -> None:
        """Ask for it with a reserve."""
        reserve.standing_id = self.standing_id
        reserve.standing_messages = self.allotted
        reserve.standing_bytes = self.bytes_max

    def cover(self, messages: int, body_bytes: int) -> bool:
        """Whether it will hand out messages that leave with the next frame."""
        coming = self.coming_messages + messages
        if self.recalled or coming > self.left_messages or body_bytes > self.bytes_max:
            return False
        self.coming_messages = coming
        return True


class StandingReserves:
    """All standing reserves of a broker, by their ids."""

    def __init__(
        self, links: Mapping[int, PartitionLink], credit_freed: Callable[[Consumer], None]
    ) -> None:
        """`credit_freed` is called when credit comes back without a last result."""
        self._links = links
        self._credit_freed = credit_freed
        self._by_id: dict[int, StandingReserve] = {}
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, partition: int, standing_id: int) -> StandingReserve | None:
        """The one that a partition names; None if it has none of that id."""
        standing = self._by_id.get(standing_id)
        return None if standing is None or standing.feed.partition != partition else standing

    def propose(self, consumer: Consumer, feed: Feed, messages: int) -> StandingReserve | None:
        """Let the next reserve of a consumer stand; None if it must not.

        Several consumers of a feed take turns, which the broker decides. A consumer with little
        credit for its feeds has none to set aside.
        """
        room = consumer.room
        if (
            not consumer.may_stand
            or len(feed.consumers) != 1
            or room.standing >= STANDING_PER_CONNECTION_MAX
        ):
            return None
        share = (consumer.credit + consumer.standing_credit) // (2 * consumer.feeds)
        allotted = min(STANDING_MESSAGES_MAX, messages, share)
        if allotted <= 0:
            return None
        self._last_id += 1
        is_large = room.standing < LARGE_PER_CONNECTION_MAX
        bytes_max = STANDING_BYTES if is_large else SMALL_STANDING_BYTES
        standing = StandingReserve(self._last_id, consumer, feed, allotted, bytes_max)
        self._by_id[self._last_id] = standing
        room.standing += 1
        return standing

    def began(self, standing: StandingReserve, left: int) -> None:
        """Storage has it: it keeps this share of the credit that its reserve did not use."""
        standing.left_messages = left
        standing.consumer.credit -= left
        standing.consumer.standing_credit += left
        standing.consumer.standing[standing] = None
        standing.feed.standing = standing

    def used(self, standing: StandingReserve, messages: int) -> None:
        """It has handed out messages."""
        standing.left_messages -= messages
        standing.coming_messages = max(0, standing.coming_messages - messages)
        standing.consumer.standing_credit -= messages

    def end(self, standing: StandingReserve | None) -> None:
        """It stands no longer: its consumer gets the credit back. A second time is harmless."""
        if standing is None or self._by_id.pop(standing.standing_id, None) is None:
            return
        consumer = standing.consumer
        consumer.standing.pop(standing, None)
        consumer.room.standing -= 1
        consumer.credit += standing.left_messages
        consumer.standing_credit -= standing.left_messages
        standing.left_messages = 0
        if standing.feed.standing is standing:
            standing.feed.standing = None

    def recall(self, standing: StandingReserve | None) -> None:
        """End one in storage; its credit comes back with its last result."""
        if standing is None or standing.recalled:
            return
        standing.recalled = True
        standing.consumer.standing.pop(standing, None)
        operation = exchange_pb2.Operation()
        operation.recall.lmq_name = standing.feed.lmq_name
        operation.recall.group = standing.feed.group
        operation.recall.standing_id = standing.standing_id
        link = self._links[standing.feed.partition]
        link.ask(operation, partial(self._recalled, standing))

    def _recalled(
        self, standing: StandingReserve, result: exchange_pb2.OperationResult | TidemarkError
    ) -> None:
        """One that stood gets a last result. One that did not has had it, or its group was left."""
        if isinstance(result, TidemarkError) or result.HasField("error"):
            return  # the link is down, which ends it
        if not result.recall.stood:
            self.end(standing)
            self._credit_freed(standing.consumer)

    def recall_all(self, consumer: Consumer) -> None:
        """Recall those that hold credit of a consumer."""
        for each in list(consumer.standing):
            self.recall(each)

    def of_partition(self, partition: int) -> list[StandingReserve]:
        """Those that storage has; the others are answered with their reserve."""
        return [
            each
            for each in self._by_id.values()
            if each.left_messages and each.feed.partition == partition
        ]
