"""Large and small commits with `replicated`, while masters of a real cluster fail under them.

A few rounds in `make test-redis`, and as many as are asked for in `make test-redis-rounds`.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import pytest

from storage_svc.engines.engine import Batch, EngineFailed, Table
from storage_svc.engines.keys import u64
from storage_svc.engines.redis.address import ServerUrl
from storage_svc.engines.redis.checks import Durability
from storage_svc.engines.redis.engine import RedisEngine, RedisEngines
from storage_svc.engines.redis.layout import mark_key
from tests.model.conftest import IDENTITY
from tests.support.local_broker import until
from tests.support.valkey_cluster import ValkeyCluster
from tidemark.clock import SystemClock
from tidemark.errors import CommitOutcomeUnknown

ROUNDS: Final = 5
SEED: Final = 20_261_119
ROWS: Final = 2_500
TABLES: Final = (Table.CATALOG, Table.RUN_HEADERS)
MARK: Final = mark_key(IDENTITY)

Rows = dict[Table, dict[bytes, bytes]]


class Faults:
    """What happens to the servers of a partition."""

    def __init__(self, cluster: ValkeyCluster, chance: random.Random) -> None:
        self._cluster = cluster
        self._chance = chance
        self._clock = SystemClock()
        self.seen: Counter[str] = Counter()
        self._kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "a master is killed": self._kill,
            "a master is paused": self._pause,
            "a replica is promoted": self._promote,
            "a lagging replica is promoted": self._promote_lagging,
            "a slot is migrated": self._migrate,
        }

    async def one(self) -> None:
        what = self._chance.choice(list(self._kinds))
        self.seen[what] += 1
        await self._clock.sleep_ms(self._chance.randint(100, 1_000))
        await self._kinds[what]()
        await asyncio.to_thread(self._cluster.until_whole)

    async def _kill(self) -> None:
        master = await asyncio.to_thread(self._cluster.master_of, MARK)
        await asyncio.to_thread(self._cluster.kill, master)
        await asyncio.to_thread(self._cluster.master_of, MARK)
        await asyncio.to_thread(self._cluster.start, master)

    async def _pause(self) -> None:
        master = await asyncio.to_thread(self._cluster.master_of, MARK)
        self._cluster.pause(master)
        await self._clock.sleep_ms(self._chance.choice((300, 4_000)))
        self._cluster.resume(master)

    async def _promote(self) -> None:
        """At once, whatever is on its way to it."""
        replica = await asyncio.to_thread(self._cluster.replica_of, MARK)
        await asyncio.to_thread(self._cluster.promote, replica)

    async def _promote_lagging(self) -> None:
        replica = await asyncio.to_thread(self._cluster.replica_of, MARK)
        await asyncio.to_thread(self._cluster.cut_off, replica)
        await self._clock.sleep_ms(self._chance.randint(0, 500))
        await asyncio.to_thread(self._cluster.promote, replica)

    async def _migrate(self) -> None:
        await asyncio.to_thread(self._cluster.migrate, MARK)


class Committer:
    """A node that commits, and knows what must be stored."""

    def __init__(self, url: str, chance: random.Random) -> None:
        self._engines = RedisEngines(ServerUrl.parse(url), Durability.REPLICATED)
        self._engine: RedisEngine | None = None
        self._chance = chance
        self._number = 0
        self._rows: Rows = {table: {} for table in TABLES}
        self.outcomes: Counter[str] = Counter()

    async def commit(self) -> None:
        is_large = self._chance.random() < 0.6
        batch, rows = self._changes(is_large)
        engine = await self._opened()
        try:
            await engine.commit(batch)
            self.outcomes["large" if is_large else "small"] += 1
        except CommitOutcomeUnknown:
            self.outcomes["unknown"] += 1
            await self.close()
            stored = await self._stored()
            assert stored in (self._rows, rows), "half a commit is stored"
            rows = stored
        except EngineFailed:
            self.outcomes["failed"] += 1
            await self.close()
            assert await self._stored() == self._rows, "a commit that failed is stored"
            return
        self._rows = rows

    async def check(self) -> None:
        stored = await self._stored()
        for table in TABLES:
            expected = self._rows[table].items()
            assert stored[table].items() == expected, f"{table}: not what was committed"

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()
        self._engine = None

    def _changes(self, is_large: bool) -> tuple[Batch, Rows]:
        """A batch, and the rows as they are after it."""
        self._number += 1
        batch = Batch()
        rows = {table: dict(self._rows[table]) for table in TABLES}
        for table in TABLES:
            if is_large and self._chance.random() < 0.2:
                start, end = sorted(u64(self._chance.randrange(ROWS)) for _ in range(2))
                batch.delete_range(table, start, end)
                rows[table] = {k: v for k, v in rows[table].items() if not start <= k < end}
            count = self._chance.randrange(ROWS // 2, ROWS) if is_large else 5
            for number in self._chance.sample(range(ROWS), count):
                key, value = u64(number), b"%d" % self._number
                if self._chance.random() < 0.15:
                    batch.delete(table, key)
                    rows[table].pop(key, None)
                else:
                    batch.put(table, key, value)
                    rows[table][key] = value
        return batch, rows

    async def _opened(self) -> RedisEngine:
        if self._engine is None:

            async def is_open() -> bool:
                try:
                    self._engine = await self._engines.open(IDENTITY)
                except (ConnectionError, EngineFailed):
                    return False
                return True

            await until(is_open)
        assert self._engine is not None
        return self._engine

    async def _stored(self) -> Rows:
        found: Rows = {}

        async def is_read() -> bool:
            engine = await self._opened()
            try:
                for table in TABLES:
                    found[table] = dict(await engine.scan(table, b"", None, limit=2 * ROWS))
            except EngineFailed:  # its master is away
                return False
            return True

        await until(is_read)
        return found


@pytest.mark.timeout(0)
async def test_redis_commits_of_every_size_survive_failovers_whole(
    pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    """S2, S9: what was confirmed is there, all of it, and what follows is written on top of it. A
    large commit is applied piece by piece, of which a failover may lose some."""
    rounds = pytestconfig.getoption("--redis-rounds") or ROUNDS
    if not pytestconfig.getoption("--redis") and not pytestconfig.getoption("--redis-rounds"):
        pytest.skip("part of make test-redis")
    chance = random.Random(pytestconfig.getoption("--seed") or SEED)
    with ValkeyCluster.running(tmp_path, masters=3, replicas=3) as cluster:
        faults = Faults(cluster, random.Random(chance.random()))
        committer = Committer(cluster.url, chance)
        for _ in range(rounds):
            fault = asyncio.create_task(faults.one())
            while not fault.done():
                await committer.commit()
                await committer.check()
            await fault
        await committer.check()
        await committer.close()
    print(f"{rounds} rounds: {dict(committer.outcomes)}; {dict(faults.seen)}")
