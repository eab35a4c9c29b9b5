"""Wires the storage service together: the only place that constructs its parts."""

import asyncio
import logging
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from storage_svc import key_figures, metrics
from storage_svc.api.delegation_service import DelegationService
from storage_svc.api.retention_service import RetentionService
from storage_svc.api.storage_service import StorageService
from storage_svc.engines.engine import REFUSALS, Engines
from storage_svc.engines.node_record import (
    NodeRecord,
    note_partitions,
    noted_partitions,
    stored_partitions,
)
from storage_svc.engines.rocksdb import SWITCH_INTERVAL_S, RocksEngines
from storage_svc.lost_brokers import MEMBERS as BROKERS
from storage_svc.lost_brokers import LostBrokers
from storage_svc.node import StorageNode
from storage_svc.partition.losses import no_witness
from storage_svc.placement.assigned import MEMBERS, AssignedPartitions
from storage_svc.placement.clock_check import ClockCheck
from storage_svc.placement.placement import Placement
from storage_svc.placement.witness_reports import WitnessReports
from tidemark.api.storage.v1.action_pb2_grpc import add_DelegationServiceServicer_to_server
from tidemark.api.storage.v1.retention_pb2_grpc import add_RetentionServiceServicer_to_server
from tidemark.api.storage.v1.storage_pb2_grpc import add_StorageServiceServicer_to_server
from tidemark.clock import Clock
from tidemark.limits import PARTITIONS_DEFAULT
from tidemark.registry.membership import Membership
from tidemark.registry.protocol import Member, Registry, Timers
from tidemark.rpc.channel_pool import ChannelPool
from tidemark.rpc.server import RpcServer
from tidemark.service.background import BackgroundTasks
from tidemark.settings import StorageSettings

if TYPE_CHECKING:
    from storage_svc.engines.redis.engine import RedisEngines

_REOPEN_MS_MIN = 100
_REOPEN_MS_MAX = 10_000

DEFAULT_TIMERS = Timers()

T = TypeVar("T")

_log = logging.getLogger(__name__)


@asynccontextmanager
async def storage(
    settings: StorageSettings,
    clock: Clock,
    wrap: Callable[[Engines], Engines] = lambda same: same,
    timers: Timers = DEFAULT_TIMERS,
) -> AsyncIterator[RpcServer]:
    """A storage service that serves, until the block ends; `wrap` lets tests inject faults.

    `timers` are those of its membership in a registry. Leaving it raises DataDirectoryInUse if
    another node was found to run on a copy of its data, MemberReplaced if another process has its
    address, and errors caused by a setting.
    """
    # The thread that waits for the disk must get the interpreter back quickly: see rocksdb.py.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    engines = RocksEngines(
        settings.data_dir,
        block_cache_bytes=settings.block_cache_bytes,
        write_buffer_bytes=settings.write_buffer_bytes,
    )
    shared = _redis_engines(settings) if settings.engine == "redis" else None
    wrapped = wrap(shared or engines)
    server = RpcServer(settings.listen, clock=clock)
    async with ChannelPool() as channels, AsyncExitStack() as stack:
        reports: WitnessReports | None = None
        if settings.shares_partitions:
            reports = await stack.enter_async_context(_witness_reports(settings, clock))
        node = StorageNode(
            settings,
            (lambda: wrap(_redis_engines(settings)))
            if settings.shares_partitions
            else (lambda: wrapped),
            channels,
            clock,
            witness=no_witness if reports is None else reports.highest,
        )
        record, placement, assigned = None, None, None
        clock_check: ClockCheck | None = None
        if shared is None and len(settings.storage_addresses) > 1:
            record = NodeRecord(engines, settings.cluster_id, settings.partitions)
        partitions = node.partitions
        leaving = asyncio.Event()
        service = StorageService(settings, partitions, leaving, clock)
        if settings.registry_url:
            brokers = await stack.enter_async_context(_registry(settings, BROKERS, timers))
            lost = LostBrokers(brokers)
            stack.push_async_callback(lost.close)
            service.on_broker_lost = lost.report
        server.add(add_StorageServiceServicer_to_server, service)
        server.add(add_DelegationServiceServicer_to_server, DelegationService(partitions))
        server.add(add_RetentionServiceServicer_to_server, RetentionService(partitions, clock))
        tasks = BackgroundTasks(server)
        handing_over: asyncio.Task[None] | None = None
        try:
            if shared is not None:
                await _count_shared(node, shared, settings, clock)
                if not settings.shares_partitions:
                    await node.open(range(partitions.count))
            elif record is None:
                await _open_alone(node, engines, settings, clock)
            else:
                await _until_open(record.open, settings, clock)
                node.set_count(record.partitions)
                await node.open(record.held)
                placement = Placement(
                    record,
                    node,
                    settings.own_address,
                    settings.storage_addresses,
                    channels,
                    clock,
                    create_lost=settings.create_lost,
                )
                service.placement = placement
            await server.start()
            metrics.offer(
                partitions.held.values(),
                lambda: 0 if clock_check is None else clock_check.offset_ms,
            )
            address = settings.advertise or server.address
            _log.info("storage serves", extra={"address": server.address})
            node.announce(address)
            sampler = key_figures.sampler(partitions.held.values())
            tasks.start(sampler.run(clock))
            if reports is not None:
                tasks.start(reports.run(partitions.held.values()))
            if placement is not None:
                tasks.start(placement.run())
            if shared is not None and settings.shares_partitions:
                membership = await stack.enter_async_context(
                    _membership(settings, address, partitions.count, clock, timers)
                )
                assigned = AssignedPartitions(membership, node, partitions.held, clock)
                service.assigned = assigned
                clock_check = ClockCheck(partial(shared.time_ms, settings.cluster_id), clock)
                tasks.start(assigned.run(clock_check))
            handing_over = asyncio.create_task(_hand_over(server, assigned, leaving))
            yield server
        finally:
            # Before calls are cancelled: brokers follow the partitions to other nodes.
            if handing_over is not None:
                server.stopping.set()
                await handing_over
            await server.stop(0)
            await tasks.cancel()
            await node.close()
            if record is not None:
                await record.close()
        tasks.raise_failure()


async def _hand_over(
    server: RpcServer, assigned: AssignedPartitions | None, leaving: asyncio.Event
) -> None:
    """Exchanges end once other nodes hold the partitions, if there are any."""
    await server.stopping.wait()
    try:
        if assigned is not None:
            await assigned.hand_over()
    finally:
        leaving.set()


@asynccontextmanager
async def _membership(
    settings: StorageSettings, address: str, partitions: int, clock: Clock, timers: Timers
) -> AsyncIterator[Membership]:
    """The part of this node among those that share the partitions, known by its address."""
    async with _registry(settings, MEMBERS, timers) as registry:
        member = Member(address, address, random.getrandbits(63))
        yield Membership(registry, member, partitions, clock, timers=timers)


@asynccontextmanager
async def _registry(
    settings: StorageSettings, kind: str, timers: Timers
) -> AsyncIterator[Registry]:
    # Here, because redis-py takes time to import and most nodes do without.
    from tidemark.registry.redis_registry import RedisRegistry

    registry = RedisRegistry(settings.registry_url, settings.cluster_id, kind, timers)
    try:
        yield registry
    finally:
        await registry.close()


@asynccontextmanager
async def _witness_reports(
    settings: StorageSettings, clock: Clock
) -> AsyncIterator[WitnessReports]:
    from tidemark.registry.redis_registry import RedisRegistry

    registry = RedisRegistry(settings.registry_url, settings.cluster_id, MEMBERS)
    try:
        yield WitnessReports(registry, clock)
    finally:
        await registry.close()


async def _open_alone(
    node: StorageNode, engines: RocksEngines, settings: StorageSettings, clock: Clock
) -> None:
    """Open all partitions of the cluster in its only node."""
    try:
        if not settings.partitions:
            node.set_count(await _count_alone(engines, settings, clock))
        await node.open(range(node.partitions.count))
        if any(each.is_open for each in node.partitions.held.values()):
            await asyncio.to_thread(note_partitions, settings.data_dir, node.partitions.count)
    finally:
        if not settings.partitions:  # it was held to count them
            await engines.release_node()


async def _count_alone(engines: RocksEngines, settings: StorageSettings, clock: Clock) -> int:
    """The number of partitions of the data, of the note if that cannot be opened, or of new data.

    With it, the partitions report why they do not serve, and serve once the data can be opened.
    """
    read = partial(stored_partitions, engines, settings.cluster_id)
    try:
        return await read() or PARTITIONS_DEFAULT
    except REFUSALS:
        raise
    except Exception as error:
        if noted := noted_partitions(settings.data_dir):
            _log.error("the data of this node cannot be opened", exc_info=error)
            return noted
    return await _until_open(read, settings, clock) or PARTITIONS_DEFAULT


async def _count_shared(
    node: StorageNode, engines: "RedisEngines", settings: StorageSettings, clock: Clock
) -> None:
    """The number of partitions of the stored data; raises ClusterMismatch if it is another one."""
    read = partial(engines.stored_partitions, settings.cluster_id, settings.partitions)
    if settings.shares_partitions or not settings.partitions:
        stored = await _until_open(read, settings, clock)
        node.set_count(stored or settings.partitions or PARTITIONS_DEFAULT)


def _redis_engines(settings: StorageSettings) -> "RedisEngines":
    # Here, because redis-py takes time to import and most nodes do without.
    from storage_svc.engines.redis.address import ServerUrl
    from storage_svc.engines.redis.checks import Durability
    from storage_svc.engines.redis.engine import RedisEngines

    url = ServerUrl.parse(settings.redis_server_url)
    return RedisEngines(url, Durability(settings.redis_durability))


async def _until_open(
    read: Callable[[], Awaitable[T]], settings: StorageSettings, clock: Clock
) -> T:
    """Raises errors caused by a setting, and tries again after any other fault: the result decides
    which partitions there are."""
    wait_ms = _REOPEN_MS_MIN
    while True:
        try:
            return await read()
        except REFUSALS:
            raise
        except Exception as error:
            _log.error(
                "the data of this node cannot be opened",
                extra={"engine": settings.engine, "directory": str(settings.data_dir)},
                exc_info=error,
            )
        await clock.sleep_ms(wait_ms)
        wait_ms = min(2 * wait_ms, _REOPEN_MS_MAX)
