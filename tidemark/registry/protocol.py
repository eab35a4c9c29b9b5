"""Values and timers that members and registries exchange, and the protocol of a registry.

Independent of implementations, and of kinds of members.
"""

from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

VERSION_MAX: Final = 2**52
"""Versions above it are garbage: scripts of a registry compute with doubles."""


@dataclass(frozen=True, slots=True)
class Timers:
    """How often members beat, and how long they wait before they act."""

    beat_ms: int = 500
    time_to_live_ms: int = 3_000
    """A member without a beat for this long is gone. It exceeds the longest stall of a process."""
    suspect_ms: int = 300
    """How late the next beat of a suspected member may be."""
    first_wait_ms: int = 500
    """How long the first assignment of a cluster waits for members that start at the same time."""
    stable_ms: int = 5_000
    """How long members must not change before partitions are moved for balance."""
    move_ms: int = 250
    """The shortest time between two moves for balance."""
    leave_ms: int = 3_000
    """How long a leaving member waits until others hold its partitions."""
    answer_ms: int = 1_000
    """How long a call to the registry may take: a beat is repeated well within the time to live."""
    listen_ms: int = 2_000
    """Silence after which a registry must prove that the connection of a listener is alive."""


@dataclass(frozen=True, slots=True)
class Member:
    """A process, and the address at which clients and other members reach it."""

    member_id: str
    address: str
    incarnation: int
    """Differs in every process of the same id."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which member is to hold each partition. A version names one assignment; versions grow."""

    version: int = 0
    holders: Mapping[int, str] = field(default_factory=dict)
    """The member id for each partition; a partition that was never assigned is missing."""
    pinned: frozenset[int] = frozenset()
    """Partitions that an operator has moved: they are not moved again for balance."""


@dataclass(frozen=True, slots=True)
class View:
    """The members and the assignment, as seen by one member."""

    members: Mapping[str, Member] = field(default_factory=dict)
    assignment: Assignment = Assignment()
    draining: frozenset[str] = frozenset()
    """Members that are to hold no partitions, because they leave or an operator drains them."""
    seen_version: int = 0
    """The highest version that any member has reported."""
    settled: bool = False
    """Whether the registry has answered for a whole time to live, so that a member that is missing
    is gone, and not only late to report to a registry that was away or was flushed."""
    held: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """The partitions that members have reported to be open, by member; those without are missing.
    Only members whose partitions must be closed before another one opens them report any."""

    def holder(self, partition: int) -> Member | None:
        """The member that is to hold the partition; None if it is not known."""
        return self.members.get(self.assignment.holders.get(partition, ""))

    def partitions_of(self, member_id: str) -> frozenset[int]:
        """The partitions that are assigned to the member."""
        holders = self.assignment.holders
        return frozenset(number for number, holder in holders.items() if holder == member_id)

    def is_held_by_others(self, partition: int, member_id: str) -> bool:
        """Whether another member that is alive has reported to have the partition open."""
        return any(
            partition in held and other != member_id and other in self.members
            for other, held in self.held.items()
        )


class Registry(Protocol):
    """Where members find each other. Every method may raise RegistryUnavailable."""

    async def beat(self, member: Member, seen_version: int, held: Collection[int] = ()) -> View:
        """Join, or stay alive, report the open partitions, and get the present view.

        Raises MemberReplaced if a later process with the same id has joined.
        """
        ...

    async def look(self) -> View:
        """The present view, for a process that is no member. Changes nothing."""
        ...

    async def leave(self, member: Member) -> None:
        """Remove the member now, unless a later process with the same id has joined."""
        ...

    async def suspect(self, member_id: str, incarnation: int) -> None:
        """The member seems dead: it is gone unless its next beat comes soon."""
        ...

    async def drain(self, member_id: str, incarnation: int) -> bool:
        """Let the member hold no partitions until it starts again; False if it is not alive."""
        ...

    async def assign(self, assignment: Assignment, expected_version: int) -> bool:
        """Compare and set; False if the stored version is another one, or a newer one was seen."""
        ...

    def changes(self) -> AsyncIterator[None]:
        """Yields once it listens, and then whenever a member has changed something."""
        ...
