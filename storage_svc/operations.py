"""What can be asked of a partition's writer, and what it answers: plain values, no protos.

An operation that fails is answered with the error itself in place of its result, so that one bad
operation never spoils the frame it came in.
"""

from dataclasses import dataclass

from tidemark.errors import TidemarkError


@dataclass(frozen=True, slots=True)
class Append:
    """Store a run at the end of its queue, which is created if it does not exist."""

    lmq_name: str
    count: int
    body: bytes
    fairness_key: str = ""
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Appended:
    """The run is on disk."""

    queue_id: int
    first_offset: int


@dataclass(frozen=True, slots=True)
class Reserve:
    """Hand out messages of one queue to one group."""

    lmq_name: str
    group: str
    max_messages: int


@dataclass(frozen=True, slots=True)
class Slice:
    """A run, or a part of one, that is reserved."""

    reservation_id: int
    receipt: bytes
    queue_id: int
    first_offset: int
    count: int
    body: bytes
    publish_time_ms: int
    fairness_key: str
    traceparent: str


@dataclass(frozen=True, slots=True)
class Reserved:
    """What was handed out; may be nothing."""

    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True)
class Ack:
    """The messages of a reservation are done."""

    receipt: bytes


@dataclass(frozen=True, slots=True)
class Settled:
    """The settlement is on disk."""

    messages: int


Operation = Append | Reserve | Ack
Result = Appended | Reserved | Settled | TidemarkError
