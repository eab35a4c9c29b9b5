"""The table reader of the jobs: reads tables of the data source without Spark's planning.

Spark starts a new Python process for each planning step of a Python data source, several per table,
which takes longer than a small pass. The jobs know what they need from which partition, so they run
the same reader inside ordinary tasks, one per storage partition.
"""

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from pyspark_tidemark.filters import ScanFilter
from pyspark_tidemark.reader import StoragePartition, TidemarkReader
from pyspark_tidemark.storage import PartitionAddress
from pyspark_tidemark.tables import TABLES, schema_of


def read(
    spark: SparkSession,
    partitions: Sequence[PartitionAddress],
    table: str,
    columns: str,
    scan_filter: ScanFilter,
) -> DataFrame:
    """The rows of a table that match the filter."""
    names = columns.split(",")
    reader = TidemarkReader("", table, names, scan_filter)

    def read_partition(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from reader.read(StoragePartition(partitions[number]))

    numbers = spark.range(0, len(partitions), 1, len(partitions))
    return numbers.mapInArrow(read_partition, schema_of(TABLES[table], names))


def has_rows(partitions: Sequence[PartitionAddress], table: str, scan_filter: ScanFilter) -> bool:
    """Whether any partition has a matching row; immediate for tables ordered by time."""
    reader = TidemarkReader("", table, [TABLES[table].time], scan_filter, batch_rows=1)
    return any(
        next(reader.read(StoragePartition(partition)), None) is not None for partition in partitions
    )
