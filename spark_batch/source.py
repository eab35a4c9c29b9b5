"""The data source `tidemark`: the data in storage as tables for Spark.

`spark.read.format("tidemark").option("storage", "host:port").option("table", "runs").load()`. There
is one input partition per storage partition; storage streams Arrow batches and evaluates conditions
on topic and time. The source is read-only.

Spark imports this module in a new process for every planning step, so gRPC, which takes half a
second to import, is imported only where storage is called.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    from spark_batch.storage_client import PartitionAddress
    from tidemark.api.storage.v1.retention_pb2 import ScanTableRequest

NAME: Final = "tidemark"

_QUEUE: Final = "partition int, topic string, lmq_name string, queue_id bigint"


@dataclass(frozen=True, slots=True)
class TableShape:
    """The columns of a table, and those by which storage can filter."""

    columns: str
    time: str = ""
    by_topic: bool = True


TABLES: Final = {
    "runs": TableShape(
        f"{_QUEUE}, fairness_key string, first_offset bigint, messages bigint, bytes bigint, "
        "publish_time timestamp, groups int, waiting_groups int, held boolean",
        "publish_time",
    ),
    "groups": TableShape(
        f"{_QUEUE}, group string, cursor bigint, unsettled bigint, inflight bigint, "
        "owner_client_id string, owner_epoch bigint"
    ),
    "queues": TableShape(
        f"{_QUEUE}, messages bigint, bytes bigint, scheduled bigint, next_offset bigint, "
        "create_time timestamp, last_activity timestamp, materialized boolean",
        "last_activity",
    ),
    "history": TableShape(
        "partition int, lmq_name string, retention_type string, pass_id string, messages bigint, "
        "bytes bigint, executed_at timestamp",
        "executed_at",
        by_topic=False,
    ),
    "messages_consumed": TableShape(
        f"{_QUEUE}, group string, start bigint, end bigint, acked_at timestamp", "acked_at"
    ),
    "system_metrics": TableShape(
        "partition int, instance string, name string, samples bigint, min double, max double, "
        "mean double, last double, timestamp timestamp",
        "timestamp",
        by_topic=False,
    ),
}


def schema_of(table: TableShape, wanted: Sequence[str]) -> str:
    """The schema of the wanted columns, or of all if none is given, in Spark's syntax."""
    if not wanted:
        return table.columns
    typed = {each.split(" ")[0]: each for each in table.columns.split(", ")}
    unknown = sorted(set(wanted) - set(typed))
    if unknown:
        raise ValueError(f"the table has no columns {unknown}, only {', '.join(typed)}")
    return ", ".join(typed[name] for name in wanted)


def register(spark: SparkSession) -> None:
    """Register the source with a session."""
    spark.dataSource.register(TidemarkSource)


class TidemarkSource(DataSource):
    """Options: `storage` (one address or several, comma-separated), `table`, `columns`."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        wanted = [each.strip() for each in self.options.get("columns", "").split(",")]
        return schema_of(self._table(), [] if wanted == [""] else wanted)

    def reader(self, schema: StructType) -> DataSourceReader:
        self._table()
        if not self.options.get("storage"):
            raise ValueError('option "storage" is missing: the address of the storage service')
        return TidemarkReader(self.options["storage"], self.options["table"], schema.names)

    def _table(self) -> TableShape:
        name = self.options.get("table", "")
        if name not in TABLES:
            raise ValueError(f'option "table" is one of {", ".join(TABLES)}, not {name!r}')
        return TABLES[name]


@dataclass(frozen=True, slots=True)
class ScanFilter:
    """The conditions on rows that storage evaluates."""

    topics: tuple[str, ...] | None = None  # None: all
    after_ms: int = 0
    before_ms: int | None = None


NO_FILTER: Final = ScanFilter()


def push(scan_filter: ScanFilter, table: TableShape, condition: Filter) -> ScanFilter | None:
    """Add a condition to a filter; None if storage cannot evaluate it."""
    match condition:
        case EqualTo(("topic",), str(topic)) if table.by_topic:
            return _among(scan_filter, [topic])
        case In(("topic",), values) if table.by_topic:
            return _among(scan_filter, [each for each in values if isinstance(each, str)])
        # Stored times are whole milliseconds, so that each bound has an exact equivalent.
        case LessThan((column,), datetime() as time) if column == table.time:
            return _before(scan_filter, -(-_us(time) // 1000))
        case LessThanOrEqual((column,), datetime() as time) if column == table.time:
            return _before(scan_filter, _us(time) // 1000 + 1)
        case GreaterThan((column,), datetime() as time) if column == table.time:
            return _after(scan_filter, _us(time) // 1000 + 1)
        case GreaterThanOrEqual((column,), datetime() as time) if column == table.time:
            return _after(scan_filter, -(-_us(time) // 1000))
    return None


def _among(scan_filter: ScanFilter, topics: Iterable[str]) -> ScanFilter:
    wanted = set(topics) if scan_filter.topics is None else set(topics) & set(scan_filter.topics)
    return replace(scan_filter, topics=tuple(sorted(wanted)))


def _before(scan_filter: ScanFilter, before_ms: int) -> ScanFilter:
    known = scan_filter.before_ms
    return replace(scan_filter, before_ms=before_ms if known is None else min(known, before_ms))


def _after(scan_filter: ScanFilter, after_ms: int) -> ScanFilter:
    return replace(scan_filter, after_ms=max(scan_filter.after_ms, after_ms))


def _us(time: datetime) -> int:
    """Unix microseconds; Spark passes times without a zone in the zone of the machine."""
    aware = time.astimezone()
    return int(aware.replace(microsecond=0).timestamp()) * 1_000_000 + time.microsecond


class StoragePartition(InputPartition):
    """One partition of storage."""

    def __init__(self, target: "PartitionAddress") -> None:
        super().__init__(target)
        self.target = target


class TidemarkReader(DataSourceReader):
    """Reads one table; created by the driver, used by the executors."""

    def __init__(
        self,
        storage: str,
        table: str,
        columns: Sequence[str],
        scan_filter: ScanFilter = NO_FILTER,
        batch_rows: int = 0,
    ) -> None:
        self._storage = storage
        self._table = table
        self._columns = list(columns)
        self._filter = scan_filter
        self._batch_rows = batch_rows

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        for condition in filters:
            scan_filter = push(self._filter, TABLES[self._table], condition)
            if scan_filter is None:
                yield condition
            else:
                self._filter = scan_filter

    def partitions(self) -> Sequence[InputPartition]:
        from spark_batch.storage_client import find_partitions

        return [StoragePartition(target) for target in find_partitions(self._storage)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from spark_batch.storage_client import StorageClient

        assert isinstance(partition, StoragePartition)
        scan_filter = self._filter
        if scan_filter.before_ms is not None and scan_filter.before_ms <= scan_filter.after_ms:
            return
        with StorageClient(partition.target.address) as client:
            for topic in ("",) if scan_filter.topics is None else scan_filter.topics:
                yield from client.scan(self._request(partition.target.partition, topic))

    def _request(self, partition: int, topic: str) -> "ScanTableRequest":
        from tidemark.api.storage.v1.retention_pb2 import ScanTableName, ScanTableRequest

        request = ScanTableRequest(
            partition=partition,
            table=ScanTableName.Value(f"SCAN_TABLE_NAME_{self._table.upper()}"),
            columns=self._columns,
            topic=topic,
            batch_rows=self._batch_rows,
        )
        if self._filter.after_ms > 0:
            request.after_time.FromMilliseconds(self._filter.after_ms)
        if self._filter.before_ms is not None:
            request.before_time.FromMilliseconds(self._filter.before_ms)
        return request
