"""Loading and unloading queues."""

from enum import Enum
from typing import NamedTuple


class Materialize(NamedTuple):
    """Load a queue; whoever asks tracks it, and will ask to unload it."""

    lmq_name: str
    create: bool = False


class Materialized(NamedTuple):
    """The queue is loaded."""

    queue_id: int
    activity_stamp: int
    was_cold: bool
    created: bool


class Unmaterialize(NamedTuple):
    """Unload a queue that nobody uses. A stamp of 0 stands for whatever it is."""

    lmq_name: str
    expected_activity_stamp: int = 0


class Eviction(Enum):
    """Storage's answer to `Unmaterialize` (I4)."""

    EVICTED = "EVICTED"
    NOT_PRESENT = "NOT_PRESENT"
    NOT_MATERIALIZED = "NOT_MATERIALIZED"
    HAS_INFLIGHT = "HAS_INFLIGHT"
    RACE_LOST = "RACE_LOST"


class KeepHouse(NamedTuple):
    """Unload queues that no broker tracks, forget producers that are gone."""
