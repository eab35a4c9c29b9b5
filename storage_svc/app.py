"""Wires the storage service together: the only place that constructs its parts."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

from storage_svc import key_figures, metrics
from storage_svc.api.delegation_service import DelegationService
from storage_svc.api.retention_service import RetentionService
from storage_svc.api.storage_service import StorageService
from storage_svc.engines.engine import Engines, Identity
from storage_svc.engines.rocksdb import SWITCH_INTERVAL_S, RocksEngines
from storage_svc.lifecycle.announcer import Announcer, announce_all
from storage_svc.lifecycle.lifecycle_watch import SilencePolicy
from storage_svc.partition.partition import Partition
from storage_svc.partition.partitions import Partitions
from tidemark.api.storage.v1.action_pb2_grpc import add_DelegationServiceServicer_to_server
from tidemark.api.storage.v1.retention_pb2_grpc import add_RetentionServiceServicer_to_server
from tidemark.api.storage.v1.storage_pb2_grpc import add_StorageServiceServicer_to_server
from tidemark.clock import Clock
from tidemark.rpc.channel_pool import ChannelPool
from tidemark.rpc.server import RpcServer
from tidemark.settings import StorageSettings

_log = logging.getLogger(__name__)


@asynccontextmanager
async def storage(
    settings: StorageSettings, clock: Clock, wrap: Callable[[Engines], Engines] = lambda same: same
) -> AsyncIterator[RpcServer]:
    """A storage service that serves, until the block ends; `wrap` lets tests inject faults."""
    # The thread that waits for the disk must get the interpreter back quickly: see rocksdb.py.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    engines = wrap(
        RocksEngines(
            settings.data_dir,
            block_cache_bytes=settings.block_cache_bytes,
            write_buffer_bytes=settings.write_buffer_bytes,
        )
    )
    held = {
        number: Partition(
            engines,
            Identity(settings.cluster_id, number, settings.partitions),
            clock,
            await_sweep=settings.await_sweep,
            disk_free_bytes_min=settings.disk_free_bytes_min,
            silence=_silence(settings),
        )
        for number in range(settings.partitions)
    }
    partitions = Partitions(held)
    server = RpcServer(settings.listen, clock=clock)
    service = StorageService(settings.cluster_id, partitions, server.stopping, clock)
    server.add(add_StorageServiceServicer_to_server, service)
    server.add(add_DelegationServiceServicer_to_server, DelegationService(partitions))
    server.add(add_RetentionServiceServicer_to_server, RetentionService(partitions, clock))
    async with ChannelPool() as channels:
        tasks: list[asyncio.Task[None]] = []
        try:
            await _open_all(held.values())
            await server.start()
            metrics.offer(held.values())
            _log.info("storage serves", extra={"address": server.address})
            tasks.append(asyncio.create_task(key_figures.sampler(held.values()).run(clock)))
            if settings.await_sweep:
                address = settings.advertise or server.address
                announcers = [
                    Announcer(each, channels, settings.lifecycle_address, address, clock)
                    for each in held.values()
                ]
                tasks.append(asyncio.create_task(announce_all(announcers)))
            yield server
        finally:
            await server.stop(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(partition.close() for partition in held.values()))


async def _open_all(partitions: Collection[Partition]) -> None:
    """Raises the first refusal, after all have ended: they share one database."""
    opening = (partition.open() for partition in partitions)
    for outcome in await asyncio.gather(*opening, return_exceptions=True):
        if outcome is not None:
            raise outcome


def _silence(settings: StorageSettings) -> SilencePolicy:
    """Without lifecycle (`await_sweep` off) its silence is no alarm."""
    after_ms = settings.lifecycle_silent_after_ms if settings.await_sweep else 0
    return SilencePolicy(after_ms, settings.lifecycle_silent_is_fault)
