"""Groups and queues, as operators and clients change them."""

from enum import Enum
from typing import NamedTuple


class StartAt(Enum):
    """From where a group is to go on."""

    EARLIEST = "earliest"
    LATEST = "latest"
    LAST = "last"
    OFFSET = "offset"


class Start(NamedTuple):
    """A start position; `number` belongs to LAST and OFFSET."""

    at: StartAt
    number: int = 0


class PlaceGroup(NamedTuple):
    """Create a group, or move its progress; without a start it keeps what it has."""

    lmq_name: str
    group: str
    start: Start | None = None
    owner_epoch: int = 0


class GroupPlaced(NamedTuple):
    """The group is there."""

    cursor: int
    created: bool
    revoked: tuple[int, ...] = ()


class RemoveGroup(NamedTuple):
    """Delete a group of a queue."""

    lmq_name: str
    group: str


class RemoveQueue(NamedTuple):
    """Delete a queue with everything in it."""

    lmq_name: str
    expected_queue_id: int = 0
    only_empty: bool = False


class Purge(NamedTuple):
    """Delete the messages of a queue that no live reservation holds."""

    lmq_name: str


class Unschedule(NamedTuple):
    """Forget a scheduled run that is not yet due."""

    lmq_name: str
    schedule_id: int


class Redrive(NamedTuple):
    """Bring dead letters of a queue back to where they came from, or count them."""

    lmq_name: str
    reason: str = ""
    source_lmq_name: str = ""
    after_ms: int = 0
    before_ms: int = 0
    limit: int = 0
    dry_run: bool = False
    page_token: bytes = b""


class Removed(NamedTuple):
    """What was deleted."""

    messages: int
    body_bytes: int = 0
    skipped: int = 0
    next_token: bytes = b""
