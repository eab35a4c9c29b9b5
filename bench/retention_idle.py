"""Benchmark `retention-idle`: the retention service while nothing is due, and how due work starts.

Figures are those of the service with all processes below it. The service is idle at first, then
messages become due and a pass is requested, and then Spark stops again.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import tidemark
from bench.harness.benchmark import Bench, benchmark, once
from bench.harness.cluster import running_cluster
from tidemark.api.lifecycle.v1 import jobs_pb2
from tidemark.api.lifecycle.v1.jobs_pb2_grpc import JobServiceStub
from tidemark.local.cluster import LocalCluster
from tidemark.local.ports import free_address
from tidemark.local.service_process import ServiceProcess
from tidemark.rpc import open_channel

MEMORY_MB_MAX: Final = 150.0
CPU_PERCENT_MAX: Final = 0.3
START_S_MAX: Final = 20.0

_MESSAGES: Final = 100
_TOPIC: Final = "due"
_IDLE_STOP_S: Final = 5
_TICKS_PER_S: Final = 100
_PAGE_BYTES: Final = 4096

Figures = dict[str, float]


@benchmark("retention-idle", "memory and CPU of an idle retention service, and the start of Spark")
async def retention_idle(bench: Bench) -> None:
    window_s = bench.size(full=120, quick=2)
    bench.settings |= {"window_s": window_s, "messages": _MESSAGES, "idle_stop_s": _IDLE_STOP_S}
    async with running_cluster(bench.directory, partitions=4) as cluster:
        figures = await _measure(cluster, bench, window_s)
    bench.tables.append([once("retention service", figures)])
    bench.at_most("idle, MB", figures["idle_mb"], MEMORY_MB_MAX)
    bench.at_most("idle, % of a core", figures["idle_cpu_percent"], CPU_PERCENT_MAX)
    bench.at_most("first pass with work, s until Spark runs", figures["spark_after_s"], START_S_MAX)
    bench.at_most("idle again, MB", figures["after_stop_mb"], MEMORY_MB_MAX)


async def _measure(cluster: LocalCluster, bench: Bench, window_s: int) -> Figures:
    service = _service(cluster.address("storage"), bench.directory)
    bench.progress("the service starts, and its first pass finds nothing")
    await service.start()
    try:
        await service.wait_healthy()
        await _until(lambda: "RetentionService: Cleaned up" in _log(service), "a first pass")
        bench.progress(f"idle for {window_s} s")
        cpu_s = await _cpu_s(service.pid, window_s)
        figures = {
            "idle_mb": _memory_mb(service.pid),
            "idle_cpu_percent": 100 * cpu_s / window_s,
        }
        assert "Spark runs" not in _log(service), "Spark was started although nothing was due"
        bench.progress(f"{_MESSAGES} messages become due, and a pass is asked for")
        await _make_due(cluster)
        began = time.perf_counter()
        running = asyncio.ensure_future(_run_pass(service.address))
        await _until(lambda: "Spark runs" in _log(service), "Spark")
        figures["spark_after_s"] = time.perf_counter() - began
        removed = await running
        figures["pass_ended_after_s"] = time.perf_counter() - began
        assert removed == _MESSAGES, f"{removed} of {_MESSAGES} messages were removed"
        figures["working_mb"] = _memory_mb(service.pid)
        bench.progress(f"Spark stops after {_IDLE_STOP_S} s")
        await _until(lambda: "Spark stopped" in _log(service), "the stop of Spark")
        figures["after_stop_mb"] = _memory_mb(service.pid)
        return figures
    finally:
        await service.stop()


def _service(storage_address: str, directory: Path) -> ServiceProcess:
    address = free_address()
    return ServiceProcess(
        "retention",
        "spark_batch",
        address=address,
        arguments=["serve"],
        environment={
            "TIDEMARK_STORAGE_ADDRESSES": storage_address,
            "TIDEMARK_RETENTION_LISTEN": address,
            "TIDEMARK_SPARK_OPTIONS": "spark.ui.showConsoleProgress=false",
            "TIDEMARK_SPARK_IDLE_STOP_S": str(_IDLE_STOP_S),
        },
        log_file=directory / "retention.log",
    )


async def _make_due(cluster: LocalCluster) -> None:
    async with tidemark.connect(cluster.address("broker")) as client:
        await client.create_topic(_TOPIC, retention_enabled=True, retention_seconds=1)
        for number in range(_MESSAGES):
            publisher = await client.publisher(f"{_TOPIC}/{number}")
            await publisher.publish(b"x")
    await asyncio.sleep(1.1)  # until they are too old


async def _run_pass(address: str) -> int:
    """The messages that a pass removes, which begins now."""
    async with open_channel(address) as channel:
        stub: Any = JobServiceStub(channel)
        done = await stub.RunJob(jobs_pb2.RunJobRequest(name=jobs_pb2.JOB_NAME_RETENTION))
    return sum(each.due for each in done.findings if each.rule == "expired")


async def _until(condition: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(300):
            while not condition():  # noqa: ASYNC110 - other processes, which set no event
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise RuntimeError(f"{what} did not happen in time") from None


def _log(service: ServiceProcess) -> str:
    assert service.log_file is not None
    return service.log_file.read_text()


def _family(pid: int) -> list[int]:
    """The process and all processes below it."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parents[int(stat.parent.name)] = int(_fields(stat)[1])
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found


def _fields(stat: Path) -> list[str]:
    return stat.read_text().rpartition(")")[2].split()


def _memory_mb(pid: int) -> float:
    pages = 0
    for each in _family(pid):
        with suppress(OSError):
            pages += int(Path(f"/proc/{each}/statm").read_text().split()[1])
    return pages * _PAGE_BYTES / 1e6


async def _cpu_s(pid: int, window_s: int) -> float:
    """Processor time of the family in a time to come, with that of members that end in it."""
    before = _ticks(pid)
    after = dict(before)
    for _ in range(window_s):
        await asyncio.sleep(1)
        after |= _ticks(pid)
    return sum(ticks - before.get(each, 0) for each, ticks in after.items()) / _TICKS_PER_S


def _ticks(pid: int) -> dict[int, int]:
    ticks = {}
    for each in _family(pid):
        with suppress(OSError):
            ticks[each] = sum(map(int, _fields(Path(f"/proc/{each}/stat"))[11:13]))
    return ticks
