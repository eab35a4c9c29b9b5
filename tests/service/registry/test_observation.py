"""Members of a kind, as a process sees them that is none of them (S9)."""

import asyncio

from tests.support.valkey import Members
from tidemark.clock import ManualClock
from tidemark.registry.observation import Observation
from tidemark.registry.protocol import Assignment, Member

A = Member("a", "host-a:7410", 11)
B = Member("b", "host-b:7410", 12)
ENDS_A_HANG_S = 60


async def test_a_suspected_member_is_gone_without_another_beat(
    cluster: Members, clock: ManualClock
) -> None:
    """S9: a broker whose exchange broke; a process at another address is not a member."""
    registry = cluster.registry()
    await registry.beat(A, 0)
    await registry.beat(B, 0)
    await cluster.settle()
    observation = Observation(cluster.registry(), clock)
    await observation.run_once()

    observation.suspect(B.address)
    observation.suspect("elsewhere:1")
    await observation.run_once()
    suspected = await cluster.redis.hkeys(cluster.key("suspected"))
    await cluster.redis.hset(cluster.key("suspected"), "b", 1)
    await observation.run_once()

    assert suspected == [b"b"]
    assert observation.view.members == {"a": A}
    assert observation.changed.is_set()


async def test_a_view_does_not_go_back_when_the_registry_is_flushed(
    cluster: Members, clock: ManualClock
) -> None:
    """S9: members are late to report, and their assignment is brought back by them."""
    registry = cluster.registry()
    await registry.beat(A, 0)
    await registry.assign(Assignment(3, {0: "a"}), 0)
    observation = Observation(cluster.registry(), clock)
    await observation.run_once()

    for name in ("members", "assignment", "progress"):
        await cluster.redis.delete(cluster.key(name))
    await registry.beat(B, 0)
    await observation.run_once()

    assert observation.view.members == {"a": A, "b": B}
    assert observation.view.assignment.version == 3


async def test_a_change_is_seen_at_once(cluster: Members, clock: ManualClock) -> None:
    """S9: without the clock moving."""
    registry = cluster.registry()
    observation = Observation(cluster.registry(), clock)
    running = asyncio.create_task(observation.run())
    try:
        async with asyncio.timeout(ENDS_A_HANG_S):
            while observation.view.members != {"a": A}:
                await registry.beat(A, 0)
                await observation.changed.wait()
                observation.changed.clear()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
