"""Random histories of members: they join, leave, die, pause, and the registry is flushed or lies.

Time is moved by hand; the rows of the registry are changed in place of waiting (S8).
"""

import random
from collections.abc import Mapping
from math import ceil
from typing import Any

import pytest

from tests.support.valkey import Members
from tidemark.clock import ManualClock
from tidemark.registry.membership import Membership
from tidemark.registry.protocol import Member
from tidemark.registry.spread import next_balancing_move

PARTITIONS = 7
STEPS = 60
MEMBERS_MAX = 4
ROWS = ("members", "beats", "suspected", "assignment", "progress")
CALM_BEATS = 60
"""Enough for five seconds without a change, and for every move."""


class History:
    """Members by id, and what happens to them."""

    def __init__(self, cluster: Members, clock: ManualClock, seed: int) -> None:
        self.alive: dict[str, Membership] = {}
        self._cluster = cluster
        self._clock = clock
        self._random = random.Random(seed)
        self._versions: dict[Membership, int] = {}
        self._incarnations = 0

    async def step(self) -> None:
        happens: Any = self._random.choice(
            [self.leave, self.lose, self.forget, self.flush, self.lie, self.move]
            + 3 * [self.join]
            + 3 * [self.everyone_beats]
            + 6 * [self.beat]
        )
        await happens()
        await self._clock.advance_ms(self._random.choice([0, 100, 500, 2_000]))

    async def join(self) -> None:
        """A new member, or another process with the id of one that has ended without leaving."""
        await self.enter(f"m-{self._random.randrange(MEMBERS_MAX)}")

    async def enter(self, member_id: str) -> None:
        self._incarnations += 1
        address = f"host:{self._incarnations}"
        self.alive[member_id] = self._cluster.membership(
            Member(member_id, address, self._incarnations), PARTITIONS
        )
        await self._run(member_id)

    async def leave(self) -> None:
        if len(self.alive) > 1:
            await self.depart(self._any())

    async def depart(self, member_id: str) -> None:
        await self.alive.pop(member_id).leave()

    async def lose(self) -> None:
        """A member dies."""
        if len(self.alive) > 1:
            member_id = self._any()
            del self.alive[member_id]
            await self._cluster.lose(member_id)

    async def forget(self) -> None:
        """A member was paused, and the others took it for dead; or the registry was away."""
        if self.alive:
            await self._cluster.lose(self._any())
        if self._random.random() < 0.5:
            await self._cluster.redis.hset(self._cluster.key("progress"), "beat_ms", 1)

    async def flush(self) -> None:
        await self._cluster.redis.delete(*map(self._cluster.key, ROWS))

    async def lie(self) -> None:
        key, field, value = self._random.choice(
            [
                ("assignment", "version", "0"),
                ("assignment", "version", "3"),
                ("assignment", "version", "1e300"),
                ("assignment", "picture", "garbage"),
                ("assignment", "picture", '{"holders": {"0": "m-0", "1": "?"}, "pinned": [1]}'),
                ("progress", "seen_version", "-1"),
                ("members", "m-0", "garbage"),
                ("beats", "m-1", "garbage"),
            ]
        )
        await self._cluster.redis.hset(self._cluster.key(key), field, value)

    async def move(self) -> None:
        if self.alive:
            membership = self.alive[self._any()]
            membership.suspect(self._any())
            await membership.move(self._random.randrange(PARTITIONS), membership.member.member_id)

    async def beat(self) -> None:
        if self.alive:
            await self._run(self._any())

    async def everyone_beats(self) -> None:
        """A member that is missing after it is gone."""
        for member_id in self.alive:
            await self._run(member_id)
        await self._cluster.settle()

    async def calm(self) -> None:
        """Nothing happens any more."""
        for _ in range(CALM_BEATS):
            await self.everyone_beats()
            await self._clock.advance_ms(250)

    async def _run(self, member_id: str) -> None:
        membership = self.alive[member_id]
        await membership.run_once()
        version = membership.view.assignment.version
        assert version >= self._versions.get(membership, 0), "a version went back"
        self._versions[membership] = version

    def holders(self) -> Mapping[int, str]:
        return self.alive[self._any()].view.assignment.holders

    def _any(self) -> str:
        return self._random.choice(sorted(self.alive))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    seeds = range(300 if metafunc.config.getoption("--long") else 4)
    metafunc.parametrize("seed", seeds)


async def test_members_agree_after_every_history(
    cluster: Members, clock: ManualClock, seed: int
) -> None:
    """S8: one assignment, to live members only, balanced; and no version ever went back."""
    history = History(cluster, clock, seed)
    await history.join()

    for _ in range(STEPS):
        await history.step()
    await history.calm()

    views = [each.view for each in history.alive.values()]
    assert all(view.assignment == views[0].assignment for view in views)
    assert all(view.members.keys() == history.alive.keys() for view in views)
    holders, pinned = views[0].assignment.holders, views[0].assignment.pinned
    assert sorted(holders) == list(range(PARTITIONS))
    assert set(holders.values()) <= history.alive.keys()
    assert next_balancing_move(holders, history.alive.keys(), pinned) is None


async def test_a_member_that_comes_and_goes_moves_no_more_than_it_must(
    cluster: Members, clock: ManualClock, seed: int
) -> None:
    """S8: at most ceil(P / (n + 1)) partitions, all to the new member; and only those when it
    leaves. After any history, with partitions that an operator has moved."""
    history = History(cluster, clock, seed)
    await history.join()
    for _ in range(STEPS // 3):
        await history.step()
    await history.calm()
    before, members = history.holders(), len(history.alive)

    await history.enter("new")
    await history.calm()
    joined = history.holders()
    await history.depart("new")
    await history.calm()
    left = history.holders()

    moved = {number for number in before if joined[number] != before[number]}
    assert 1 <= len(moved) <= ceil(PARTITIONS / (members + 1))
    assert {joined[number] for number in moved} == {"new"}
    assert {number for number in joined if left[number] != joined[number]} == moved


async def test_no_partition_moves_while_only_the_registry_fails(
    cluster: Members, clock: ManualClock, seed: int
) -> None:
    """S8: it is flushed, away, or its clock jumps; members that are late are not taken for dead."""
    choices = random.Random(seed)
    members = [Member(f"m-{number}", f"host:{number}", number + 1) for number in range(3)]
    memberships = [cluster.membership(each, PARTITIONS) for each in members]
    for each in memberships:
        await each.run_once()
    await clock.advance_ms(500)
    for each in memberships:
        await each.run_once()
    before = memberships[0].view.assignment.holders
    assert set(before.values()) == {each.member_id for each in members}

    late = set[Membership]()
    for _ in range(STEPS):
        if not late and choices.random() < 0.5:
            late.update(memberships)
            await cluster.settle()
            if choices.random() < 0.5:
                await cluster.redis.delete(*map(cluster.key, ROWS))
            else:
                await cluster.redis.hset(cluster.key("progress"), "beat_ms", 1)
                for member in members:
                    await cluster.lose(member.member_id)
        beating = choices.choice(memberships)
        await beating.run_once()
        late.discard(beating)
        await clock.advance_ms(choices.choice([0, 500, 3_000]))
        assert beating.view.assignment.holders == before
        assert len(beating.view.members) == len(members), "an address is missing"
    joining = cluster.membership(Member("new", "host:new", 9), PARTITIONS)
    await joining.run_once()

    assert joining.view.assignment.holders == before
