"""Members that share partitions through Valkey: failover, balance, leaving, and a lost registry.

Time is moved by hand, except for that of the server, whose rows the tests change instead (S8).
"""

import asyncio
from collections import Counter

import pytest

from tests.support.valkey import Members
from tidemark.clock import ManualClock
from tidemark.errors import InvalidArgument, MemberReplaced, RegistryUnavailable
from tidemark.registry.membership import Membership
from tidemark.registry.protocol import Member

A = Member("a", "host-a:7400", 11)
B = Member("b", "host-b:7400", 12)
C = Member("c", "host-c:7400", 13)
STABLE_MS = 5_000
ENDS_A_HANG_S = 60


def holders(membership: Membership) -> dict[int, str]:
    return dict(membership.view.assignment.holders)


def loads(membership: Membership) -> dict[str, int]:
    return dict(Counter(holders(membership).values()))


async def started(cluster: Members, clock: ManualClock, *joining: Member) -> tuple[Membership, ...]:
    """Members that have shared the partitions among themselves."""
    memberships = tuple(cluster.membership(each) for each in joining)
    for each in memberships:
        await each.run_once()
    await cluster.settle()
    await clock.advance_ms(500)
    for each in memberships * 2:
        await each.run_once()
    return memberships


async def test_members_that_start_together_share_the_partitions_from_the_beginning(
    cluster: Members, clock: ManualClock
) -> None:
    """S8: the first assignment waits for one beat."""
    a = cluster.membership(A)
    await a.run_once()
    assert holders(a) == {}
    assert a.problem == ""

    b = cluster.membership(B)
    await b.run_once()
    await clock.advance_ms(500)
    await a.run_once()
    await b.run_once()

    assert loads(a) == {"a": 3, "b": 3}
    assert holders(b) == holders(a)
    assert b.view.assignment.version == 1
    assert b.changed.is_set()


async def test_the_partitions_of_a_dead_member_move_at_once_and_no_others(
    cluster: Members, clock: ManualClock
) -> None:
    """S8."""
    a, b, _ = await started(cluster, clock, A, B, C)
    before = holders(a)

    await cluster.lose("c")
    await a.run_once()
    await b.run_once()

    after = holders(a)
    assert loads(a) == {"a": 3, "b": 3}
    assert {n for n in after if after[n] != before[n]} == {n for n in before if before[n] == "c"}
    assert a.view.assignment == b.view.assignment


async def test_a_member_that_joins_gets_its_share_one_by_one_once_members_are_stable(
    cluster: Members, clock: ManualClock
) -> None:
    """S8: 5 s without a change of members, then one move per 250 ms."""
    (a,) = await started(cluster, clock, A)
    b = cluster.membership(B)
    await b.run_once()
    await a.run_once()
    version = a.view.assignment.version

    await clock.advance_ms(STABLE_MS - 1)
    await a.run_once()
    assert loads(a) == {"a": 6}

    moved = []
    await clock.advance_ms(1)
    for _ in range(6):
        await a.run_once()
        await b.run_once()
        moved.append(loads(b).get("b", 0))
        await clock.advance_ms(125)

    assert moved == [1, 1, 2, 2, 3, 3]
    assert a.view.assignment.version == version + 3


async def test_a_member_that_leaves_hands_its_partitions_over_first(
    cluster: Members, clock: ManualClock
) -> None:
    """S8, S5: it stays a member until others hold its partitions, and takes none meanwhile."""
    a, b = await started(cluster, clock, A, B)
    released = asyncio.Event()

    leaving = asyncio.create_task(b.leave(released.wait))
    await asyncio.wait_for(b_hands_over(b), ENDS_A_HANG_S)
    await a.run_once()
    assert loads(a) == {"a": 6}
    assert a.view.members.keys() == {"a", "b"}
    assert a.view.draining == {"b"}
    released.set()
    await leaving
    await a.run_once()

    assert a.view.members.keys() == {"a"}
    assert await cluster.redis.hkeys(cluster.key("members")) == [b"a"]


async def b_hands_over(b: Membership) -> None:
    while b.view.partitions_of("b"):
        b.changed.clear()
        await b.changed.wait()


async def test_a_leaving_member_waits_briefly_and_the_last_one_not_at_all(
    cluster: Members, clock: ManualClock
) -> None:
    """S8, S5: another member that does not take over holds up no shutdown."""
    a, b = await started(cluster, clock, A, B)
    pending = clock.sleepers

    leaving = asyncio.create_task(b.leave(asyncio.Event().wait))
    async with asyncio.timeout(ENDS_A_HANG_S):
        await clock.until_sleepers(pending + 1)
        await clock.advance_ms(3_000)
        await leaving
        await a.leave(asyncio.Event().wait)

    assert await cluster.redis.hkeys(cluster.key("members")) == []


async def test_a_member_that_has_left_does_not_join_again(
    cluster: Members, clock: ManualClock
) -> None:
    """S8."""
    (a,) = await started(cluster, clock, A)
    running = asyncio.create_task(a.run())

    await a.leave()

    async with asyncio.timeout(ENDS_A_HANG_S):
        await running
    assert await cluster.redis.hkeys(cluster.key("members")) == []


async def test_running_members_follow_a_change_without_polling(
    cluster: Members, clock: ManualClock
) -> None:
    """S8: no time passes here between the handover and its arrival."""
    a, b = await started(cluster, clock, A, B)
    a.changed.clear()
    running = asyncio.create_task(a.run())
    try:
        async with asyncio.timeout(ENDS_A_HANG_S):
            await cluster_listens(cluster, 1)
            await b.leave()
            while loads(a) != {"a": 6}:
                await a.changed.wait()
                a.changed.clear()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def cluster_listens(cluster: Members, listeners: int) -> None:
    """Waits for subscriptions: a notice that comes before them is not received."""
    channel = cluster.key("changes")
    while True:
        if (await cluster.redis.pubsub_numsub(channel))[0][1] >= listeners:
            return


async def test_a_suspected_member_beats_at_once_if_it_is_alive(
    cluster: Members, clock: ManualClock
) -> None:
    """S8: a member that another one cannot reach keeps its partitions."""
    a, b = await started(cluster, clock, A, B)
    running = asyncio.create_task(b.run())
    try:
        async with asyncio.timeout(ENDS_A_HANG_S):
            await cluster_listens(cluster, 1)
            a.suspect("b")
            a.suspect("a")
            a.suspect("unknown")
            await a.run_once()
            suspected = cluster.key("suspected")
            while await cluster.redis.hlen(suspected):
                pass  # until it has beaten
            await a.run_once()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    assert a.view.members.keys() == {"a", "b"}


async def test_a_registry_that_is_away_changes_nothing(
    cluster: Members, clock: ManualClock
) -> None:
    """S8: members keep serving; when it is back, a member that is late is not taken for dead."""
    a, b = await started(cluster, clock, A, B)
    before = a.view
    await cluster.redis.rename(cluster.key("members"), cluster.key("kept"))
    await cluster.redis.set(cluster.key("members"), "away")
    a.changed.clear()

    await a.run_once()
    assert "WRONGTYPE" in a.problem
    assert a.changed.is_set()
    assert a.view == before
    a.suspect("b")
    await a.run_once()
    with pytest.raises(RegistryUnavailable):
        await a.move(0, "b")

    await cluster.redis.rename(cluster.key("kept"), cluster.key("members"))
    await cluster.lose("a")
    await cluster.lose("b")
    await cluster.redis.hset(cluster.key("progress"), "beat_ms", 1)
    await a.run_once()
    assert a.problem == ""
    assert a.view.assignment == before.assignment
    assert a.view.members == before.members
    await b.run_once()
    await cluster.settle()
    await a.run_once()
    assert a.view.assignment == before.assignment


async def test_a_flushed_registry_gets_the_assignment_back_with_a_newer_version(
    cluster: Members, clock: ManualClock
) -> None:
    """S8: no partition moves."""
    a, b = await started(cluster, clock, A, B)
    before = a.view.assignment

    await cluster.redis.flushdb()
    await b.run_once()
    await a.run_once()

    assert holders(a) == holders(b) == before.holders
    assert a.view.assignment.version > before.version
    assert b.view.assignment == a.view.assignment


async def test_a_flushed_registry_with_new_members_only_follows_the_version_of_storage(
    cluster: Members, clock: ManualClock
) -> None:
    """S8: or storage would refuse every claim."""
    (a,) = await started(cluster, clock, A)

    a.saw_version(50)
    a.saw_version(2**63)
    await a.run_once()

    assert a.view.assignment.version == 51


async def test_a_member_that_is_missing_after_a_flush_is_replaced_once_it_is_certain(
    cluster: Members, clock: ManualClock
) -> None:
    """S8."""
    a, _ = await started(cluster, clock, A, B)

    await cluster.redis.flushdb()
    await a.run_once()
    assert loads(a) == {"a": 3, "b": 3}
    await cluster.settle()
    await a.run_once()

    assert loads(a) == {"a": 6}


@pytest.mark.parametrize(
    "picture",
    [
        '{"holders": {"0": "stranger", "1": "a", "99": "a", "-1": "b"}, "pinned": [99]}',
        '{"holders": [], "pinned": []}',
        "garbage",
    ],
)
async def test_an_assignment_that_cannot_be_true_is_replaced(
    cluster: Members, clock: ManualClock, picture: str
) -> None:
    """S8: a registry that lies."""
    a, b = await started(cluster, clock, A, B)

    await cluster.redis.hset(cluster.key("assignment"), mapping={"version": 77, "picture": picture})
    await a.run_once()
    await b.run_once()

    assert a.view.assignment.version == 78
    assert holders(a).keys() == set(range(6))
    assert set(loads(a)) <= {"a", "b"}
    assert b.view.assignment == a.view.assignment


@pytest.mark.parametrize("version", [0, 1, -5, 2**53, 10**30])
async def test_a_version_that_goes_back_or_is_absurd_is_not_followed(
    cluster: Members, clock: ManualClock, version: int
) -> None:
    """S8: versions only grow."""
    a, b = await started(cluster, clock, A, B)
    await a.move(0, "b")
    known = a.view.assignment

    picture = '{"holders": {"0": "a"}, "pinned": []}'
    await cluster.redis.hset(
        cluster.key("assignment"), mapping={"version": version, "picture": picture}
    )
    await a.run_once()
    await b.run_once()

    assert a.view.assignment.version == known.version + 1
    assert a.view.assignment.holders == known.holders
    assert b.view.assignment == a.view.assignment


async def test_an_operator_moves_a_partition_and_balance_does_not_move_it_back(
    cluster: Members, clock: ManualClock
) -> None:
    """S8."""
    a, b = await started(cluster, clock, A, B)
    mine = min(b.view.partitions_of("b"))

    await b.move(mine, "a")
    await b.move(mine, "a")
    for _ in range(40):
        await clock.advance_ms(250)
        await a.run_once()
        await b.run_once()

    assert holders(b)[mine] == "a"
    assert loads(b) == {"a": 3, "b": 3}
    with pytest.raises(InvalidArgument, match="no partition 6"):
        await a.move(6, "a")
    with pytest.raises(InvalidArgument, match="no member x"):
        await a.move(0, "x")


async def test_an_operator_drains_a_member_and_it_takes_no_partitions(
    cluster: Members, clock: ManualClock
) -> None:
    """S8."""
    a, b = await started(cluster, clock, A, B)

    await a.drain("b")
    await clock.advance_ms(2 * STABLE_MS)
    await a.run_once()
    await b.run_once()

    assert loads(b) == {"a": 6}
    with pytest.raises(InvalidArgument, match="is drained"):
        await a.move(0, "b")
    with pytest.raises(InvalidArgument, match="no other member"):
        await b.drain("a")
    with pytest.raises(InvalidArgument, match="no member x"):
        await a.drain("x")


async def test_a_drained_member_serves_when_it_is_the_last(
    cluster: Members, clock: ManualClock
) -> None:
    """S8: a drain does not make partitions unavailable."""
    a, b = await started(cluster, clock, A, B)
    await a.drain("b")

    await cluster.lose("a")
    await b.run_once()

    assert loads(b) == {"b": 6}


async def test_the_earlier_of_two_processes_with_one_id_ends_with_an_error(
    cluster: Members, clock: ManualClock
) -> None:
    """S8."""
    (earlier,) = await started(cluster, clock, A)
    later = cluster.membership(Member("a", "elsewhere:7400", 99))
    await later.run_once()

    with pytest.raises(MemberReplaced):
        await earlier.run()

    assert later.view.partitions_of("a") == set(range(6))
    assert later.view.holder(0) == later.member
    await earlier.leave()
    await later.run_once()
    assert later.view.members.keys() == {"a"}
