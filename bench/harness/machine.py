"""Facts about machine and software that results depend on."""

import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Final

_PACKAGES: Final = ("tidemark", "grpcio", "protobuf", "rocksdict", "uvloop", "redis", "pyspark")


def machine_facts(directory: Path) -> dict[str, object]:
    """The machine, and the file system of the directory that the benchmark writes to."""
    return {
        "cpu": _field(Path("/proc/cpuinfo"), "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": f"{platform.system()} {platform.release()}",
        "file_system": file_system(directory),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def versions() -> Mapping[str, str]:
    """Versions of Python and of the relevant packages that are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def file_system(directory: Path) -> str:
    """The type of the file system that holds the directory: `ext4`, `tmpfs`, ..."""
    path = directory.resolve()
    best, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, mounted_kind, *_ = line.split(" ")
        # A later mount hides an earlier one at the same path.
        if path.is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, mounted_kind
    return kind


def _field(file: Path, name: str) -> str:
    for line in file.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
