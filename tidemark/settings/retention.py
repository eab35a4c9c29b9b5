"""Settings of retention and eviction: intervals, batch sizes, limits and Spark."""

from dataclasses import dataclass
from typing import Final

from tidemark import limits
from tidemark.settings.declaration import setting
from tidemark.settings.service import ServiceSettings, addresses_of_storage
from tidemark.settings.variables import LISTEN, Integer, Pairs, Text

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
        doc="Address that the scheduler listens on; port 0 picks a free port.",
    )
    storage_addresses: tuple[str, ...] = addresses_of_storage()
    retention_interval_ms: int = setting(
        "TIDEMARK_RETENTION_INTERVAL",
        _INTERVAL,
        default=300_000,
        doc="Time from the end of a retention pass to the start of the next.",
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
        doc="Most messages and queues that one retention pass removes, oldest first; 0: no limit.",
    )
    partition_cleanup_days: int = setting(
        "TIDEMARK_PARTITION_CLEANUP_DAYS",
        _DAYS,
        default=7,
        doc="Days without messages and activity after which a queue is removed; 0: never.",
    )
    metrics_retention_days: int = setting(
        "TIDEMARK_METRICS_RETENTION_DAYS",
        _DAYS,
        default=90,
        doc="Days after which consumption records, metrics and history are removed; 0: never.",
    )
    eviction_interval_ms: int = setting(
        "TIDEMARK_EVICTION_INTERVAL",
        _INTERVAL,
        default=60_000,
        doc="Time from the end of an eviction pass to the start of the next.",
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
        doc="Most messages that one eviction pass removes, oldest first; 0: no limit.",
    )
    spark_master: str = setting(
        "TIDEMARK_SPARK_MASTER",
        Text("a Spark master URL"),
        default="local[*]",
        doc="Spark master: `local[*]` for this machine, `spark://host:port` for a cluster.",
    )
    spark_options: str = setting(
        "TIDEMARK_SPARK_OPTIONS",
        Pairs(),
        default="",
        doc="Additional Spark configuration.",
    )
    spark_idle_stop_s: int = setting(
        "TIDEMARK_SPARK_IDLE_STOP_S",
        Integer(0, 86_400, unit="s"),
        default=300,
        doc="Spark starts when a pass has work, and stops after this time without such a pass.",
    )
    pass_timeout_ms: int = setting(
        "TIDEMARK_RETENTION_PASS_TIMEOUT",
        Integer(1_000, 86_400_000, unit="ms"),
        default=3_600_000,
        doc="A retention or eviction pass that takes longer is ended; the next one does the rest.",
    )
    java_home: str = setting(
        "JAVA_HOME",
        Text("the path of a directory"),
        default="",
        doc="Java installation for Spark; unset: the first Java on PATH, else the packaged one.",
    )
