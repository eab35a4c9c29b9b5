"""The table reader of the jobs: reads tables of the data source without Spark's planning.

Spark starts a new Python process for each planning step of a Python data source, several per table,
which takes longer than a small pass. The jobs select rows by partition themselves, so they run the
same reader inside ordinary tasks. A task reads several partitions, usually of one storage service,
over one channel.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from pyspark_tidemark.filters import ScanFilter
from pyspark_tidemark.reader import TidemarkReader
from pyspark_tidemark.storage import PartitionAddress, StorageError, TableClient
from pyspark_tidemark.tables import TABLES, schema_of
from spark_batch.passes import rules
from spark_batch.passes.failures import Failures

RECORDS: Final = StructType(
    [
        StructField("partition", IntegerType()),
        StructField("table", StringType()),
        StructField("messages", LongType()),
    ]
)
"""Tables of records that have old rows; `messages` is their number where they are counted."""

_ReadPartition = Callable[[TableClient, int], Iterator[pa.RecordBatch]]


def read(
    spark: SparkSession,
    partitions: Sequence[PartitionAddress],
    table: str,
    columns: str,
    scan_filter: ScanFilter,
    failures: Failures | None = None,
    limits: pa.RecordBatch | None = None,
) -> DataFrame:
    """The rows of a table that match the filter.

    With `failures`, a partition that cannot be read is added to them and has no more rows. With
    `limits`, columns of `rules.LIMITS`, each row has the limits of its topic, and rows of other
    topics are left out. The limits travel with the tasks, so that no join is needed.
    """
    names = columns.split(",")
    reader = TidemarkReader("", table, names, scan_filter)
    schema = schema_of(TABLES[table], names)
    if limits is not None:
        schema = StructType([*schema.fields, *rules.LIMITS.fields[1:]])

    def read_partition(client: TableClient, partition: int) -> Iterator[pa.RecordBatch]:
        for batch in reader.read_with(client, partition):
            yield batch if limits is None else with_limits(batch, limits)

    return _in_tasks(spark, partitions, schema, read_partition, failures)


def old_records(
    spark: SparkSession,
    due: Sequence[tuple[str, PartitionAddress]],
    scan_filter: ScanFilter,
    failures: Failures,
    *,
    counted: bool,
) -> DataFrame:
    """The tables of records that have old rows, as rows of `RECORDS`.

    Storage deletes them by their age, so that they are only read to be counted.
    """
    tables: dict[int, list[str]] = {}
    for table, target in due:
        tables.setdefault(target.partition, []).append(table)

    def read_partition(client: TableClient, partition: int) -> Iterator[pa.RecordBatch]:
        found = tables[partition]
        counts = [0] * len(found)
        for at, table in enumerate(found if counted else ()):
            reader = TidemarkReader("", table, [TABLES[table].time], scan_filter)
            counts[at] = sum(each.num_rows for each in reader.read_with(client, partition))
        columns = {
            "partition": pa.array([partition] * len(found), pa.int32()),
            "table": pa.array(found, pa.string()),
            "messages": pa.array(counts, pa.int64()),
        }
        yield pa.RecordBatch.from_pydict(columns)

    partitions = list({target for _, target in due})
    return _in_tasks(spark, partitions, RECORDS, read_partition, failures)


def with_limits(runs: pa.RecordBatch, limits: pa.RecordBatch) -> pa.RecordBatch:
    """Runs of the topics that have limits, with these as columns."""
    at = pc.index_in(runs.column("topic"), value_set=limits.column(0))
    known = runs.filter(pc.is_valid(at))
    added = limits.take(pc.drop_null(at))
    names = [*known.schema.names, *added.schema.names[1:]]
    return pa.RecordBatch.from_arrays([*known.columns, *added.columns[1:]], names=names)


def _in_tasks(
    spark: SparkSession,
    partitions: Sequence[PartitionAddress],
    schema: StructType,
    read_partition: _ReadPartition,
    failures: Failures | None,
) -> DataFrame:
    """Read partitions in as many tasks as can run at once, those of one service together."""
    targets = sorted(partitions, key=lambda each: (each.address, each.partition))
    count = min(len(targets), max(1, spark.sparkContext.defaultParallelism))
    bounds = [len(targets) * number // count for number in range(count + 1)]
    tasks = [targets[bounds[at] : bounds[at + 1]] for at in range(count)]

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        clients: dict[str, TableClient] = {}
        with ExitStack() as opened:
            for number in (each for batch in batches for each in batch.column(0).to_pylist()):
                for partition, address in tasks[number]:
                    if address not in clients:
                        clients[address] = opened.enter_context(TableClient(address))
                    try:
                        yield from read_partition(clients[address], partition)
                    except StorageError as error:
                        if failures is None:
                            raise
                        failures.add({partition: str(error)})

    return spark.range(0, count, 1, count).mapInArrow(run, schema)
