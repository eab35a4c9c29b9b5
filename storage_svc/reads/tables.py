"""Tables for Spark: the rows of a partition as Arrow record batches, read beside the writer.

A scan holds no snapshot and no memory beyond one batch: it goes queue by queue and chunk by chunk,
and yields to the event loop after every 2 ms of work. Rows that change meanwhile may be seen before
or after the change; storage checks each planned deletion again. Tables of queues are narrowed by
key: one queue, or the queues of a prefix, cost as much as if there were no others.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from enum import Enum
from types import ModuleType
from typing import Any, NamedTuple

from storage_svc.engines import rows
from storage_svc.engines.engine import Table
from storage_svc.engines.keys import (
    prefix_end,
    read_u64,
    successor,
    u64,
)
from storage_svc.operations import history, system_metrics
from storage_svc.partition.partition import Partition
from storage_svc.queue.queue import QueueState
from storage_svc.queue.record import QueueRecord
from tidemark.clock import Clock
from tidemark.errors import InvalidArgument, QueueNotFound
from tidemark.names import topic_of

SLICE_NS_MAX = 2_000_000
"""How long a scan may work before it yields to the event loop."""


class TableName(Enum):
    """The tables that can be scanned."""

    RUNS = "RUNS"
    GROUPS = "GROUPS"
    QUEUES = "QUEUES"
    HISTORY = "HISTORY"
    MESSAGES_CONSUMED = "MESSAGES_CONSUMED"
    SYSTEM_METRICS = "SYSTEM_METRICS"


class TableFilter(NamedTuple):
    """The part of a table to read; empty values do not restrict it."""

    columns: Sequence[str] = ()
    topic: str = ""
    after_ms: int = 0
    before_ms: int = 0
    lmq_name: str = ""
    prefix: str = ""
    age_ms_min: int = 0

    def at(self, now_ms: int) -> "TableFilter":
        """The same filter with its age as a time."""
        if not self.age_ms_min:
            return self
        newest_ms = max(0, now_ms - self.age_ms_min)
        before_ms = min(self.before_ms, newest_ms + 1) if self.before_ms else newest_ms + 1
        return self._replace(before_ms=before_ms, age_ms_min=0)

    def has_queue(self, lmq_name: str) -> bool:
        return (
            (not self.topic or topic_of(lmq_name) == self.topic)
            and self.lmq_name in ("", lmq_name)
            and lmq_name.startswith(self.prefix)
        )


_Row = tuple[Any, ...]


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
    source = _records if name in _RECORD_READERS else _queues
    pending: list[_Row] = []
    slice_began_ns = clock.monotonic_ns()
    async for some in source(partition, name, wanted):
        pending += some
        while len(pending) >= batch_rows:
            yield arrow.encode(schema, columns, pending[:batch_rows]), batch_rows
            del pending[:batch_rows]
        if clock.monotonic_ns() - slice_began_ns > SLICE_NS_MAX:
            await clock.sleep_ms(0)
            slice_began_ns = clock.monotonic_ns()
    if pending:
        yield arrow.encode(schema, columns, pending), len(pending)


def _import_arrow() -> ModuleType:
    """pyarrow takes as long to import, and as much memory, as the rest of storage together."""
    from storage_svc.reads import arrow

    return arrow


# --- tables of queues -----------------------------------------------------------------------------


async def _queues(
    partition: Partition, name: TableName, wanted: TableFilter
) -> AsyncIterator[list[_Row]]:
    start, end = _catalog_range(wanted)
    with partition.reader() as reader:
        async for chunk in reader.scan_chunks(Table.CATALOG, start, end):
            for key, value in chunk:
                lmq_name = rows.lmq_name_of(key)
                if not wanted.has_queue(lmq_name):
                    continue
                handle = partition.state.handles.peek(lmq_name)
                record = rows.read_queue(lmq_name, value) if handle is None else handle.state.record
                if name is TableName.QUEUES:
                    yield list(_queue(partition, record, wanted))
                    continue
                if name is TableName.RUNS and not record.messages:
                    continue
                try:
                    state = await partition.state.handles.read_state(lmq_name)
                except QueueNotFound:
                    continue  # deleted meanwhile
                if name is TableName.RUNS:
                    first, last = rows.queue_range(state.record.queue_id)
                    async for headers in reader.scan_chunks(Table.RUN_HEADERS, first, last):
                        yield list(_runs(partition, state, headers, wanted))
                else:
                    yield list(_groups(partition, state))


def _catalog_range(wanted: TableFilter) -> tuple[bytes, bytes | None]:
    """The smallest range of catalog keys that has every wanted queue, and few others."""
    if wanted.lmq_name:
        key = rows.catalog_key(wanted.lmq_name)
        return key, successor(key)
    topic, slash, lite = wanted.prefix.partition("/")
    if slash:
        return rows.topic_range(topic, lite)
    if wanted.topic:
        return rows.topic_range(wanted.topic)
    if topic:
        return topic.encode(), prefix_end(topic.encode())
    return b"", None


def _head(partition: Partition, record: QueueRecord) -> _Row:
    topic = topic_of(record.lmq_name)
    return partition.number, topic, record.lmq_name, record.queue_id


def _runs(
    partition: Partition, state: QueueState, headers: list[tuple[bytes, bytes]], wanted: TableFilter
) -> Iterator[_Row]:
    head = _head(partition, state.record)
    now_ms = partition.now_ms()
    groups = state.groups.values()
    any_held = state.has_inflight
    exhausted = state.exhausted_runs()
    for key, value in headers:
        run = rows.read_run(key, value)
        if _in_time(run.publish_time_ms, wanted):
            yield (
                *head,
                run.fairness_key,
                run.first_offset,
                run.messages,
                run.body_bytes,
                run.publish_time_ms * 1000,
                len(groups),
                sum(not group.has_settled(run) for group in groups) if groups else 0,
                run.first_offset in exhausted or (any_held and state.is_held(run)),
                max(0, now_ms - run.publish_time_ms),
            )


def _groups(partition: Partition, state: QueueState) -> Iterator[_Row]:
    head = _head(partition, state.record)
    next_offset = state.record.next_offset
    for group in state.groups.values():
        yield (
            *head,
            group.name,
            group.cursor(next_offset),
            next_offset - group.base - group.settled,
            sum(each.open_messages for each in group.live.values()),
            group.owner_client_id,
            group.owner_epoch,
        )


def _queue(partition: Partition, record: QueueRecord, wanted: TableFilter) -> Iterator[_Row]:
    if _in_time(record.last_activity_ms, wanted):
        now_ms = partition.now_ms()
        yield (
            *_head(partition, record),
            record.messages,
            record.body_bytes,
            record.scheduled,
            record.next_offset,
            record.create_time_ms * 1000,
            record.last_activity_ms * 1000,
            partition.state.handles.peek(record.lmq_name) is not None,
            partition.state.is_in_use(record.lmq_name, now_ms),
            max(0, now_ms - record.last_activity_ms),
        )


# --- tables of records, whose keys are in time order ----------------------------------------------


async def _records(
    partition: Partition, name: TableName, wanted: TableFilter
) -> AsyncIterator[list[_Row]]:
    table, read = _RECORD_READERS[name]
    end = u64(wanted.before_ms) if wanted.before_ms else None
    with partition.reader() as reader:
        async for chunk in reader.scan_chunks(table, u64(wanted.after_ms), end):
            found = [row for key, value in chunk for row in read(partition.number, key, value)]
            if wanted.topic or wanted.lmq_name or wanted.prefix:
                at = _NAME_COLUMNS[name]
                found = [row for row in found if wanted.has_queue(row[at])]
            yield found


def _history(partition: int, key: bytes, value: bytes) -> Iterator[_Row]:
    row = history.read(key, value)
    yield (
        partition,
        row.lmq_name,
        row.type.value,
        row.pass_id,
        row.messages,
        row.body_bytes,
        row.executed_at_ms * 1000,
    )


def _consumed(partition: int, key: bytes, value: bytes) -> Iterator[_Row]:
    """A row for each settled range."""
    acked_at_us = 1000 * read_u64(key)
    for each in rows.read_consumed(value):
        topic = topic_of(each.lmq_name)
        yield (
            partition,
            topic,
            each.lmq_name,
            each.queue_id,
            each.group,
            each.start,
            each.end,
            acked_at_us,
        )


def _metrics(partition: int, key: bytes, value: bytes) -> Iterator[_Row]:
    yield partition, *system_metrics.read(value), 1000 * read_u64(key)


_RECORD_READERS: dict[TableName, tuple[Table, Callable[[int, bytes, bytes], Iterator[_Row]]]] = {
    TableName.HISTORY: (Table.HISTORY, _history),
    TableName.MESSAGES_CONSUMED: (Table.CONSUMED, _consumed),
    TableName.SYSTEM_METRICS: (Table.METRICS, _metrics),
}
_NAME_COLUMNS = {TableName.HISTORY: 1, TableName.MESSAGES_CONSUMED: 2}
"""Where a row has the name of its queue."""


def _in_time(time_ms: int, wanted: TableFilter) -> bool:
    return wanted.after_ms <= time_ms and (not wanted.before_ms or time_ms < wanted.before_ms)
