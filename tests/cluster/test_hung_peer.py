"""A peer that hangs without closing its connections, as a stopped or frozen process does."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from tidemark.clock import SystemClock
from tidemark.errors import Unavailable
from tidemark.local.ports import free_address
from tidemark.local.service_process import ServiceProcess
from tidemark.rpc import open_channel

NOTICED_WITHIN_MS = 20_000
"""It takes 4.5 s; without a timeout of its own, a ping takes a minute. The rest is for machines
that are busy."""


async def test_a_peer_that_hangs_is_given_up_within_seconds(tmp_path: Path) -> None:
    """S2, C3: calls that wait for it end with UNAVAILABLE."""
    address = free_address()
    peer = ServiceProcess(
        "storage",
        "storage_svc",
        address=address,
        environment={
            "TIDEMARK_STORAGE_LISTEN": address,
            "TIDEMARK_STORAGE_DATA_DIR": str(tmp_path / "data"),
            "TIDEMARK_STORAGE_AWAIT_SWEEP": "false",
        },
        log_file=tmp_path / "storage.log",
    )
    await peer.start()
    try:
        await peer.wait_healthy()
        async with open_channel(address) as channel:
            watch = HealthStub(channel).Watch(HealthCheckRequest())  # type: ignore[attr-defined]
            watching = aiter(watch)
            await anext(watching)

            os.kill(peer.pid, signal.SIGSTOP)

            with pytest.raises(Unavailable):
                await SystemClock().wait_for(anext(watching), NOTICED_WITHIN_MS)
    finally:
        os.kill(peer.pid, signal.SIGCONT)
        await asyncio.shield(peer.kill())
