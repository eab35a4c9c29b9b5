"""The static registry: members come from settings, and are never judged dead.

Every member computes the same assignment from the same settings, so that no two of them claim one
partition. There is no failover: the partitions of a member that is gone wait for it.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence

from tidemark.errors import MembershipStatic
from tidemark.registry.protocol import Assignment, Member, View

_REFUSAL = "members come from settings, and each keeps its partitions"


def in_turn(partitions: int, member_ids: Sequence[str]) -> dict[int, str]:
    """The holder of each partition: loads differ by at most one. None without members."""
    ordered = sorted(member_ids)
    return {number: ordered[number % len(ordered)] for number in range(partitions) if ordered}


class StaticRegistry:
    """Always the same view, of version 1."""

    def __init__(self, members: Sequence[Member], partitions: int) -> None:
        by_id = {each.member_id: each for each in members}
        self.view = View(by_id, Assignment(1, in_turn(partitions, list(by_id))), settled=True)

    async def beat(self, member: Member, seen_version: int, held: Collection[int] = ()) -> View:
        return self.view

    async def look(self) -> View:
        return self.view

    async def leave(self, member: Member) -> None:
        """A member that stops keeps its partitions, for its return."""

    async def suspect(self, member_id: str, incarnation: int) -> None:
        """No member is judged."""

    async def drain(self, member_id: str, incarnation: int) -> bool:
        raise MembershipStatic(_REFUSAL)

    async def assign(self, assignment: Assignment, expected_version: int) -> bool:
        raise MembershipStatic(_REFUSAL)

    async def changes(self) -> AsyncIterator[None]:
        yield
        await asyncio.Event().wait()  # nothing ever changes
