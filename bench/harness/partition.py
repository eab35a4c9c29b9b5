"""One partition inside the benchmark process: its writer, its engine, its disk, no network.

For measuring the cost of storage alone.
"""

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeVar

from storage_svc.engines.engine import Engines, Identity
from storage_svc.engines.rocksdb import SWITCH_INTERVAL_S, RocksEngines
from storage_svc.operations.operation import Operation
from storage_svc.operations.topics import PutTopic
from storage_svc.partition.partition import Partition
from tidemark.clock import SystemClock
from tidemark.errors import TidemarkError
from tidemark.topics import Topic

TOPIC: Final = "bench"
R = TypeVar("R")


@asynccontextmanager
async def open_partition(
    directory: Path, engines: Engines | None = None
) -> AsyncIterator[Partition]:
    """The only partition of a cluster, opened as the storage service opens it; on RocksDB, unless
    engines are given."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    identity = Identity("bench", 0, 1)
    partition = Partition(engines or RocksEngines(directory), identity, SystemClock())
    await partition.open()
    try:
        if partition.state.topics.find(TOPIC) is None:
            await ask(partition, [PutTopic(Topic(TOPIC), create=True)])
        yield partition
    finally:
        await partition.close()
        sys.setswitchinterval(before)


async def ask(partition: Partition, operations: Sequence[Operation[R]]) -> list[R]:
    """The results of one frame; raises the first that is an error."""
    results: list[R] = []
    for result in await partition.submit(operations):
        if isinstance(result, TidemarkError):
            raise result
        results.append(result)
    return results
