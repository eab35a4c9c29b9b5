"""CPU time and unshared memory of another process. Linux only."""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from tidemark.rpc import open_channel
from tidemark.service.memory import TRIM_SIGNAL


def cpu_ns(pid: int) -> int:
    """CPU time of all its threads so far, finer than the 10 ms ticks of /proc/PID/stat."""
    # As clock_getcpuclockid(3) computes it: the id of another process's CPU clock.
    return time.clock_gettime_ns((~pid << 3) | 2)


def unshared_bytes(pid: int) -> int:
    """Memory that the end of the process would free: private pages, clean and dirty."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * sum(int(kib) for kib in re.findall(r"^Private_\w+: +(\d+) kB$", text, re.M))


async def trim(pid: int, address: str) -> None:
    """Make a service return unused memory; it must have called `install_memory_trim`."""
    if not _catches(pid, TRIM_SIGNAL):  # the signal would kill it
        raise RuntimeError(f"process {pid} has no handler for {TRIM_SIGNAL.name}")
    os.kill(pid, TRIM_SIGNAL)
    await answered_after(address)


async def answered_after(address: str) -> None:
    """Wait until a service has handled the signals that it was sent."""
    async with open_channel(address) as channel:
        health: Any = HealthStub(channel)  # its published types lack Check
        await health.Check(HealthCheckRequest())


def _catches(pid: int, number: signal.Signals) -> bool:
    caught = re.search(r"^SigCgt:\s+([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)
