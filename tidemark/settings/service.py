"""Settings of all services, and the addresses at which services find each other."""

from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from tidemark import limits
from tidemark.settings.declaration import Settings, part, setting
from tidemark.settings.telemetry import TelemetrySettings
from tidemark.settings.variables import (
    Address,
    Addresses,
    Identifier,
    Integer,
    RegistryUrl,
    split_address,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings(Settings):
    """Settings of all services."""

    cluster_id: str = setting(
        "TIDEMARK_CLUSTER_ID",
        Identifier(),
        default="tidemark",
        doc="Id of the cluster. It is stored with the data; data of another cluster is rejected.",
    )
    partitions: int = setting(
        "TIDEMARK_PARTITIONS",
        Integer(0, limits.PARTITIONS_MAX),
        default=0,
        doc="Number of partitions, fixed once data is stored. 0: the number that the data has, and "
        f"{limits.PARTITIONS_DEFAULT} for new data; the other services ask storage for it. A "
        "number that differs from that of the data is rejected.",
    )
    shutdown_grace_ms: int = setting(
        "TIDEMARK_SHUTDOWN_GRACE_MS",
        Integer(0, 600_000, unit="ms"),
        default=10_000,
        doc="How long a stopping service waits for open calls to finish.",
    )
    telemetry: TelemetrySettings = part(TelemetrySettings)  # noqa: RUF009 - a field


def addresses_of_storage() -> Any:
    return setting(
        "TIDEMARK_STORAGE_ADDRESSES",
        Addresses(),
        default=("127.0.0.1:7410",),
        doc="Addresses of all storage nodes of the cluster, the same for all services. With the "
        "engine `redis` and a registry, one or several of them, or the address of a load "
        "balancer before them: the others are found through it.",
    )


def url_of_registry() -> Any:
    return setting(
        "TIDEMARK_REGISTRY_URL",
        RegistryUrl(),
        default="",
        secret=True,
        doc="Redis or Valkey server in which brokers find each other and share the partitions, "
        "with failover, in place of `TIDEMARK_BROKERS`. Storage nodes with the engine `redis` do "
        "the same there; those of any engine report brokers there whose connection breaks. The "
        "same for all of them. Empty: brokers are static, and one storage node opens all "
        "partitions of the engine `redis`.",
    )


def is_wildcard(address: str) -> bool:
    """Whether it is an address to listen on that no other process can call."""
    host, _ = split_address(address)
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False  # a name


def address_of_lifecycle() -> Any:
    return setting(
        "TIDEMARK_LIFECYCLE_ADDRESS",
        Address(),
        default="127.0.0.1:7420",
        doc="Address of the lifecycle service.",
    )
