"""The table reader of the jobs: reads tables of the data source without Spark's planning.

Spark starts a new Python process for each planning step of a Python data source, several per table,
which takes longer than a small pass. The jobs know what they need from which partition, so they run
the same reader inside ordinary tasks, one per storage partition.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from pyspark_tidemark.filters import ScanFilter
from pyspark_tidemark.reader import StoragePartition, TidemarkReader
from pyspark_tidemark.storage import PartitionAddress, StorageError
from pyspark_tidemark.tables import TABLES, schema_of
from spark_batch.passes.failures import Failures

_TIMEOUT_S: Final = 60.0
"""For the driver, which nothing else ends."""


def read(
    spark: SparkSession,
    partitions: Sequence[PartitionAddress],
    table: str,
    columns: str,
    scan_filter: ScanFilter,
    failures: Failures | None = None,
) -> DataFrame:
    """The rows of a table that match the filter.

    With `failures`, a partition that cannot be read is added to them and has no more rows.
    """
    names = columns.split(",")
    reader = TidemarkReader("", table, names, scan_filter)

    def read_partition(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                target = partitions[number]
                try:
                    yield from reader.read(StoragePartition(target))
                except StorageError as error:
                    if failures is None:
                        raise
                    failures.add({target.partition: str(error)})

    numbers = spark.range(0, len(partitions), 1, len(partitions))
    return numbers.mapInArrow(read_partition, schema_of(TABLES[table], names))


def has_rows(
    partitions: Sequence[PartitionAddress],
    table: str,
    scan_filter: ScanFilter,
    failures: Failures,
) -> bool:
    """Whether any partition has a matching row; immediate for tables ordered by time."""
    columns = [TABLES[table].time]
    reader = TidemarkReader("", table, columns, scan_filter, batch_rows=1, timeout_s=_TIMEOUT_S)
    found = False
    for target in partitions:
        try:
            row = next(reader.read(StoragePartition(target)), None)
        except StorageError as error:
            failures.add({target.partition: str(error)})
        else:
            found = found or row is not None
    return found
