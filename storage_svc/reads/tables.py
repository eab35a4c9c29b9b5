"""Tables for Spark: the rows of a partition as Arrow record batches, read beside the writer.

A scan holds no snapshot and no memory beyond one batch: it goes queue by queue and chunk by chunk,
and yields to the event loop after every 2 ms of work. Rows that change may be seen before or
after the change; storage checks each planned deletion again. Tables of queues are in
`queue_tables.py`, those of retention rules in `due_tables.py`; here are the tables of records.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from types import ModuleType

from storage_svc.engines import run_rows
from storage_svc.engines.engine import Table
from storage_svc.engines.history_rows import read_history
from storage_svc.engines.keys import read_u64, u64
from storage_svc.operations import system_metrics
from storage_svc.operations.history import RetentionType
from storage_svc.operations.retention_rules import OF_MESSAGES
from storage_svc.partition.partition import Partition
from storage_svc.reads.due_tables import (
    scan_abandoned_groups,
    scan_due_runs,
    scan_inactive_queues,
)
from storage_svc.reads.queue_tables import scan_queues
from storage_svc.reads.table_filter import Row, TableFilter, TableName
from tidemark.clock import Clock
from tidemark.errors import InvalidArgument
from tidemark.names import topic_of

SLICE_NS_MAX = 2_000_000
"""How long a scan may work before it yields to the event loop."""


async def scan(
    partition: Partition, name: TableName, wanted: TableFilter, batch_rows: int, clock: Clock
) -> AsyncGenerator[tuple[bytes, int], None]:
    """Record batches as complete Arrow streams, each with its number of rows."""
    arrow = await asyncio.to_thread(_import_arrow)
    schema = arrow.SCHEMAS[name]
    columns = list(wanted.columns) or schema.names
    unknown = set(columns) - set(schema.names)
    if unknown:
        raise InvalidArgument(f"no such columns: {sorted(unknown)}", field="columns")
    if name is TableName.SYSTEM_METRICS and (wanted.topic or wanted.lmq_name or wanted.prefix):
        raise InvalidArgument("rows of this table belong to no queue", field="topic")
    wanted = wanted.at(partition.now_ms())
    pending: list[Row] = []
    slice_began_ns = clock.monotonic_ns()
    async for some in _rows(partition, name, wanted):
        pending += some
        while len(pending) >= batch_rows:
            batch, pending = pending[:batch_rows], pending[batch_rows:]
            # In a thread: a batch takes longer than a turn of the event loop may.
            yield await asyncio.to_thread(arrow.encode, schema, columns, batch), batch_rows
        if clock.monotonic_ns() - slice_began_ns > SLICE_NS_MAX:
            await clock.sleep_ms(0)
            slice_began_ns = clock.monotonic_ns()
    if pending:
        yield await asyncio.to_thread(arrow.encode, schema, columns, pending), len(pending)


def _rows(partition: Partition, name: TableName, wanted: TableFilter) -> AsyncIterator[list[Row]]:
    if not wanted.due_types:
        of_records = name in _RECORD_READERS
        return (_records if of_records else scan_queues)(partition, name, wanted)
    if name is TableName.RUNS and wanted.due_types <= set(OF_MESSAGES):
        return scan_due_runs(partition, wanted)
    if name is TableName.QUEUES and wanted.due_types == {RetentionType.INACTIVE_QUEUE}:
        return scan_inactive_queues(partition, wanted)
    if name is TableName.GROUPS and wanted.due_types == {RetentionType.ABANDONED_GROUP}:
        return scan_abandoned_groups(partition, wanted)
    raise InvalidArgument("these rules do not apply to rows of this table", field="due_types")


def _import_arrow() -> ModuleType:
    """pyarrow takes as long to import, and as much memory, as the rest of storage together."""
    from storage_svc.reads import arrow

    return arrow


# --- tables of records, whose keys are in time order ----------------------------------------------


async def _records(
    partition: Partition, name: TableName, wanted: TableFilter
) -> AsyncIterator[list[Row]]:
    table, read = _RECORD_READERS[name]
    end = u64(wanted.before_ms) if wanted.before_ms else None
    with partition.reader() as reader:
        async for chunk in reader.scan_chunks(table, u64(wanted.after_ms), end):
            found = [row for key, value in chunk for row in read(partition.number, key, value)]
            if wanted.topic or wanted.lmq_name or wanted.prefix:
                at = _NAME_COLUMNS[name]
                found = [row for row in found if wanted.has_queue(row[at])]
            yield found


def _history(partition: int, key: bytes, value: bytes) -> Iterator[Row]:
    """A row for each queue."""
    row = read_history(key, value)
    for lmq_name, messages, body_bytes in row.queues:
        executed_at_us = row.executed_at_ms * 1000
        yield partition, lmq_name, row.type, row.pass_id, messages, body_bytes, executed_at_us


def _consumed(partition: int, key: bytes, value: bytes) -> Iterator[Row]:
    """A row for each settled range."""
    acked_at_us = 1000 * read_u64(key)
    for each in run_rows.read_consumed(value):
        topic = topic_of(each.lmq_name)
        yield (
            partition,
            topic,
            each.lmq_name,
            each.queue_id,
            each.group,
            each.start,
            each.end,
            1000 * each.publish_time_ms,
            1000 * each.first_delivery_ms,
            acked_at_us,
        )


def _metrics(partition: int, key: bytes, value: bytes) -> Iterator[Row]:
    yield partition, *system_metrics.read(value), 1000 * read_u64(key)


_RECORD_READERS: dict[TableName, tuple[Table, Callable[[int, bytes, bytes], Iterator[Row]]]] = {
    TableName.HISTORY: (Table.HISTORY, _history),
    TableName.MESSAGES_CONSUMED: (Table.CONSUMED, _consumed),
    TableName.SYSTEM_METRICS: (Table.METRICS, _metrics),
}
_NAME_COLUMNS = {TableName.HISTORY: 1, TableName.MESSAGES_CONSUMED: 2}
"""Where a row has the name of its queue."""
