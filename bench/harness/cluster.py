"""A real cluster for a benchmark: separate processes and an empty data directory on disk."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from bench.harness.usage import trim, unshared_bytes
from tidemark.local.cluster import SERVICES, LocalCluster, ServiceName


@asynccontextmanager
async def running_cluster(
    directory: Path,
    *,
    partitions: int = 4,
    variables: Mapping[str, str] | None = None,
    storage_module: str = "storage_svc",
) -> AsyncIterator[LocalCluster]:
    """A healthy cluster with data and logs in the directory; stopped at the end.

    Figures are compared over time, so the number of partitions is not that of a new cluster.
    """
    cluster = LocalCluster(
        directory / "data",
        log_dir=directory / "logs",
        partitions=partitions,
        environment=dict.fromkeys(SERVICES, variables or {}),
        modules={"storage": storage_module},
    )
    async with cluster:
        yield cluster


async def memory_of(cluster: LocalCluster) -> dict[ServiceName, int]:
    """Unshared memory of each service, after it has returned unused memory."""
    memory: dict[ServiceName, int] = {}
    for name in SERVICES:
        await trim(cluster.pid(name), cluster.address(name))
        memory[name] = unshared_bytes(cluster.pid(name))
    return memory
