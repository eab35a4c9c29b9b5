"""The tables of queues for Spark: their rows, from the catalog or the states of queues.

A scan goes queue by queue. It is narrowed by key: one queue, or the queues of a prefix, cost as
much as if there were no others.
"""

from collections.abc import AsyncIterator, Iterable, Iterator

from storage_svc.engines import queue_rows, run_rows
from storage_svc.engines.engine import Table
from storage_svc.engines.keys import prefix_end, successor
from storage_svc.engines.run_rows import RunNumbers
from storage_svc.operations.abandoned_groups import is_in_use, unused_since_ms
from storage_svc.partition.partition import Partition
from storage_svc.queue.queue import QueueState
from storage_svc.queue.record import QueueRecord
from storage_svc.queue.run import Run
from storage_svc.reads.queues import group_view
from storage_svc.reads.table_filter import Row, TableFilter, TableName
from tidemark.errors import QueueNotFound
from tidemark.names import topic_of


async def scan_queues(
    partition: Partition, name: TableName, wanted: TableFilter
) -> AsyncIterator[list[Row]]:
    start, end = _catalog_range(wanted)
    with partition.reader() as reader:
        async for chunk in reader.scan_chunks(Table.CATALOG, start, end):
            for key, value in chunk:
                lmq_name = queue_rows.lmq_name_of(key)
                if not wanted.has_queue(lmq_name):
                    continue
                handle = partition.state.handles.peek(lmq_name)
                record = (
                    queue_rows.read_queue(lmq_name, value)
                    if handle is None
                    else handle.state.record
                )
                if name is TableName.QUEUES:
                    yield list(rows_of_queue(partition, record, wanted))
                    continue
                if name is TableName.RUNS and not record.messages:
                    continue
                try:
                    state = await partition.state.handles.read_state(lmq_name)
                except QueueNotFound:
                    continue  # deleted meanwhile
                if name is TableName.RUNS:
                    first, last = queue_rows.queue_range(state.record.queue_id)
                    async for headers in reader.scan_chunks(Table.RUN_HEADERS, first, last):
                        purge = partition.state.erasures.purge_of(state.record.queue_id)
                        runs = [run_rows.read_run(*header) for header in headers]
                        if purge is not None:
                            runs = [run for run in runs if not purge.covers(run.first_offset)]
                        yield list(rows_of_runs(partition, state, runs, wanted))
                else:
                    yield list(rows_of_groups(partition, state, wanted))


def _catalog_range(wanted: TableFilter) -> tuple[bytes, bytes | None]:
    """The smallest range of catalog keys that has every wanted queue, and few others."""
    if wanted.lmq_name:
        key = queue_rows.catalog_key(wanted.lmq_name)
        return key, successor(key)
    topic, slash, lite = wanted.prefix.partition("/")
    if slash:
        return queue_rows.topic_range(topic, lite)
    if wanted.topic:
        return queue_rows.topic_range(wanted.topic)
    if topic:
        return topic.encode(), prefix_end(topic.encode())
    return b"", None


def _head(partition: int, record: QueueRecord) -> Row:
    topic = topic_of(record.lmq_name)
    return partition, topic, record.lmq_name, record.queue_id


def rows_of_runs(
    partition: Partition, state: QueueState, runs: Iterable[Run], wanted: TableFilter
) -> Iterator[Row]:
    now_ms = partition.now_ms()
    groups = state.groups.values()
    any_held = state.has_inflight
    exhausted = state.exhausted_runs()
    head = _head(partition.number, state.record)
    for run in runs:
        if wanted.has_time(run.publish_time_ms):
            waiting = sum(not group.has_settled(run) for group in groups)
            first = run.first_offset
            held = first in exhausted or (any_held and state.is_held(run))
            numbers = (run.messages, run.body_bytes, run.publish_time_ms, run.dead_deadline_ms)
            key = run.fairness_key
            yield run_row(head, key, first, numbers, now_ms, len(groups), waiting, held=held)


def run_row(
    head: Row,
    fairness_key: str,
    first_offset: int,
    run: RunNumbers,
    now_ms: int,
    groups: int,
    waiting: int,
    *,
    held: bool = False,
) -> Row:
    """A row of `runs`, from the columns of its queue."""
    messages, body_bytes, publish_time_ms, _ = run
    return (
        *head,
        fairness_key,
        first_offset,
        messages,
        body_bytes,
        publish_time_ms * 1000,
        groups,
        waiting,
        groups > 0 and not waiting,
        held,
        max(0, now_ms - publish_time_ms),
    )


def rows_of_groups(partition: Partition, state: QueueState, wanted: TableFilter) -> Iterator[Row]:
    now_ms = partition.now_ms()
    head = _head(partition.number, state.record)
    topic = partition.state.topics.find(topic_of(state.record.lmq_name))
    for group in state.groups.values():
        if wanted.has_time(group.last_used_ms):
            since_ms = group.last_used_ms if topic is None else unused_since_ms(topic, group)
            yield (
                *head,
                *group_view(state, group),
                group.last_used_ms * 1000,
                is_in_use(partition.state, state, group, now_ms),
                max(0, now_ms - since_ms),
            )


def rows_of_queue(partition: Partition, record: QueueRecord, wanted: TableFilter) -> Iterator[Row]:
    if wanted.has_time(record.last_activity_ms):
        now_ms = partition.now_ms()
        yield (
            *_head(partition.number, record),
            record.messages,
            record.body_bytes,
            record.scheduled,
            record.next_offset,
            record.create_time_ms * 1000,
            record.last_activity_ms * 1000,
            partition.state.handles.peek(record.lmq_name) is not None,
            record.paused or partition.state.is_in_use(record.lmq_name, now_ms),
            max(0, now_ms - record.last_activity_ms),
        )
