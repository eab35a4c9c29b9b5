"""Wires the storage service together: the only place that constructs its parts."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from storage_svc.engines.engine import Identity
from storage_svc.engines.rocksdb import SWITCH_INTERVAL_S, RocksEngines
from storage_svc.partition import Partition
from storage_svc.service import StorageService
from storage_svc.topics import Topics
from tidemark.api.storage.v1.storage_pb2_grpc import add_StorageServiceServicer_to_server
from tidemark.clock import Clock
from tidemark.rpc.server import RpcServer
from tidemark.settings import StorageSettings

_log = logging.getLogger(__name__)


@asynccontextmanager
async def storage(settings: StorageSettings, clock: Clock) -> AsyncIterator[RpcServer]:
    """A storage service that serves, until the block ends."""
    # The thread that waits for the disk must get the interpreter back quickly: see rocksdb.py.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    engines = RocksEngines(settings.data_dir)
    identities = [
        Identity(settings.cluster_id, number, settings.partitions)
        for number in range(settings.partitions)
    ]
    opened = []
    partitions: dict[int, Partition] = {}
    server = RpcServer(settings.listen, clock=clock)
    try:
        for identity in identities:
            engine = await engines.open(identity)
            opened.append(engine)
            partitions[identity.partition] = Partition(engine, clock)
            await partitions[identity.partition].open()
        service = StorageService(settings.cluster_id, partitions, Topics(opened[0], clock))
        server.add(add_StorageServiceServicer_to_server, service)
        await server.start()
        _log.info("storage serves", extra={"address": server.address})
        yield server
    finally:
        await server.stop(0)
        await asyncio.gather(*(partition.close() for partition in partitions.values()))
        await asyncio.gather(*(engine.close() for engine in opened))
