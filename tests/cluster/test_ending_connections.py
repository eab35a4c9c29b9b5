"""Connections that end as soon as they are ready, as under heavy load (ADR 39)."""

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.ending_connections import ending_connections
from tests.support.local_broker import until
from tidemark.local.ports import free_address
from tidemark.local.service_process import ServiceProcess

PARTITIONS = 2
ADDRESS_SPACE_BYTES = 3 * 1024**3
"""Far more than a service needs. One that grows without bound ends here, not the machine."""


@asynccontextmanager
async def _process(
    name: str, log_file: Path, health_service: str, **variables: str
) -> AsyncIterator[ServiceProcess]:
    """A service that was started; it need not be healthy yet."""
    address = free_address()
    environment = {
        f"TIDEMARK_{name.upper()}_LISTEN": address,
        "TIDEMARK_PARTITIONS": str(PARTITIONS),
        **variables,
    }
    process = ServiceProcess(
        name,
        f"{name}_svc",
        address=address,
        health_service=health_service,
        environment=environment,
        log_file=log_file,
    )
    await process.start()
    try:
        resource.prlimit(process.pid, resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, -1))
        yield process
    finally:
        await asyncio.shield(process.kill())


async def test_a_broker_claims_again_after_connections_that_ended_as_they_began(
    tmp_path: Path,
) -> None:
    """S2, C3: its claims fail and are repeated; it neither hangs nor grows.

    gRPC's own repeats of the claims would never end, and take memory each.
    """
    storage_log, broker_log = tmp_path / "storage.log", tmp_path / "broker.log"
    async with (
        _process(
            "storage",
            storage_log,
            "tidemark.api.storage.v1.StorageService",
            TIDEMARK_STORAGE_DATA_DIR=str(tmp_path / "data"),
            TIDEMARK_STORAGE_AWAIT_SWEEP="false",
        ) as storage,
        ending_connections(storage.address) as proxy,
        _process(
            "broker",
            broker_log,
            "tidemark.api.broker.v1.BrokerService",
            TIDEMARK_STORAGE_ADDRESSES=proxy.address,
        ) as broker,
    ):
        await storage.wait_healthy()

        async def claimed_in_vain() -> bool:
            assert broker.running, "it grew until it could not any more"
            return broker_log.read_text().count('"link lost"') >= 3 * PARTITIONS

        await until(claimed_in_vain)
        proxy.mend()
        await broker.wait_healthy()

        assert proxy.ended


async def test_metrics_are_not_exported_over_connections_that_ended_as_they_began(
    tmp_path: Path,
) -> None:
    """O3: an export fails at once, and the service goes on without growing."""
    log = tmp_path / "broker.log"
    async with (
        ending_connections(upstream="") as collector,
        _process(
            "broker",
            log,
            "",
            TIDEMARK_STORAGE_ADDRESSES=free_address(),
            OTEL_EXPORTER_OTLP_METRICS_ENDPOINT=f"http://{collector.address}",
            OTEL_METRIC_EXPORT_INTERVAL="10",
        ) as broker,
    ):

        async def exported_in_vain() -> bool:
            assert broker.running, "it grew until it could not any more"
            return "StatusCode.UNAVAILABLE encountered while exporting metrics" in log.read_text()

        await until(exported_in_vain)

        assert collector.ended
