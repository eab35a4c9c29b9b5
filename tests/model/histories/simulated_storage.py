"""A storage node as a simulated process: its partitions on a real RocksDB, without gRPC."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from storage_svc.api.storage_service import StorageService
from storage_svc.engines.engine import Engine, Engines, Identity
from storage_svc.engines.rocksdb import RocksEngines
from storage_svc.partition.partition import Partition
from storage_svc.partition.partitions import Partitions
from tests.model.histories.simulated_time import Process
from tests.support.faulty_engine import FaultyEngines
from tidemark.clock import Clock
from tidemark.settings import StorageSettings


class RememberedEngines:
    """Remembers what it has opened, so that a killed process lets go of its files."""

    def __init__(self, data_dir: Path) -> None:
        self._engines = RocksEngines(
            data_dir, block_cache_bytes=1 << 20, write_buffer_bytes=1 << 20
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


async def open_storage(
    engines: Engines, identities: Sequence[Identity], clock: Clock
) -> StorageService:
    """The service of a node that holds these partitions."""
    held = {each.partition: Partition(engines, each, clock) for each in identities}
    for partition in held.values():
        await partition.open()
    cluster_id, count = identities[0].cluster_id, identities[0].partitions
    return StorageService(
        StorageSettings(cluster_id=cluster_id, partitions=count),
        Partitions(held, count),
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
        self.service = await open_storage(self.disk, [self._identity], self._clock)

    async def kill(self) -> None:
        """Interrupt its wires first."""
        await self.process.kill()
        await self._engines.close()
