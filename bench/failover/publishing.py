"""A client that publishes to every partition of a cluster, and how long its publishes wait."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final

import tidemark
from tidemark.client.publish.publisher import Publisher
from tidemark.errors import TidemarkError
from tidemark.local.cluster import LocalCluster
from tidemark.names import partition_of

PARTITIONS: Final = 16
POLL_S: Final = 0.05

_TOPIC = "failover"
_ENDS_A_HANG_S = 60
_AFTER_S = 1.0
"""How long publishes go on after the partition is served elsewhere."""


class Publishing:
    """A client with a publisher for each partition."""

    def __init__(self, client: tidemark.Client, publishers: list[Publisher]) -> None:
        self.client = client
        self._publishers = publishers

    @classmethod
    @asynccontextmanager
    async def to(cls, cluster: LocalCluster) -> AsyncIterator["Publishing"]:
        addresses = [cluster.address(name) for name in cluster.services_of("broker")]
        async with tidemark.connect(addresses) as client:
            await client.create_topic(_TOPIC)
            yield cls(client, [await client.publisher(name) for name in queues()])

    async def longest_ms(
        self,
        partition: int,
        fail: Callable[[], Awaitable[None]],
        served_again: Callable[[], Awaitable[bool]],
    ) -> float:
        """The longest wait of a publish to a partition, one after the other, around a fault."""
        over = asyncio.Event()
        publishing = asyncio.create_task(_publish(self._publishers[partition], over))
        try:
            await fail()
            await until(served_again)
            await asyncio.sleep(_AFTER_S)
        except BaseException:
            publishing.cancel()
            raise
        over.set()
        return await publishing


async def _publish(publisher: Publisher, over: asyncio.Event) -> float:
    longest_s = 0.0
    while not over.is_set():
        begin_s = time.perf_counter()
        await publisher.publish(b"x")
        longest_s = max(longest_s, time.perf_counter() - begin_s)
    return longest_s * 1000


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(_ENDS_A_HANG_S):
        while True:
            with suppress(TidemarkError):  # of the part that has failed
                if await condition():
                    return
            await asyncio.sleep(POLL_S)


def queues() -> list[str]:
    """A queue of each partition."""
    found: dict[int, str] = {}
    for number in range(PARTITIONS * 100):
        name = f"{_TOPIC}/{number}"
        found.setdefault(partition_of(name, PARTITIONS), name)
    return [found[partition] for partition in range(PARTITIONS)]
