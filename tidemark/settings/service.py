"""Settings of all services, and the addresses at which services find each other."""

from dataclasses import dataclass
from typing import Any

from tidemark import limits
from tidemark.settings.declaration import Settings, part, setting
from tidemark.settings.telemetry import TelemetrySettings
from tidemark.settings.variables import Address, Addresses, Identifier, Integer


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
        doc="Addresses of all storage nodes of the cluster, the same for all services.",
    )


def address_of_lifecycle() -> Any:
    return setting(
        "TIDEMARK_LIFECYCLE_ADDRESS",
        Address(),
        default="127.0.0.1:7420",
        doc="Address of the lifecycle service.",
    )
