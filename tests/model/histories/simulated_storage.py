"""A storage node as a simulated process: its partitions on a real RocksDB, or on a store in memory
that nodes share, without gRPC."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from storage_svc.api.storage_service import StorageService
from storage_svc.engines.engine import Engine, Engines, Identity
from storage_svc.engines.rocksdb import RocksEngines
from storage_svc.partition.partition import Partition
from storage_svc.partition.partitions import Partitions
from tests.model.histories.simulated_time import Process, SimulatedDisk
from tests.model.histories.stores import Answered
from tests.support.faulty_engine import FaultyEngines
from tests.support.shared_engine import SharedStore
from tidemark.clock import Clock
from tidemark.settings import StorageSettings


class RememberedEngines:
    """Remembers what it has opened, so that a killed process lets go of its files."""

    def __init__(self, data_dir: Path) -> None:
        self._engines = RocksEngines(
            data_dir,
            block_cache_bytes=1 << 20,
            write_buffer_bytes=1 << 20,
            disk=SimulatedDisk,
        )
        self._opened: list[Engine] = []

    async def open(self, identity: Identity) -> Engine:
        engine = await self._engines.open(identity)
        self._opened.append(engine)
        return engine

    async def close(self) -> None:
        for engine in self._opened:
            await engine.close()
        self._opened.clear()


class WatchedPartition(Partition):
    """Of a shared store: records under which epoch it answers, and the newest when it was asked."""

    store: SharedStore
    answers: list[Answered]

    def submit(self, *asked: Any, **options: Any) -> Any:
        results = super().submit(*asked, **options)
        epoch = self.state.engine.storage_epoch if self.is_open else 0
        newest_epoch = self.store.stored(self.number).mark.epoch

        def note(answered: asyncio.Future[Any]) -> None:
            if not answered.cancelled() and answered.exception() is None:
                self.answers.append(Answered(self.number, epoch, newest_epoch))

        results.add_done_callback(note)
        return results


def watched(
    engines: Engines, identity: Identity, clock: Clock, store: SharedStore, answers: list[Answered]
) -> Partition:
    partition = WatchedPartition(engines, identity, clock)
    partition.store, partition.answers = store, answers
    return partition


async def open_storage(held: Sequence[Partition], clock: Clock) -> StorageService:
    """The service of a node that holds these partitions."""
    for partition in held:
        await partition.open()
    cluster_id, count = held[0].identity.cluster_id, held[0].identity.partitions
    return StorageService(
        StorageSettings(cluster_id=cluster_id, partitions=count),
        Partitions({each.number: each for each in held}, count),
        asyncio.Event(),
        clock,
    )


class SimulatedNode:
    """One storage process, which holds one partition."""

    def __init__(self, data_dir: Path, identity: Identity, clock: Clock) -> None:
        self.partition = identity.partition
        self.process = Process()
        self.disk: FaultyEngines
        self.service: StorageService
        self._identity = identity
        self._engines = RememberedEngines(data_dir)
        self._clock = clock

    async def start(self) -> None:
        self.process = Process()
        await self.process.start(self._serve())

    async def _serve(self) -> None:
        self.disk = FaultyEngines(self._engines)
        partition = Partition(self.disk, self._identity, self._clock)
        self.service = await open_storage([partition], self._clock)

    async def kill(self) -> None:
        """Interrupt its wires first."""
        await self.process.kill()
        await self._engines.close()
