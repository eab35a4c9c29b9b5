"""Benchmark `rpc`: the cost of an empty call through one and two hops, and of one disk sync.

These are the floors of all other figures: a publish cannot be faster than its round trips and its
sync. Calls are made one after the other over open connections; the CPU time of each process is
divided by the number of calls.
"""

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Final

import grpc

from bench.harness.benchmark import Bench, benchmark
from bench.harness.figures import percentile
from bench.harness.usage import cpu_ns
from bench.rpc.server import SERVICE, STREAM, UNARY
from tidemark.local.ports import free_address
from tidemark.local.service_process import ServiceProcess
from tidemark.rpc import open_channel

HOST: Final = "127.0.0.1"
EMPTY: Final = b""
SYNC_BYTES: Final = 1024

Call = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Calls:
    """A round of calls, and the other processes that take part in them."""

    call: Call
    count: int
    pids: Mapping[str, int]

    async def measure(self) -> dict[str, float]:
        used = {name: cpu_ns(pid) for name, pid in self._everybody().items()}
        times_ns = []
        for _ in range(self.count):
            begin = time.perf_counter_ns()
            await self.call()
            times_ns.append(time.perf_counter_ns() - begin)
        cpu = {
            f"{name}_cpu_us": (cpu_ns(pid) - used[name]) / self.count / 1000
            for name, pid in self._everybody().items()
        }
        return {
            "p50_us": percentile(times_ns, 50) / 1000,
            "p99_us": percentile(times_ns, 99) / 1000,
            **cpu,
        }

    def _everybody(self) -> dict[str, int]:
        return {"client": os.getpid(), **self.pids}


@benchmark("rpc", "an empty call and a stream frame through one and two hops, beside an fdatasync")
async def rpc(bench: Bench) -> None:
    count = bench.size(full=1000, quick=50)
    bench.settings |= {"calls_per_round": count, "sync_bytes": SYNC_BYTES}
    async with AsyncExitStack() as opened:
        echo, forwarder = await opened.enter_async_context(servers(bench.directory))
        near = await opened.enter_async_context(open_channel(echo.address))
        far = await opened.enter_async_context(open_channel(forwarder.address))
        file = opened.enter_context((bench.directory / "synced").open("wb", buffering=0))
        one_hop = {"echo": echo.pid}
        two_hops = {"echo": echo.pid, "forwarder": forwarder.pid}
        calls = {
            "unary, 1 hop": Calls(unary_call(near), count, one_hop),
            "unary, 2 hops": Calls(unary_call(far), count, two_hops),
            "stream, 1 hop": Calls(stream_call(near), count, one_hop),
            "stream, 2 hops": Calls(stream_call(far), count, two_hops),
            "write and fdatasync": Calls(sync_call(file, bytes(SYNC_BYTES)), count, {}),
        }
        await bench.measure({name: each.measure for name, each in calls.items()})


@asynccontextmanager
async def servers(directory: Path) -> AsyncIterator[tuple[ServiceProcess, ServiceProcess]]:
    """The echo and, in front of it, the forwarder."""
    echo_at, forwarder_at = free_address(HOST), free_address(HOST)
    echo = _server("echo", directory, echo_at)
    forwarder = _server("forwarder", directory, forwarder_at, echo_at)
    try:
        for server in (echo, forwarder):
            await server.start()
        for server in (echo, forwarder):
            await server.wait_healthy()
        yield echo, forwarder
    finally:
        for server in (forwarder, echo):
            if server.running:
                await server.stop()


def _server(name: str, directory: Path, *addresses: str) -> ServiceProcess:
    return ServiceProcess(
        name,
        "bench.rpc.server",
        arguments=addresses,
        address=addresses[0],
        health_service=SERVICE,
        log_file=directory / f"{name}.log",
    )


def unary_call(channel: grpc.aio.Channel) -> Call:
    method: Any = channel.unary_unary(UNARY)

    async def call() -> None:
        await method(EMPTY)

    return call


def stream_call(channel: grpc.aio.Channel) -> Call:
    """Frames on one stream, which is open until the channel closes."""
    stream: Any = channel.stream_stream(STREAM)()

    async def round_trip() -> None:
        await stream.write(EMPTY)
        await stream.read()

    return round_trip


def sync_call(file: FileIO, payload: bytes) -> Call:
    """Append the same bytes repeatedly, as a write-ahead log does."""

    async def write() -> None:
        file.write(payload)
        os.fdatasync(file)

    return write
