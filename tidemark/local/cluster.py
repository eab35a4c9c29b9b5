"""A cluster on this machine: processes for storage, brokers, lifecycle and, optionally, the
retention scheduler.

Decides addresses, directories and the order of starting and stopping; `service_process` runs each
process.
"""

import asyncio
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self

from tidemark.clock import Clock
from tidemark.local.ports import free_ports, join_address, reached_at
from tidemark.local.service_process import (
    HEALTHY_TIMEOUT_MS,
    STOP_TIMEOUT_MS,
    ServiceFailed,
    ServiceProcess,
)

ServiceName = str
"""The kind of a service, and from the second of its kind on a number: `storage`, `storage-2`."""

SERVICES: Final[tuple[ServiceName, ...]] = ("storage", "broker", "lifecycle")
"""The kinds of services of every cluster, in start order. They stop in reverse order, so that no
service loses one that it depends on."""

_COMMANDS: Final[Mapping[ServiceName, tuple[str, ...]]] = {
    "storage": ("storage_svc",),
    "broker": ("broker_svc",),
    "lifecycle": ("lifecycle_svc",),
    "retention": ("spark_batch", "serve"),
}

_HEALTH_SERVICES: Final[Mapping[ServiceName, str]] = {
    "storage": "tidemark.api.storage.v1.StorageService",
    "broker": "tidemark.api.broker.v1.BrokerService",
    "lifecycle": "tidemark.api.lifecycle.v1.LifecycleService",
    "retention": "tidemark.api.lifecycle.v1.JobService",
}

Environments = Mapping[ServiceName, Mapping[str, str]]
_NO_ENVIRONMENTS: Final[Environments] = MappingProxyType({})
_OWN_MODULES: Final[Mapping[ServiceName, str]] = MappingProxyType({})
_ANY_PORTS: Final[Mapping[ServiceName, int]] = MappingProxyType({})


def names_of(kind: str, count: int) -> list[ServiceName]:
    """The names of so many services of a kind."""
    return [kind if number == 1 else f"{kind}-{number}" for number in range(1, count + 1)]


def _broker_id(place: int) -> str:
    return f"broker-{place}"


def kind_of(name: ServiceName) -> str:
    return name.partition("-")[0]


@dataclass(frozen=True, slots=True)
class Stopped:
    """How one service stopped."""

    name: ServiceName
    exit_code: int

    @property
    def clean(self) -> bool:
        """SIGTERM kills a service only before it has started to serve."""
        return self.exit_code in (0, -signal.SIGTERM)


class LocalCluster:
    """An async context manager; or call `start` and `stop`."""

    def __init__(
        self,
        data_dir: Path,
        *,
        host: str = "127.0.0.1",
        ports: Mapping[ServiceName, int] = _ANY_PORTS,
        partitions: int | None = None,
        log_dir: Path | None = None,
        environment: Environments = _NO_ENVIRONMENTS,
        modules: Mapping[ServiceName, str] = _OWN_MODULES,
        stop_timeout_ms: int = STOP_TIMEOUT_MS,
        clock: Clock | None = None,
        retention: bool = False,
        storages: int = 1,
        brokers: int = 1,
        registry_url: str = "",
    ) -> None:
        """A missing port, or port 0, is chosen. Without `log_dir`, logs go to stderr.

        `retention` also starts the retention scheduler, which needs PySpark and Java.
        `environment` adds variables per service, or kind of services, to those of this process and
        of the cluster; `modules` replaces the module of a kind of services, for example by one that
        fails on demand. The first of several storage nodes has its data in `data_dir` as a lone
        one has, the others in directories below it. With `registry_url`, brokers find each other in
        that Redis or Valkey server, else they are static.
        """
        self.data_dir = data_dir
        self.log_dir = log_dir
        self._stop_timeout_ms = stop_timeout_ms
        counts = {
            "storage": storages,
            "broker": brokers,
            "lifecycle": 1,
            "retention": int(retention),
        }
        names = [name for kind, count in counts.items() for name in names_of(kind, count)]
        ports = {name: port for name, port in ports.items() if name in names}
        unset = [name for name in names if not ports.get(name)]
        chosen = {**ports, **dict(zip(unset, free_ports(host, len(unset)), strict=True))}
        self._addresses = {
            name: join_address(reached_at(host), port) for name, port in chosen.items()
        }
        nodes = [self._addresses[name] for name in names_of("storage", storages)]
        self.storage_addresses = ",".join(nodes)
        """The value of TIDEMARK_STORAGE_ADDRESSES."""
        members = [
            f"{_broker_id(place)}={self._addresses[name]}"
            for place, name in enumerate(names_of("broker", brokers))
        ]
        variables = {
            "TIDEMARK_BROKERS": ",".join(members) if brokers > 1 and not registry_url else "",
            "TIDEMARK_REGISTRY_URL": registry_url,
            "TIDEMARK_STORAGE_ADDRESSES": self.storage_addresses,
            "TIDEMARK_LIFECYCLE_ADDRESS": self._addresses["lifecycle"],
        }
        if partitions is not None:
            variables["TIDEMARK_PARTITIONS"] = str(partitions)
        self._services: dict[ServiceName, ServiceProcess] = {
            name: ServiceProcess(
                name,
                modules.get(kind_of(name), _COMMANDS[kind_of(name)][0]),
                arguments=_COMMANDS[kind_of(name)][1:],
                address=self._addresses[name],
                health_service=_HEALTH_SERVICES[kind_of(name)],
                environment={
                    **variables,
                    **self._own_variables(name, join_address(host, chosen[name])),
                    **environment.get(kind_of(name), {}),
                    **environment.get(name, {}),
                },
                log_file=None if log_dir is None else log_dir / f"{name}.log",
                clock=clock,
            )
            for name in names
        }

    def _own_variables(self, name: ServiceName, listen: str) -> dict[str, str]:
        """The variables in which services of one kind differ."""
        prefix = f"TIDEMARK_{kind_of(name).upper()}"
        own = {f"{prefix}_LISTEN": listen}
        if kind_of(name) in ("storage", "broker"):
            own[f"{prefix}_ADVERTISE"] = self._addresses[name]
        if kind_of(name) == "storage":
            below = self.data_dir if name == "storage" else self.data_dir / name
            own[f"{prefix}_DATA_DIR"] = str(below)
        if kind_of(name) == "broker" and "broker-2" in self._addresses:
            own[f"{prefix}_ID"] = _broker_id(int(name.partition("-")[2] or 1) - 1)
        return own

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    def address(self, name: ServiceName) -> str:
        """`host:port` at which the service is reached from this machine."""
        return self._addresses[name]

    @property
    def services(self) -> tuple[ServiceName, ...]:
        """The services of this cluster, in start order."""
        return tuple(self._services)

    def services_of(self, kind: str) -> list[ServiceName]:
        return [name for name in self._services if kind_of(name) == kind]

    def pid(self, name: ServiceName) -> int:
        return self._services[name].pid

    def running(self, name: ServiceName) -> bool:
        return self._services[name].running

    def log_file(self, name: ServiceName) -> Path | None:
        """None if its log goes to stderr."""
        return self._services[name].log_file

    async def start(self, names: Sequence[ServiceName] | None = None) -> None:
        """Start all or the named services at once, and wait until they are healthy.

        After a failure, call `stop` to end those that were started. `restart` starts the others.
        """
        self._make_directories()
        names = names or self.services
        for name in names:
            await self._services[name].start()
        await self.wait_healthy(names)

    async def wait_healthy(self, names: Sequence[ServiceName] | None = None) -> None:
        """Return once all are healthy; raises ServiceFailed for the first that fails."""
        waits = [
            asyncio.ensure_future(self._services[name].wait_healthy())
            for name in names or self.services
        ]
        try:
            await asyncio.gather(*waits)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.wait(waits)

    async def wait_failure(self, name: ServiceName) -> ServiceFailed:
        """Wait until a service ends by itself; returns how."""
        service = self._services[name]
        await service.wait()
        return service.failure()

    def last_error(self, name: ServiceName) -> str:
        """The last line of the log of a service, if that is an error or a warning; else empty."""
        return self._services[name].last_error()

    async def kill(self, name: ServiceName) -> None:
        """Kill a service, as a crash would."""
        await self._services[name].kill()

    async def terminate(self, name: ServiceName) -> int:
        """Stop a service gracefully; returns its exit code."""
        return await self._services[name].stop(self._stop_timeout_ms)

    async def restart(
        self, name: ServiceName, healthy_timeout_ms: int = HEALTHY_TIMEOUT_MS
    ) -> None:
        """Start a service again at the same address, stopping it first if it is running.

        Raises ServiceFailed if it ends or does not become healthy in time.
        """
        service = self._services[name]
        if service.running:
            await self.terminate(name)
        await service.start()
        await service.wait_healthy(healthy_timeout_ms)

    async def stop(self) -> list[Stopped]:
        """Stop the running services, one after the other; returns how each stopped."""
        try:
            return [
                Stopped(name, await self.terminate(name))
                for name in reversed(self._services)
                if self.running(name)
            ]
        finally:  # also when the stop is cancelled
            for service in self._services.values():
                if service.running:
                    await service.kill()

    def _make_directories(self) -> None:
        self.data_dir.mkdir(parents=True, exist_ok=True)
        if self.log_dir is None:
            return
        self.log_dir.mkdir(parents=True, exist_ok=True)
        for name in self._services:
            log = self.log_dir / f"{name}.log"
            if log.exists():  # a crash can still be investigated after the next start
                log.replace(log.with_suffix(".previous.log"))
