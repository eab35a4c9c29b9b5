"""Settings: the only module that reads the environment.

Each setting is declared once, with its variable, default, meaning and what it accepts; services
get frozen values and `docs/CONFIG.md` is printed from the same declarations. A process keeps the
settings it started with: nothing here watches for changes.

To add a setting, add a field with `setting(...)` to the class of its service.
"""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from tidemark import limits
from tidemark.variables import (
    LISTEN,
    Address,
    Choice,
    Directory,
    Identifier,
    Integer,
    Kind,
    Pairs,
    SettingsError,
    Switch,
    Text,
    Variable,
)

T = TypeVar("T")

PREFIX: Final = "TIDEMARK_"


def setting(name: str, kind: Kind[T], *, default: T, doc: str) -> Any:
    """A dataclass field that is filled from the variable `name`."""
    return field(default=default, metadata={"variable": Variable(name, kind, default, doc)})


def part(settings: type["Settings"]) -> Any:
    """A dataclass field that holds settings shared with other services."""
    return field(default_factory=settings, metadata={"part": settings})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The base of all settings: knows how to fill its fields and how to list them."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Raises SettingsError for the first value that cannot be used."""
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for each in fields(cls):
            if "part" in each.metadata:
                values[each.name] = each.metadata["part"].from_environment(environ)
            else:
                values[each.name] = each.metadata["variable"].read(environ)
        return cls(**values)

    @classmethod
    def variables(cls) -> Iterator[Variable[Any]]:
        """Every variable this class reads, in the order of declaration."""
        for each in fields(cls):
            if "part" in each.metadata:
                yield from each.metadata["part"].variables()
            else:
                yield each.metadata["variable"]


_COLLECTOR: Final = Text("a URL, such as http://collector:4317")


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySettings(Settings):
    """Logs, traces and metrics. Variables that begin with OTEL_ are OpenTelemetry's own; only those
    that decide whether something is exported are read here, the rest by its SDK."""

    log_level: str = setting(
        "TIDEMARK_LOG_LEVEL",
        Choice(("debug", "info", "warning", "error")),
        default="info",
        doc="The least severe log lines that are written.",
    )
    log_format: str = setting(
        "TIDEMARK_LOG_FORMAT",
        Choice(("json", "text")),
        default="json",
        doc="One JSON object per line for machines, or text for people.",
    )
    metrics_listen: str = setting(
        "TIDEMARK_METRICS_LISTEN",
        LISTEN,
        default="",
        doc="Where Prometheus may scrape metrics; empty is off.",
    )
    otel_sdk_disabled: bool = setting(
        "OTEL_SDK_DISABLED",
        Switch(),
        default=False,
        doc="Turns off all traces and metrics, whatever else is set.",
    )
    otlp_endpoint: str = setting(
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        _COLLECTOR,
        default="",
        doc="Collector that gets traces and metrics over OTLP/gRPC; empty is off.",
    )
    otlp_traces_endpoint: str = setting(
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        _COLLECTOR,
        default="",
        doc="Collector for traces, if it is another one.",
    )
    otlp_metrics_endpoint: str = setting(
        "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
        _COLLECTOR,
        default="",
        doc="Collector for metrics, if it is another one.",
    )
    traces_exporter: str = setting(
        "OTEL_TRACES_EXPORTER",
        Choice(("otlp", "none")),
        default="otlp",
        doc="`none` keeps traces from a collector that is set for both.",
    )
    metrics_exporter: str = setting(
        "OTEL_METRICS_EXPORTER",
        Choice(("otlp", "none")),
        default="otlp",
        doc="`none` keeps metrics from a collector that is set for both.",
    )
    traces_sampler: str = setting(
        "OTEL_TRACES_SAMPLER",
        Text("the name of a sampler, such as parentbased_always_on"),
        default="",
        doc="Which traces are kept, with OTEL_TRACES_SAMPLER_ARG for a ratio. Unset, the caller's "
        "decision is followed, and one in a hundred of the traces that begin here is kept.",
    )

    @property
    def traces_endpoint(self) -> str:
        """Where spans go; empty when nothing is traced."""
        if self.otel_sdk_disabled or self.traces_exporter == "none":
            return ""
        return self.otlp_traces_endpoint or self.otlp_endpoint

    @property
    def metrics_endpoint(self) -> str:
        """Where metrics are pushed; empty when they are not."""
        if self.otel_sdk_disabled or self.metrics_exporter == "none":
            return ""
        return self.otlp_metrics_endpoint or self.otlp_endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings(Settings):
    """What every service needs."""

    cluster_id: str = setting(
        "TIDEMARK_CLUSTER_ID",
        Identifier(),
        default="tidemark",
        doc="Name of the cluster. Kept with the data; data of another cluster is refused.",
    )
    partitions: int = setting(
        "TIDEMARK_PARTITIONS",
        Integer(1, limits.PARTITIONS_MAX),
        default=4,
        doc="Number of partitions, the same for all services. Fixed once data is stored.",
    )
    shutdown_grace_ms: int = setting(
        "TIDEMARK_SHUTDOWN_GRACE_MS",
        Integer(0, 600_000, unit="ms"),
        default=10_000,
        doc="How long a stopping service lets open calls finish.",
    )
    telemetry: TelemetrySettings = part(TelemetrySettings)  # noqa: RUF009 - a field


def _storage_address() -> Any:
    return setting(
        "TIDEMARK_STORAGE_ADDRESS",
        Address(),
        default="127.0.0.1:7410",
        doc="Where the storage service is reached.",
    )


def _lifecycle_address() -> Any:
    return setting(
        "TIDEMARK_LIFECYCLE_ADDRESS",
        Address(),
        default="127.0.0.1:7420",
        doc="Where the lifecycle service is reached.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSettings(ServiceSettings):
    """The storage service, `python -m storage_svc`."""

    listen: str = setting(
        "TIDEMARK_STORAGE_LISTEN",
        LISTEN,
        default="127.0.0.1:7410",
        doc="Where the storage service listens; port 0 takes a free one.",
    )
    data_dir: Path = setting(  # noqa: RUF009 - a field
        "TIDEMARK_STORAGE_DATA_DIR",
        Directory(),
        default=Path("tidemark-data"),
        doc="Directory of the stored data, created if it is missing.",
    )
    block_cache_bytes: int = setting(
        "TIDEMARK_STORAGE_BLOCK_CACHE_BYTES",
        Integer(1024 * 1024, 1024**4, unit="bytes"),
        default=64 * 1024 * 1024,
        doc="Memory for blocks, indexes and filters of the tables, shared by all partitions.",
    )
    write_buffer_bytes: int = setting(
        "TIDEMARK_STORAGE_WRITE_BUFFER_BYTES",
        Integer(1024 * 1024, 1024**4, unit="bytes"),
        default=32 * 1024 * 1024,
        doc="Memory for what is not yet in tables, per partition.",
    )
    disk_free_bytes_min: int = setting(
        "TIDEMARK_STORAGE_DISK_FREE_BYTES_MIN",
        Integer(0, 1024**5, unit="bytes"),
        default=256 * 1024 * 1024,
        doc="Watermark of the disk: with less free, publishes are refused; settles and deletions "
        "go on.",
    )
    advertise: str = setting(
        "TIDEMARK_STORAGE_ADVERTISE",
        Address(),
        default="",
        doc="Where lifecycle reaches this process; empty is the address it listens on.",
    )
    lifecycle_address: str = _lifecycle_address()
    await_sweep: bool = setting(
        "TIDEMARK_STORAGE_AWAIT_SWEEP",
        Switch(),
        default=True,
        doc="Whether an opened partition takes no publishes before its first sweep. Without a "
        "lifecycle service, turn it off: nothing is announced then.",
    )
    lifecycle_silent_after_ms: int = setting(
        "TIDEMARK_STORAGE_LIFECYCLE_SILENT_AFTER_MS",
        Integer(0, 86_400_000, unit="ms"),
        default=60_000,
        doc="Silence of the lifecycle service that is an alarm; 0 is off.",
    )
    lifecycle_silent_is_fault: bool = setting(
        "TIDEMARK_STORAGE_LIFECYCLE_SILENT_IS_FAULT",
        Switch(),
        default=False,
        doc="Whether partitions stop serving while the lifecycle service is silent.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSettings(ServiceSettings):
    """The broker, `python -m broker_svc`."""

    broker_id: str = setting(
        "TIDEMARK_BROKER_ID",
        Identifier(),
        default="broker-0",
        doc="Name of this broker, different for every broker of a cluster.",
    )
    listen: str = setting(
        "TIDEMARK_BROKER_LISTEN",
        LISTEN,
        default="127.0.0.1:7400",
        doc="Where the broker listens; port 0 takes a free one.",
    )
    advertise: str = setting(
        "TIDEMARK_BROKER_ADVERTISE",
        Address(),
        default="",
        doc="Where other services and brokers reach this broker; empty is where it listens.",
    )
    storage_address: str = _storage_address()
    lifecycle_address: str = _lifecycle_address()
    client_timeout_ms: int = setting(
        "TIDEMARK_CLIENT_TIMEOUT_MS",
        Integer(1_000, 3_600_000, unit="ms"),
        default=30_000,
        doc="Silence after which a client counts as gone and what it holds goes back.",
    )
    subscriptions_per_group_max: int = setting(
        "TIDEMARK_SUBSCRIPTIONS_PER_GROUP_MAX",
        Integer(1, 100_000_000),
        default=1_000_000,
        doc="Subscriptions of one group, over all clients of this broker.",
    )
    subscriptions_per_broker_max: int = setting(
        "TIDEMARK_SUBSCRIPTIONS_PER_BROKER_MAX",
        Integer(1, 100_000_000),
        default=1_000_000,
        doc="Subscriptions of all clients of this broker.",
    )
    publishers_per_connection_max: int = setting(
        "TIDEMARK_PUBLISHERS_PER_CONNECTION_MAX",
        Integer(1, 10_000_000),
        default=10_000,
        doc="Publishers that a connection keeps; the least recently used leave first.",
    )
    publisher_cache_idle_timeout_ms: int = setting(
        "TIDEMARK_PUBLISHER_CACHE_IDLE_TIMEOUT_MS",
        Integer(0, 86_400_000, unit="ms"),
        default=0,
        doc="Idle time after which a publisher of a connection is dropped; 0 is off.",
    )
    unary_publisher_idle_timeout_ms: int = setting(
        "TIDEMARK_UNARY_PUBLISHER_IDLE_TIMEOUT_MS",
        Integer(100, 86_400_000, unit="ms"),
        default=300_000,
        doc="Idle time after which a publisher of unary calls is dropped.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LifecycleSettings(ServiceSettings):
    """The lifecycle service, `python -m lifecycle_svc`."""

    listen: str = setting(
        "TIDEMARK_LIFECYCLE_LISTEN",
        LISTEN,
        default="127.0.0.1:7420",
        doc="Where the lifecycle service listens; port 0 takes a free one.",
    )
    advertise: str = setting(
        "TIDEMARK_LIFECYCLE_ADVERTISE",
        Address(),
        default="",
        doc="Where storage reaches this replica; empty is the address it listens on.",
    )
    storage_address: str = _storage_address()
    sweep_interval_ms_max: int = setting(
        "TIDEMARK_SWEEP_INTERVAL_MS_MAX",
        Integer(100, 3_600_000, unit="ms"),
        default=60_000,
        doc="Ceiling between two sweeps of a partition in which nothing is due.",
    )
    sweep_interval_ms_min: int = setting(
        "TIDEMARK_SWEEP_INTERVAL_MS_MIN",
        Integer(1, 60_000, unit="ms"),
        default=20,
        doc="Shortest time between two sweeps of a partition: what is due meanwhile is one sweep.",
    )
    sweep_lease_ms: int = setting(
        "TIDEMARK_SWEEP_LEASE_MS",
        Integer(1_000, limits.SWEEP_LEASE_MS_MAX, unit="ms"),
        default=15_000,
        doc="Time after which another replica takes over the partitions of a dead one.",
    )
    sweep_timeout_ms: int = setting(
        "TIDEMARK_SWEEP_TIMEOUT_MS",
        Integer(100, 600_000, unit="ms"),
        default=10_000,
        doc="How long a sweep waits for one answer before it counts as failed.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings(Settings):
    """The command line, `tidemark ...`."""

    address: str = setting(
        "TIDEMARK_ADDRESS",
        Address(),
        default="127.0.0.1:7400",
        doc="Where a broker is reached.",
    )
    storage_address: str = _storage_address()
    lifecycle_address: str = _lifecycle_address()
    jobs_address: str = setting(
        "TIDEMARK_JOBS_ADDRESS",
        Address(),
        default="127.0.0.1:7430",
        doc="Where the scheduler of retention and eviction is reached.",
    )


_INTERVAL: Final = Integer(1_000, 86_400_000, unit="ms")
_BATCH_SIZE: Final = Integer(1, limits.RETENTION_ROWS_MAX)
_PASS_LIMIT: Final = Integer(0, 10**15)
_DAYS: Final = Integer(0, 36_500)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionSettings(ServiceSettings):
    """Retention and eviction, `python -m spark_batch`."""

    listen: str = setting(
        "TIDEMARK_RETENTION_LISTEN",
        LISTEN,
        default="127.0.0.1:7430",
        doc="Where the scheduler of the passes listens; port 0 takes a free one.",
    )
    storage_address: str = _storage_address()
    retention_interval_ms: int = setting(
        "TIDEMARK_RETENTION_INTERVAL",
        _INTERVAL,
        default=300_000,
        doc="Time from the end of a retention pass to the next.",
    )
    retention_batch_size: int = setting(
        "TIDEMARK_RETENTION_BATCH_SIZE",
        _BATCH_SIZE,
        default=1_000,
        doc="Planned deletions in one call of a retention pass.",
    )
    retention_pass_limit: int = setting(
        "TIDEMARK_RETENTION_PASS_LIMIT",
        _PASS_LIMIT,
        default=0,
        doc="Messages and queues after which a retention pass ends, oldest first; 0 is no limit.",
    )
    partition_cleanup_days: int = setting(
        "TIDEMARK_PARTITION_CLEANUP_DAYS",
        _DAYS,
        default=7,
        doc="Days without messages and activity after which a queue is removed; 0 is off.",
    )
    metrics_retention_days: int = setting(
        "TIDEMARK_METRICS_RETENTION_DAYS",
        _DAYS,
        default=90,
        doc="Days after which consumption records, metrics and history are removed; 0 is off.",
    )
    eviction_interval_ms: int = setting(
        "TIDEMARK_EVICTION_INTERVAL",
        _INTERVAL,
        default=60_000,
        doc="Time from the end of an eviction pass to the next.",
    )
    eviction_batch_size: int = setting(
        "TIDEMARK_EVICTION_BATCH_SIZE",
        _BATCH_SIZE,
        default=1_000,
        doc="Planned deletions in one call of an eviction pass.",
    )
    eviction_pass_limit: int = setting(
        "TIDEMARK_EVICTION_PASS_LIMIT",
        _PASS_LIMIT,
        default=0,
        doc="Messages after which an eviction pass ends, oldest first; 0 is no limit.",
    )
    spark_master: str = setting(
        "TIDEMARK_SPARK_MASTER",
        Text("the master of a Spark cluster"),
        default="local[*]",
        doc="Where Spark runs: `local[*]` is this machine, `spark://host:port` a cluster.",
    )
    spark_options: str = setting(
        "TIDEMARK_SPARK_OPTIONS",
        Pairs(),
        default="",
        doc="Further settings of Spark.",
    )
    java_home: str = setting(
        "JAVA_HOME",
        Text("the path of a directory"),
        default="",
        doc="The Java that runs Spark; unset, the first on the path, else the packaged one.",
    )


SERVICES: Final = (StorageSettings, BrokerSettings, LifecycleSettings, RetentionSettings)
"""The settings of every service: what the documentation shows and what counts as known."""


def keep_grpc_out_of_forks() -> None:
    """Call it before gRPC is first used, in a process that forks to start other programs.

    gRPC tries to carry its threads over a fork. In a child that is only there to become another
    program, that has been seen to end it before it could.
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


S = TypeVar("S", bound=Settings)


def load_or_exit(settings: type[S]) -> S:
    """For `__main__`: the settings, or one line on stderr and exit status 2."""
    try:
        return settings.from_environment()
    except SettingsError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


# Kubernetes describes every service `tidemark-x` of the namespace in variables of these forms.
_SERVICE_LINK: Final = re.compile(
    r"\w+_SERVICE_HOST|\w+_SERVICE_PORT(_\w+)?|\w+_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?"
)


def unknown_variables(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Variables that look like ours but are read by no service: most likely misspelt."""
    environ = os.environ if environ is None else environ
    readers = (*SERVICES, ClientSettings)
    known = {variable.name for reader in readers for variable in reader.variables()}
    return tuple(
        name
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in known and not _is_service_link(name, environ)
    )


def _is_service_link(name: str, environ: Mapping[str, str]) -> bool:
    if name.endswith("_PORT") and "://" in environ[name]:
        return True
    return _SERVICE_LINK.fullmatch(name) is not None
