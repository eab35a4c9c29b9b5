"""Reading for the jobs: the tables of the data source, without its planning.

For each step of planning a Python data source Spark starts a fresh Python process, several for each
table: seconds in which a small pass would be over. The jobs know what they want of which partition,
so the same reader runs inside ordinary tasks here, one for each partition of storage.
"""

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from spark_batch.source import TABLES, Chosen, StoragePartition, TidemarkReader, schema_of
from spark_batch.storage_client import Place


def read(
    spark: SparkSession, places: Sequence[Place], table: str, columns: str, chosen: Chosen
) -> DataFrame:
    """The rows of a table that storage chooses."""
    names = columns.split(",")
    reader = TidemarkReader("", table, names, chosen)

    def read_partition(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from reader.read(StoragePartition(places[number]))

    numbers = spark.range(0, len(places), 1, len(places))
    return numbers.mapInArrow(read_partition, schema_of(TABLES[table], names))


def has_rows(places: Sequence[Place], table: str, chosen: Chosen) -> bool:
    """Whether any partition has such a row; for tables in the order of time, at once."""
    reader = TidemarkReader("", table, [TABLES[table].time], chosen, batch_rows=1)
    return any(next(reader.read(StoragePartition(place)), None) is not None for place in places)
