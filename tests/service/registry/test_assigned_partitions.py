"""When a storage node opens what is assigned to it, and when it waits for another one (S9).

Time is moved by hand. The node has partitions that only note that they are open: those of a store
are in `tests/service/nodes/test_shared_store.py`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

from storage_svc.placement.assigned import HANDOVER_MS_MAX, AssignedPartitions
from storage_svc.placement.clock_check import ClockCheck
from tests.support.local_broker import until
from tests.support.valkey import Members
from tidemark.clock import ManualClock
from tidemark.registry.protocol import Assignment, Member

A = Member("a:1", "a:1", 11)
B = Member("b:1", "b:1", 12)


class Node:
    """The partitions of one node."""

    def __init__(self) -> None:
        self.held: dict[int, Callable[[int], None]] = {}
        self.opened: list[int] = []

    async def open(self, numbers: Collection[int], on_taken_over: Callable[[int], None]) -> None:
        self.held.update(dict.fromkeys(numbers, on_taken_over))
        self.opened += numbers

    async def leave(self, partition: int) -> None:
        del self.held[partition]


@asynccontextmanager
async def following(
    cluster: Members, clock: ManualClock, node: Node
) -> AsyncIterator[AssignedPartitions]:
    """Node A follows; it proposes nothing for balance before the clock moves."""

    async def time_ms() -> int:
        return clock.wall_ms()

    assigned = AssignedPartitions(cluster.membership(A, partitions=2), node, node.held, clock)
    running = asyncio.create_task(assigned.run(ClockCheck(time_ms, clock)))
    try:
        yield assigned
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_node_opens_a_partition_once_the_other_one_has_closed_it(
    cluster: Members, clock: ManualClock
) -> None:
    """S9: the other one reports that, and no call is needed."""
    registry, node = cluster.registry(), Node()
    await registry.beat(B, 0, {0})
    await registry.assign(Assignment(1, {0: A.member_id, 1: A.member_id}), 0)

    async with following(cluster, clock, node):
        await until(lambda: is_open(node, 1))
        assert node.opened == [1]

        await registry.beat(B, 0, ())
        await until(lambda: is_open(node, 0))

    assert clock.monotonic_ms() == 0


async def test_a_node_does_not_wait_for_long_for_one_that_hangs(
    cluster: Members, clock: ManualClock
) -> None:
    """S9: opening it fences the other one."""
    registry, node = cluster.registry(), Node()
    await registry.beat(B, 0, {0})
    await registry.assign(Assignment(1, {0: A.member_id, 1: A.member_id}), 0)

    async with following(cluster, clock, node):
        await until(lambda: is_open(node, 1))
        await clock.advance_ms(HANDOVER_MS_MAX - 1)
        assert node.opened == [1]

        await clock.advance_ms(1)
        await until(lambda: is_open(node, 0))


async def test_a_deposed_node_opens_a_partition_again_only_under_a_newer_version(
    cluster: Members, clock: ManualClock
) -> None:
    """S9: nodes do not take a partition from each other in turns; the node asks for that version,
    because the registry still names it."""
    registry, node = cluster.registry(), Node()
    await registry.assign(Assignment(5, {0: A.member_id, 1: A.member_id}), 0)
    async with following(cluster, clock, node) as assigned:
        await until(lambda: is_open(node, 0))
        await until(lambda: is_open(node, 1))

        node.held[0](0)
        await until(lambda: has_opened(node, 3))

        assert sorted(node.opened) == [0, 0, 1]
        version = assigned.view.assignment.version
        assert version > 5

        await registry.beat(B, 0)
        await registry.assign(Assignment(version + 1, {0: B.member_id, 1: A.member_id}), version)
        await until(lambda: is_closed(node, 0))
        assert sorted(node.opened) == [0, 0, 1]


async def is_open(node: Node, partition: int) -> bool:
    return partition in node.held


async def is_closed(node: Node, partition: int) -> bool:
    return partition not in node.held


async def has_opened(node: Node, count: int) -> bool:
    return len(node.opened) >= count
