"""The partition itself: who owns it, and which topics it knows."""

from collections.abc import Mapping
from typing import NamedTuple

from storage_svc.partition.counters import Claim
from tidemark.topics import Topic


class ClaimPartition(NamedTuple):
    """Make a broker the owner, under a broker epoch that was never used before."""

    claim: Claim
    held_epoch: int = 0  # of the caller's last claim; 0 for its first


class Claimed(NamedTuple):
    """The claim is durable."""

    broker_epoch: int
    same_incarnation: bool


class ReleaseUnreported(NamedTuple):
    """Release what the owner's incarnation holds and did not report: its answers were lost."""

    held: Mapping[int, int]
    """The reservations of the report, each with its queue."""


class Reported(NamedTuple):
    """The report was taken."""

    released: int
    gone: tuple[int, ...]
    """Reservations of the report that expired, or are not known any more."""


class PutTopic(NamedTuple):
    """Create or change a topic in its home partition."""

    topic: Topic
    create: bool
    expected_version: int = 0


class DropTopic(NamedTuple):
    """Delete a topic in its home partition."""

    name: str


class ApplyTopic(NamedTuple):
    """Bring a version of a topic from its home to this partition."""

    topic: Topic
    deleted: bool = False


class TopicStored(NamedTuple):
    """The topic as this partition has it; None if it is deleted."""

    topic: Topic | None
    version: int
