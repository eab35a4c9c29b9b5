"""A real cluster for a benchmark: separate processes, an empty data directory on a real disk."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from bench.usage import trim, unshared_bytes
from tidemark.local.cluster import SERVICES, LocalCluster, ServiceName


@asynccontextmanager
async def running_cluster(
    directory: Path,
    *,
    partitions: int | None = None,
    variables: Mapping[str, str] | None = None,
    storage_module: str = "storage_svc",
) -> AsyncIterator[LocalCluster]:
    """A healthy cluster with its data and logs below the directory; stopped at the end."""
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
    """Unshared bytes of each service, after it has given back what it does not use."""
    memory: dict[ServiceName, int] = {}
    for name in SERVICES:
        await trim(cluster.pid(name), cluster.address(name))
        memory[name] = unshared_bytes(cluster.pid(name))
    return memory
