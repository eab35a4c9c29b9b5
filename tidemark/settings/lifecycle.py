"""Settings of the lifecycle service: sweep intervals, leases and timeouts."""

from dataclasses import dataclass

from tidemark import limits
from tidemark.settings.declaration import setting
from tidemark.settings.service import ServiceSettings, addresses_of_storage
from tidemark.settings.variables import LISTEN, Address, Integer


@dataclass(frozen=True, slots=True, kw_only=True)
class LifecycleSettings(ServiceSettings):
    """The lifecycle service, `python -m lifecycle_svc`."""

    listen: str = setting(
        "TIDEMARK_LIFECYCLE_LISTEN",
        LISTEN,
        default="127.0.0.1:7420",
        doc="Address that the lifecycle service listens on; port 0 picks a free port.",
    )
    advertise: str = setting(
        "TIDEMARK_LIFECYCLE_ADVERTISE",
        Address(),
        default="",
        doc="Address at which storage reaches this replica; empty: the listen address.",
    )
    storage_addresses: tuple[str, ...] = addresses_of_storage()
    sweep_interval_ms_max: int = setting(
        "TIDEMARK_SWEEP_INTERVAL_MS_MAX",
        Integer(100, 3_600_000, unit="ms"),
        default=60_000,
        doc="Longest time between two sweeps of a partition, when nothing is due.",
    )
    sweep_interval_ms_min: int = setting(
        "TIDEMARK_SWEEP_INTERVAL_MS_MIN",
        Integer(1, 60_000, unit="ms"),
        default=20,
        doc="Shortest time between two sweeps of a partition; work due in between is batched.",
    )
    sweep_lease_ms: int = setting(
        "TIDEMARK_SWEEP_LEASE_MS",
        Integer(1_000, limits.SWEEP_LEASE_MS_MAX, unit="ms"),
        default=15_000,
        doc="Time after which another replica takes over the partitions of a dead replica.",
    )
    sweep_timeout_ms: int = setting(
        "TIDEMARK_SWEEP_TIMEOUT_MS",
        Integer(100, 600_000, unit="ms"),
        default=10_000,
        doc="Timeout of each call of a sweep; the sweep fails after it.",
    )
