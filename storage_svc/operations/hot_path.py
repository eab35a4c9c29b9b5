"""The hot path: append, reserve, settle, extend, expire."""

from typing import NamedTuple

from storage_svc.queue.reservation import Ending, Span


class Append(NamedTuple):
    """Store a run at the end of its queue, which is created if it does not exist."""

    lmq_name: str
    messages: int
    body: bytes
    fairness_key: str = ""
    delay_ms: int = 0
    ttl_ms: int = 0
    traceparent: str = ""
    producer_id: str = ""
    sequence: int = 0
    topic_version: int = 0


class Appended(NamedTuple):
    """The run is on disk."""

    queue_id: int
    first_offset: int
    schedule_id: int = 0
    duplicate: bool = False


class Reserve(NamedTuple):
    """Hand out messages of one queue to one group, which is created if it does not exist."""

    lmq_name: str
    group: str
    messages_max: int
    bytes_max: int = 4 * 1024 * 1024
    visibility_ms: int = 0  # 0: the topic's
    session_id: int = 0
    owner_epoch: int = 0
    strict_bytes: bool = False  # whether a first message beyond the bytes stays where it is


class ReservedSlice(NamedTuple):
    """A run, or a part of one, that is reserved."""

    reservation_id: int
    receipt: bytes
    queue_id: int
    first_offset: int
    messages: int
    body: bytes
    attempt_count: int
    delivery_count: int
    owner_epoch: int
    visibility_ms: int
    publish_time_ms: int
    fairness_key: str
    traceparent: str


class Reserved(NamedTuple):
    """What was handed out; may be nothing."""

    slices: tuple[ReservedSlice, ...]
    more: bool = False


class Settle(NamedTuple):
    """End messages of a reservation; all that are open, if no ranges are given."""

    receipt: bytes
    ending: Ending
    index_ranges: tuple[Span, ...] = ()
    delay_ms: int = 0
    detail: str = ""
    owner_epoch: int = 0


class Extend(NamedTuple):
    """Give a reservation more time, from now; 0 stands for the topic's visibility timeout."""

    receipt: bytes
    visibility_ms: int = 0
    owner_epoch: int = 0


class Settled(NamedTuple):
    """The settlement or extension is on disk."""

    messages: int
    open_messages: int
    """Messages of the reservation that are left."""
    visibility_ms: int = 0


class ExpireDue(NamedTuple):
    """Expire reservations and end delays that are due by partition time, up to a limit."""

    limit: int = 1000


class Expired(NamedTuple):
    """What was due, in messages."""

    messages: int
