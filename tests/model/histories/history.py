"""A recorded history of exclusive queues: requests of clients, their answers, and faults.

Values only. The position of an event in the history is when it was known; `began` is the position
at which it was asked for. So an event at position 7 was over before anything with `began` 8 was
asked, whatever the clocks say. All of it is one group.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeAlias


class Outcome(Enum):
    """What a client was told about a settlement."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    UNKNOWN = "unknown"


class By(Enum):
    """By what a client became, or remained, the owner."""

    SUBSCRIBED = "subscribed"
    CONFIRMED = "confirmed"


@dataclass(frozen=True, slots=True)
class Published:
    """A message was answered with success. Its number is its own in the whole history."""

    at_ms: int
    queue: str
    message: int


@dataclass(frozen=True, slots=True)
class Owned:
    """A client got the answer that it owns a queue, and under which epoch."""

    at_ms: int
    began: int
    client: str
    queue: str
    epoch: int
    by: By
    waits: bool = False
    """Whether it takes messages as soon as they come."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """A client got one message."""

    at_ms: int
    client: str
    stream: int
    """The connection it came on; what comes on one keeps its order."""
    queue: str
    message: int
    offset: int
    epoch: int
    delivery_count: int
    began: int | None = None
    """When it was asked for; None on a session, where no client asks."""
    since: int = 0
    """When its connection was asked for: nothing of it was on its way before."""


@dataclass(frozen=True, slots=True)
class Settled:
    """A client settled one message, as it was delivered under that epoch."""

    at_ms: int
    began: int
    client: str
    queue: str
    message: int
    epoch: int
    delivery_count: int
    acked: bool
    outcome: Outcome


ASKS: Final = "asks"
"""A client asks to become the owner: that disturbs all others who own the queue."""


LOST: Final = "data is lost"
"""A partition has reported that commits are gone which it had answered: an operator knows. What was
answered until then may be undone."""


@dataclass(frozen=True, slots=True)
class Disturbed:
    """Something that may delay messages: a fault, or what a client does to itself or to others."""

    at_ms: int
    what: str
    client: str = ""
    """Whose doing it is, and who is disturbed by it, unless it is `ASKS`; "" for a fault."""
    queue: str = ""
    """Which queue it concerns; "" for all."""


Event: TypeAlias = Published | Owned | Delivered | Settled | Disturbed


@dataclass(slots=True)
class History:
    """Events in the order in which they were known."""

    events: list[Event] = field(default_factory=list)

    @property
    def now(self) -> int:
        """The position of the next event: `began` of what is asked now."""
        return len(self.events)

    def add(self, event: Event) -> None:
        self.events.append(event)

    def __str__(self) -> str:
        return "\n".join(f"{at:5} {event}" for at, event in enumerate(self.events))
