"""The engines under test. A new engine is one more entry in OPENERS; no test changes."""

import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from storage_svc.engines.engine import Batch, Engine, Engines, Identity, Row, Table
from storage_svc.engines.redis.address import ServerUrl
from storage_svc.engines.redis.checks import Durability
from storage_svc.engines.redis.engine import RedisEngines
from storage_svc.engines.rocksdb import RocksEngines
from tests.support.partition_life import Life, living
from tests.support.repository import ROOT
from tests.support.shared_engine import SharedEngines, SharedStore
from tests.support.shared_partitions import Nodes
from tests.support.valkey_cluster import ValkeyCluster

IDENTITY = Identity(cluster_id="cluster-a", partition=1, partitions=4)

_in_memory: defaultdict[str, SharedStore] = defaultdict(SharedStore)

OPENERS: dict[str, Callable[[str], Engines]] = {
    "rocksdb": lambda location: RocksEngines(Path(location)),
    "memory": lambda location: SharedEngines(_in_memory[location]),
    "redis": lambda location: RedisEngines(ServerUrl.parse(location)),
    "redis-cluster": lambda location: RedisEngines(
        ServerUrl.parse(location), Durability.REPLICATED
    ),
}
LONG = {
    "test_kill_9_loses_no_commit_that_was_reported",
    "test_a_hundred_thousand_keys_are_all_there_in_order",
}
"""Tests that take seconds on a server."""
LOCKED = {"rocksdb"}
"""Engines whose partition one process holds; the others are shared, and taken over."""


# Commits 1, 2, 3, ... and reports each number once its commit has returned. Both tables and both
# keys of a commit must be there, or neither.
_COMMITTER = """
import asyncio, sys
from storage_svc.engines.engine import Batch, Table
from storage_svc.engines.keys import u64
from tests.model.conftest import IDENTITY, OPENERS

async def main(name, location, first):
    engine = await OPENERS[name](location).open(IDENTITY)
    print("open", flush=True)
    for number in range(first, first + 1_000_000):
        batch = Batch()
        batch.put(Table.GROUPS, u64(number), b"left" * 50)
        batch.put(Table.RUN_HEADERS, u64(number), b"right" * 50)
        await engine.commit(batch)
        print(number, flush=True)

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


@dataclass(frozen=True, slots=True)
class Subject:
    """One engine and where its data is: enough for another process to open the same."""

    name: str
    location: str

    def engines(self) -> Engines:
        return OPENERS[self.name](self.location)

    @property
    def is_shared(self) -> bool:
        return self.name not in LOCKED

    @property
    def outlives_processes(self) -> bool:
        return self.name != "memory"

    @property
    def is_apart_by_cluster(self) -> bool:
        """Whether clusters share a location."""
        return self.name.startswith("redis")

    @contextmanager
    def committer(self, first: int = 1) -> Iterator[subprocess.Popen[str]]:
        """A process that has the engine open and commits until it is killed."""
        arguments = [sys.executable, "-c", _COMMITTER, self.name, self.location, str(first)]
        with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "open\n"
                yield process
            finally:
                process.kill()


@pytest.fixture(scope="session")
def valkey_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyCluster]:
    with ValkeyCluster.running(tmp_path_factory.mktemp("valkeys"), masters=3) as cluster:
        yield cluster


@pytest.fixture(params=OPENERS)
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Subject:
    if not request.param.startswith("redis"):
        return Subject(request.param, str(tmp_path / "data"))
    is_cluster = request.param == "redis-cluster"
    if (is_cluster or request.node.originalname in LONG) and not request.config.option.redis:
        pytest.skip("part of make test-redis")
    if is_cluster:
        cluster: ValkeyCluster = request.getfixturevalue("replicated_valkeys")
        cluster.flush()
        return Subject(request.param, cluster.url)
    url: str = request.getfixturevalue("durable_valkey")
    with redis.Redis.from_url(url) as server:
        server.flushall()
    return Subject(request.param, url)


@pytest.fixture
async def engine(subject: Subject) -> AsyncIterator[Engine]:
    engine = await subject.engines().open(IDENTITY)
    yield engine
    await engine.close()


@pytest.fixture
async def life(tmp_path: Path) -> AsyncIterator[Life]:
    """A partition with the topic `t`."""
    async with living(tmp_path) as life:
        await life.topic("t")
        yield life


@pytest.fixture
async def nodes() -> AsyncIterator[Nodes]:
    """Storage nodes that share a store in memory."""
    async with AsyncExitStack() as stack:
        yield Nodes(stack)


def puts(table: Table, *rows: Row) -> Batch:
    batch = Batch()
    for key, value in rows:
        batch.put(table, key, value)
    return batch


async def everything(engine: Engine, table: Table) -> list[Row]:
    return await engine.scan(table, b"", None, limit=1_000_000)
