"""Wires the lifecycle service together: the only place that constructs its parts."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lifecycle_svc.service import LifecycleService
from tidemark.api.lifecycle.v1.lifecycle_pb2_grpc import add_LifecycleServiceServicer_to_server
from tidemark.clock import Clock
from tidemark.rpc.server import RpcServer
from tidemark.settings import LifecycleSettings

_log = logging.getLogger(__name__)


@asynccontextmanager
async def lifecycle(settings: LifecycleSettings, clock: Clock) -> AsyncIterator[RpcServer]:
    """A lifecycle service that serves, until the block ends."""
    server = RpcServer(settings.listen, clock=clock)
    server.add(add_LifecycleServiceServicer_to_server, LifecycleService())
    try:
        await server.start()
        _log.info("lifecycle serves", extra={"address": server.address})
        yield server
    finally:
        await server.stop(0)
