"""Members that come from settings (S8)."""

import asyncio

import pytest

from tidemark.clock import ManualClock
from tidemark.errors import MembershipStatic
from tidemark.registry.membership import Membership
from tidemark.registry.protocol import Member
from tidemark.registry.static import StaticRegistry

MEMBERS = [Member(f"broker-{number}", f"host:{7400 + number}", number) for number in range(3)]


async def test_static_members_share_the_partitions_in_turn() -> None:
    """S8: every member computes the same from the same settings."""
    membership = Membership(StaticRegistry(MEMBERS[::-1], 4), MEMBERS[1], 4, ManualClock())

    await membership.run_once()

    holders = membership.view.assignment.holders
    assert holders == {0: "broker-0", 1: "broker-1", 2: "broker-2", 3: "broker-0"}
    assert membership.view.assignment.version == 1
    assert membership.view.holder(1) == MEMBERS[1]
    assert membership.view.partitions_of("broker-0") == {0, 3}
    assert membership.changed.is_set()


async def test_static_members_refuse_to_move_or_drain() -> None:
    """S8."""
    membership = Membership(StaticRegistry(MEMBERS, 4), MEMBERS[0], 4, ManualClock())

    with pytest.raises(MembershipStatic):
        await membership.move(0, "broker-1")
    with pytest.raises(MembershipStatic):
        await membership.drain("broker-1")


async def test_a_static_member_leaves_without_handing_over() -> None:
    """S8: its partitions wait for its return."""
    clock = ManualClock()
    membership = Membership(StaticRegistry(MEMBERS, 4), MEMBERS[0], 4, clock)
    running = asyncio.create_task(membership.run())
    await clock.until_sleepers(1)

    await membership.leave()
    await running

    assert membership.view.partitions_of("broker-0") == {0, 3}


def test_without_members_no_partition_is_assigned() -> None:
    """S8: a broker alone has no list."""
    assert StaticRegistry([], 4).view.assignment.holders == {}
