"""The readers: created by the driver, used by the executors, one input partition per partition.

Spark imports this module in a new process for every planning step, so gRPC, which takes half a
second to import, is imported only where storage is called.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from pyspark_tidemark.filters import NO_FILTER, ScanFilter, push
from pyspark_tidemark.tables import TABLES

if TYPE_CHECKING:
    from pyspark_tidemark.storage import PartitionAddress, TableClient


class StoragePartition(InputPartition):
    """One partition of storage."""

    def __init__(self, target: "PartitionAddress") -> None:
        super().__init__(target)
        self.target = target


class TidemarkReader(DataSourceReader):
    """Reads one table. Works in every session: it leaves conditions of the query to Spark."""

    def __init__(
        self,
        storage: str,
        table: str,
        columns: Sequence[str],
        scan_filter: ScanFilter = NO_FILTER,
        batch_rows: int = 0,
        timeout_s: float | None = None,
    ) -> None:
        self._storage = storage
        self._table = table
        self._columns = list(columns)
        self._filter = scan_filter
        self._chosen = frozenset(scan_filter.partitions or ())
        """Partitions that an option names, not a condition of the query."""
        self._batch_rows = batch_rows
        self._timeout_s = timeout_s

    def partitions(self) -> Sequence[InputPartition]:
        from pyspark_tidemark.storage import find_partitions

        found = find_partitions(self._storage)
        held = {target.partition for target in found}
        absent = sorted(self._chosen.difference(held))
        if absent:
            raise ValueError(f'option "partition": there is no {absent}, only 0 to {max(held)}')
        return [
            StoragePartition(target)
            for target in found
            if self._filter.has_partition(target.partition)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, StoragePartition):
            return  # Spark's stand-in where no partition is left to read
        from pyspark_tidemark.storage import TableClient

        with TableClient(partition.target.address) as client:
            yield from self.read_with(client, partition.target.partition)

    def read_with(self, client: "TableClient", partition: int) -> Iterator[pa.RecordBatch]:
        """Read a partition over a channel that others use as well."""
        for topic, queue in self._filter.scans():
            request = self._request(partition, topic, queue)
            yield from client.scan(request, self._timeout_s)

    def _request(self, partition: int, topic: str, queue: str) -> Any:
        from pyspark_tidemark.messages import TABLE_NUMBERS, ScanTableRequest

        request = ScanTableRequest(
            partition=partition,
            table=TABLE_NUMBERS[self._table],
            columns=self._columns,
            topic=topic,
            lmq_name=queue,
            prefix=self._filter.prefix,
            batch_rows=self._batch_rows,
            age_ms_min=self._filter.age_ms_min,
            due_types=self._filter.due_types,
        )
        if self._filter.after_ms > 0:
            _set_time(request.after_time, self._filter.after_ms)
        if self._filter.before_ms is not None:
            _set_time(request.before_time, self._filter.before_ms)
        return request


class PushingReader(TidemarkReader):
    """Has storage evaluate the conditions of the query that it can evaluate.

    Spark refuses a reader with `pushFilters` unless `spark.sql.python.filterPushdown.enabled` is
    on, which it is not by default.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        for condition in filters:
            scan_filter = push(self._filter, TABLES[self._table], condition)
            if scan_filter is None:
                yield condition
            else:
                self._filter = scan_filter


def _set_time(field: Any, time_ms: int) -> None:
    field.seconds, ms = divmod(time_ms, 1000)
    field.nanos = ms * 1_000_000
