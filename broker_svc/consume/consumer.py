"""Consumers and the feeds they draw from: the state of each, and the room of a connection.

Only values; the `dispatcher` decides which consumer gets what.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from broker_svc.consume.hand_outs import HandOuts
from broker_svc.idle.activity_leases import Lease
from broker_svc.idle.tracking import TrackedQueue
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.errors import TidemarkError

if TYPE_CHECKING:
    from broker_svc.consume.standing import StandingReserve

FeedKey = tuple[int, str, str]
"""Partition, lmq_name, group."""

RESERVE_BYTES_MAX: Final = 1024 * 1024
RESERVE_BYTES_MIN: Final = 16 * 1024
"""Bytes of the first reserve of a feed: many of them fit the room of a connection."""

MANY_FEEDS: Final = 256
"""So many first reserves fit the room of a connection, which is 4 MiB."""

MANY_FEEDS_RESERVE_BYTES: Final = 1024
"""Bytes of the first reserve of each further feed of a consumer. All of them are asked for at once,
or nearly: the last would otherwise reserve after many round trips, and messages that are published
meanwhile find nothing that stands."""

LIKELY_MESSAGE_BYTES: Final = 64
"""How many messages a reserve asks for follows from the bytes: it holds credit for each of them."""

Slices = Sequence[exchange_pb2.ReservedSlice]
Refuse = Callable[[TidemarkError], None]
Deliver = Callable[["Consumer", "Feed", Slices], None]


class HandedOut(NamedTuple):
    """A plain slice that a standing reserve has handed out, as it comes from the columns."""

    feed: "Feed"
    reservation_id: int
    receipt: bytes
    first_offset: int
    messages: int
    body: bytes
    visibility_ms: int
    publish_time_ms: int
    owner_epoch: int


DeliverMany = Callable[["Consumer", Sequence[HandedOut]], None]


class Room:
    """Bytes that a connection can still take. Unsent deliveries and pending reserves both count."""

    __slots__ = ("bytes_max", "pending_bytes", "standing", "taken_bytes", "waiting")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.taken_bytes = 0
        self.pending_bytes = 0
        """How much of that pending reserves take: they bring less, as a rule."""
        self.standing = 0
        """Standing reserves of the connection."""
        self.waiting: dict[Consumer, None] = {}
        """Consumers of the connection with credit and ready feeds, for which there was no room."""

    @property
    def left_bytes(self) -> int:
        """Bytes that may still be reserved; at 0, the client must read its deliveries first."""
        return self.bytes_max - self.taken_bytes

    @property
    def is_unread(self) -> bool:
        """Whether unsent deliveries alone take all of it."""
        return self.taken_bytes - self.pending_bytes >= self.bytes_max


class Feed:
    """One queue of one group in one partition, as its consumers see it."""

    __slots__ = (
        "consumers",
        "group",
        "key",
        "lmq_name",
        "owner_epoch",
        "partition",
        "paused",
        "queue",
        "ready",
        "removed",
        "reserve_bytes",
        "standing",
        "wakeups",
    )

    def __init__(self, queue: TrackedQueue, group: str) -> None:
        self.queue = queue
        self.partition = queue.partition
        self.lmq_name = queue.lmq_name
        self.group = group
        self.key: FeedKey = (queue.partition, queue.lmq_name, group)
        self.removed = False
        """Whether its last consumer has left it; the next one gets another feed."""
        self.consumers: deque[Consumer] = deque()
        self.ready = True
        """Whether a reserve may find something."""
        self.reserve_bytes = RESERVE_BYTES_MIN
        """Bytes of the next reserve: few, until the queue has returned more."""
        self.standing: StandingReserve | None = None
        """The reserve that stands in storage for its only consumer."""
        self.wakeups = 0
        """Counts reasons to ask again: an answer computed before one must not undo it."""
        self.owner_epoch = 0
        """Stamped on every reserve of an exclusive queue; 0 on a shared one."""
        self.paused = False
        """Whether ownership is being transferred: nothing is delivered in the meantime."""

    def next_consumers(self, offered: "Mapping[Consumer, int]") -> "Iterable[Consumer]":
        """The consumers that get ready messages: the next with credit and room, or all if none has.

        `offered` counts the feeds that each consumer was offered before."""
        for _ in range(len(self.consumers)):
            consumer = self.consumers[0]
            self.consumers.rotate(-1)
            has_credit = consumer.credit > offered.get(consumer, 0)
            if has_credit and consumer.wants_more and consumer.room.left_bytes > 0:
                return (consumer,)
        return self.consumers

    def learn(self, body_bytes: int, *, more: bool) -> None:
        """Adapt the next reserve to what the last one returned."""
        if self.reserve_bytes < RESERVE_BYTES_MIN:
            self.reserve_bytes = RESERVE_BYTES_MIN  # what it has may be larger than the few bytes
            return
        wanted_bytes = RESERVE_BYTES_MAX if more else max(2 * body_bytes, self.reserve_bytes // 2)
        self.reserve_bytes = min(max(wanted_bytes, RESERVE_BYTES_MIN), RESERVE_BYTES_MAX)


class Consumer:
    """A consumer of one group: its credit, and the feeds it draws from."""

    def __init__(
        self,
        consumer_id: int,
        group: str,
        visibility_ms: int,
        deliver: Deliver,
        refuse: Refuse,
        room: Room,
        hand_outs: HandOuts | None = None,
        *,
        may_stand: bool = True,
        deliver_many: DeliverMany | None = None,
        on_moved: Callable[[], None] | None = None,
    ) -> None:
        self.consumer_id = consumer_id
        self.group = group
        self.visibility_ms = visibility_ms
        self.hand_outs = hand_outs
        """None: the client does not report them, so everything that it receives counts as given."""
        self.may_stand = may_stand
        """Whether its reserves may stand in storage: not for a consumer that takes one answer."""
        self.unanswered: dict[FeedKey, TidemarkError] = {}
        """Of a consumer that takes one answer: feeds whose state is not known, and why: their last
        reserve has failed, or their partition was not connected."""
        self.on_moved = on_moved
        """Called when a partition of one of its queues has left this broker."""
        self.credit = 0
        self.standing_credit = 0
        """Credit that standing reserves hold."""
        self.standing: dict[StandingReserve, None] = {}
        """Those of them that are not recalled."""
        self.feeds = 0
        """How many feeds it draws from."""
        self.closed = False
        self.stopped = False
        """Whether its client has stopped deliveries for now, whatever credit is left."""
        self.leases: dict[str, Lease] = {}
        """The activity lease of each subscribed queue."""
        self.ready_feeds: OrderedDict[FeedKey, Feed] = OrderedDict()
        self.deliver = deliver
        self.deliver_many = deliver_many
        """None: its client takes single deliveries only."""
        self.refuse = refuse
        """Called with the reason if its group is refused for good."""
        self.room = room
        self.reserving = 0
        self.quiet = asyncio.Event()
        """Set while no reserve is in flight."""
        self.quiet.set()

    @property
    def wants_more(self) -> bool:
        return self.credit > 0 and not self.stopped
