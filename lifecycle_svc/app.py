"""Wires the lifecycle service together: the only place that constructs its parts."""

import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from lifecycle_svc import metrics
from lifecycle_svc.api.lifecycle_service import LifecycleService
from lifecycle_svc.sweeper import Replica, SweeperState
from lifecycle_svc.sweepers import Sweepers
from tidemark.api.lifecycle.v1.lifecycle_pb2_grpc import add_LifecycleServiceServicer_to_server
from tidemark.api.storage.v1.retention_pb2_grpc import RetentionServiceStub
from tidemark.clock import Clock
from tidemark.rpc.channel import open_channel
from tidemark.rpc.channel_pool import ChannelPool
from tidemark.rpc.server import RpcServer
from tidemark.service.background import BackgroundTasks
from tidemark.settings import LifecycleSettings
from tidemark.system_metrics.sampler import Sampler, recorder

_log = logging.getLogger(__name__)
_LIFECYCLE_SERVICE = "tidemark.api.lifecycle.v1.LifecycleService"


@asynccontextmanager
async def lifecycle(settings: LifecycleSettings, clock: Clock) -> AsyncIterator[RpcServer]:
    """A lifecycle service that serves once it has tried to sweep every partition."""
    server = RpcServer(settings.listen, clock=clock)
    async with ChannelPool() as channels, open_channel(settings.storage_addresses[0]) as storage:
        sweepers = Sweepers(channels, settings, clock)
        server.add(add_LifecycleServiceServicer_to_server, LifecycleService(sweepers))
        server.set_serving(_LIFECYCLE_SERVICE, False)
        metrics.register(sweepers)
        tasks = BackgroundTasks(server)
        try:
            await server.start()
            address = settings.advertise or server.address
            sweepers.replica = Replica(f"{random.getrandbits(64):016x}", address)
            _log.info("lifecycle listens", extra={"address": address})
            record = recorder(RetentionServiceStub(storage), "lifecycle")
            tasks.start(_discover(server, sweepers))
            tasks.start(sweepers.follow_moves())
            tasks.start(Sampler(partial(_figures, sweepers), record).run(clock))
            yield server
        finally:
            await tasks.cancel()
            await server.stop(0)
            await sweepers.stop()
        tasks.raise_failure()


def _figures(sweepers: Sweepers) -> dict[str, float]:
    """The key figures of a replica, for `system_metrics` (R12)."""
    states = [sweeper.state for sweeper in sweepers]
    return {
        "sweepers": len(states),
        "sweepers.standing_by": states.count(SweeperState.STANDING_BY),
        "sweepers.backing_off": states.count(SweeperState.BACKING_OFF),
    }


async def _discover(server: RpcServer, sweepers: Sweepers) -> None:
    """Healthy once every partition was tried; failed sweeps are retried and do not change that."""
    await sweepers.discover()
    await sweepers.attempted()
    server.set_serving(_LIFECYCLE_SERVICE, True)
    _log.info("lifecycle serves")
