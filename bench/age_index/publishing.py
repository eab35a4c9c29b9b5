"""The cost of the index of ages for publishing: CPU time of client, broker and storage together.

A cluster of processes in which storage switches the index off and on between frames. A first
message is published in two ways: by a client that opens a publisher for each queue, and in bare
frames of a session, which cost less beside the index. Further messages go through open publishers.
"""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import tidemark
from bench.age_index.switched_storage import INDEX_OFF, INDEX_ON
from bench.age_index.variants import FRAME, INDEXED, VARIANTS, compare
from bench.harness.benchmark import Bench
from bench.harness.broker import broker_of, publish_each
from bench.harness.cluster import running_cluster
from bench.harness.usage import answered_after, cpu_ns
from storage_svc.engines.age_rows import AgeKind, age_prefix, read_age
from storage_svc.engines.engine import Identity, Table
from storage_svc.engines.keys import prefix_end
from storage_svc.engines.paging import scan_all
from storage_svc.engines.rocksdb import RocksEngines
from tests.support.session import Session
from tidemark.api.broker.v1.message_pb2 import Message, MessageBatch
from tidemark.api.broker.v1.topic_pb2 import TopicSettings
from tidemark.local.cluster import LocalCluster
from tidemark.settings import StorageSettings

INDEX_RATIO_MAX: Final = 1.03

_PARTITIONS: Final = 4
_DAY_S: Final = 86_400
_PAYLOAD: Final = bytes(100)


class _Publishing:
    """A cluster and its clients. Each variant has its own topic."""

    def __init__(self, cluster: LocalCluster, client: tidemark.Client, session: Session) -> None:
        self.queues: dict[str, int] = dict.fromkeys(VARIANTS, 0)
        """How many queues were made, by topic."""
        self._cluster = cluster
        self._client = client
        self._session = session
        self._number = itertools.count()
        self._open: dict[str, Sequence[tidemark.Publisher]] = {}

    async def start(self) -> None:
        for variant in VARIANTS:
            await self._client.create_topic(
                variant, retention_enabled=True, retention_seconds=_DAY_S
            )
            await self._switch_to(variant)
            self._open[variant] = await self._publish_to(self._new_queues(variant))

    async def first_with_publishers(self, variant: str) -> float:
        """A message to new queues, the opening of their publishers included."""
        names = self._new_queues(variant)
        opened: list[tidemark.Publisher] = []

        async def publish() -> None:
            opened.extend(await self._publish_to(names))

        used_us = await self._measured(variant, publish)
        await asyncio.gather(*(each.close() for each in opened))
        return used_us

    async def first_in_frames(self, variant: str) -> float:
        """A message to new queues, for which the broker opens publishers by itself."""
        names = self._new_queues(variant)
        batch = MessageBatch(messages=[Message(payload=_PAYLOAD)])
        return await self._measured(variant, lambda: publish_each(self._session, names, batch))

    async def another(self, variant: str) -> float:
        """A message to queues that have some."""
        return await self._measured(variant, lambda: _publish(self._open[variant]))

    def _new_queues(self, variant: str) -> list[str]:
        self.queues[variant] += FRAME
        return [f"{variant}/{next(self._number)}" for _ in range(FRAME)]

    async def _publish_to(self, names: Sequence[str]) -> Sequence[tidemark.Publisher]:
        publishers = await asyncio.gather(*map(self._client.publisher, names))
        await _publish(publishers)
        return publishers

    async def _measured(self, variant: str, publish: Callable[[], Awaitable[None]]) -> float:
        await self._switch_to(variant)
        before_ns = self._used_ns()
        await publish()
        return (self._used_ns() - before_ns) / 1e3 / FRAME

    async def _switch_to(self, variant: str) -> None:
        os.kill(self._cluster.pid("storage"), INDEX_ON if variant == INDEXED else INDEX_OFF)
        await answered_after(self._cluster.address("storage"))

    def _used_ns(self) -> int:
        services = (self._cluster.pid(name) for name in ("storage", "broker"))
        return sum(map(cpu_ns, (os.getpid(), *services)))


async def _publish(publishers: Sequence[tidemark.Publisher]) -> None:
    await asyncio.gather(*(each.publish(_PAYLOAD) for each in publishers))


async def measure_publishing(bench: Bench) -> None:
    """The three ways, each with a bar."""
    rounds, turns = 2 * bench.rounds, bench.size(full=40, quick=3)
    bench.settings |= {"index_rounds": rounds, "index_turns": turns, "index_frame": FRAME}
    directory = bench.directory / "publishing"
    async with _publishing(directory) as publishing:
        for shape, publish in (
            ("first message, publishers opened", publishing.first_with_publishers),
            ("first message, bare frames", publishing.first_in_frames),
            ("another message", publishing.another),
        ):
            ratio = await compare(bench, shape, publish, rounds=rounds, turns=turns)
            bench.at_most(f"{shape}: with / without the index", ratio.median, INDEX_RATIO_MAX)
    await _check_entries(directory / "data", publishing.queues)


@asynccontextmanager
async def _publishing(directory: Path) -> AsyncIterator[_Publishing]:
    module = "bench.age_index.switched_storage"
    async with (
        running_cluster(directory, partitions=_PARTITIONS, storage_module=module) as cluster,
        broker_of(cluster, TopicSettings()) as broker,
        broker.session("bench") as session,
        tidemark.connect(cluster.address("broker")) as client,
    ):
        publishing = _Publishing(cluster, client, session)
        await publishing.start()
        yield publishing


async def _check_entries(data: Path, queues: Mapping[str, int]) -> None:
    """Every queue of the variant with the index is in it, and no other."""
    found = dict.fromkeys(VARIANTS, 0)
    engines = RocksEngines(data)
    for partition in range(_PARTITIONS):
        identity = Identity(StorageSettings().cluster_id, partition, _PARTITIONS)
        engine = await engines.open(identity)
        for variant in VARIANTS:
            prefix = age_prefix(AgeKind.WAITING, variant)
            async for row in scan_all(engine, Table.AGES, prefix, prefix_end(prefix)):
                found[variant] += len(read_age(*row).queue_ids)
        await engine.close()
    expected = {name: count if name == INDEXED else 0 for name, count in queues.items()}
    assert found == expected, f"the index has {found}, not {expected}"
