"""Rows of `runs`, `queues` and `groups` that rules can apply to, found by the index of ages (P3).

The cost depends on the amount of due data. Most queues that are due have a single run, so names,
catalog rows and headers are read for many queues at once; only queues with more are read one by
one.
"""

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import NamedTuple

from storage_svc.engines import queue_rows, run_rows
from storage_svc.engines.age_rows import AgeKind
from storage_svc.engines.engine import Reader, Table
from storage_svc.engines.keys import prefix_end, successor, u64
from storage_svc.engines.queue_rows import ColdQueue
from storage_svc.loading.recovery import fairness_keys
from storage_svc.loading.stored_runs import scan_runs
from storage_svc.operations.abandoned_groups import expiry_ms
from storage_svc.operations.ages import offsets_of
from storage_svc.operations.history import RetentionType
from storage_svc.operations.retention_rules import age_limit_s
from storage_svc.partition.partition import Partition
from storage_svc.queue.queue import QueueState
from storage_svc.queue.record import QueueRecord
from storage_svc.reads.queue_tables import rows_of_groups, rows_of_queue, rows_of_runs, run_row
from storage_svc.reads.table_filter import Row, TableFilter
from tidemark.errors import QueueNotFound
from tidemark.topics import TopicSettings

QUEUES_PER_PAGE = 256
"""Queues that are read at once."""

_ROWS_PER_PAGE = 256
_PAGE_HEADERS = 512
_RULES = {
    AgeKind.WAITING: (RetentionType.EXPIRED, RetentionType.MAX_WAIT_TIME_EVICTION),
    AgeKind.SETTLED: (RetentionType.EXPIRED, RetentionType.COMPLETED),
}


def limit_ms(settings: TopicSettings, kind: AgeKind, types: Iterable[RetentionType]) -> int:
    """The age from which one of the rules applies to messages of a kind; 0 if none ever does."""
    limits = (age_limit_s(settings, each) for each in _RULES[kind] if each in types)
    return 1000 * min(filter(None, limits), default=0)


DueSince = dict[AgeKind, int]
"""Until when messages of a kind were published that a rule may apply to."""


async def scan_inactive_queues(
    partition: Partition, wanted: TableFilter
) -> AsyncIterator[list[Row]]:
    """Queues that may have been inactive for long enough, by their last activity."""
    last_ms = partition.now_ms() - wanted.age_ms_min
    with partition.reader() as reader:
        async for ids in _due_queues(partition, reader, AgeKind.IDLE, "", last_ms):
            for record in await _records(partition, reader, ids):
                if record.last_activity_ms <= last_ms and wanted.has_queue(record.lmq_name):
                    yield list(rows_of_queue(partition, record, wanted))


async def scan_abandoned_groups(
    partition: Partition, wanted: TableFilter
) -> AsyncIterator[list[Row]]:
    """Groups of queues that may have abandoned ones, by the expiry of their topics."""
    now_ms = partition.now_ms()
    with partition.reader() as reader:
        for topic in partition.state.topics.expiring():
            if wanted.topic not in ("", topic.name):
                continue
            last_ms = now_ms - expiry_ms(topic)
            async for ids in _due_queues(partition, reader, AgeKind.GROUPS, topic.name, last_ms):
                for record in await _records(partition, reader, ids):
                    if not wanted.has_queue(record.lmq_name):
                        continue
                    try:
                        state = await partition.state.handles.read_state(record.lmq_name)
                    except QueueNotFound:
                        continue  # deleted meanwhile
                    yield list(rows_of_groups(partition, state, wanted))


async def scan_due_runs(partition: Partition, wanted: TableFilter) -> AsyncIterator[list[Row]]:
    """Runs of the topics with limits, oldest queues of a topic first."""
    now_ms = partition.now_ms()
    with partition.reader() as reader:
        for topic in partition.state.topics.limited():
            if wanted.topic not in ("", topic.name):
                continue
            limits = {kind: limit_ms(topic.settings, kind, wanted.due_types) for kind in _RULES}
            due_since = {kind: now_ms - age_ms for kind, age_ms in limits.items() if age_ms}
            for kind, last_ms in due_since.items():
                async for ids in _due_queues(partition, reader, kind, topic.name, last_ms):
                    found = await _queues(partition, reader, ids)
                    some = [each for each in found if wanted.has_queue(each.lmq_name)]
                    if kind is AgeKind.SETTLED and AgeKind.WAITING in due_since:
                        # Queues whose waiting messages are due were read with these already.
                        waiting_ms = due_since[AgeKind.WAITING]
                        some = [e for e in some if not 0 < e.waiting_since_ms <= waiting_ms]
                    async for due in _runs_of(
                        partition, reader, topic.name, some, due_since, wanted
                    ):
                        yield due


async def _due_queues(
    partition: Partition, reader: Reader, kind: AgeKind, topic: str, last_ms: int
) -> AsyncIterator[list[int]]:
    after = b""
    marks = partition.state.ages
    while True:
        rows, after = await marks.due_rows(reader, kind, topic, last_ms, after, _ROWS_PER_PAGE)
        if not rows:
            return
        queue_ids = [each for row in rows for each in row.queue_ids]
        for start in range(0, len(queue_ids), QUEUES_PER_PAGE):
            yield queue_ids[start : start + QUEUES_PER_PAGE]


class _DueQueue(NamedTuple):
    """A queue whose time has come."""

    lmq_name: str
    waiting_since_ms: int
    cold: ColdQueue | None
    """Its row, unless the queue is loaded or has to be."""


async def _records(
    partition: Partition, reader: Reader, queue_ids: Sequence[int]
) -> list[QueueRecord]:
    """The records of queues by their ids, without those that are deleted."""
    found = []
    for name, value in await _catalog(reader, queue_ids):
        handle = partition.state.handles.peek(name)
        if handle is not None:
            found.append(handle.state.record)
        else:
            found.append(queue_rows.read_queue(name, value))
    return found


async def _queues(
    partition: Partition, reader: Reader, queue_ids: Sequence[int]
) -> list[_DueQueue]:
    """The same, where the row is enough for most of them."""
    found = []
    for name, value in await _catalog(reader, queue_ids):
        handle = partition.state.handles.peek(name)
        cold = queue_rows.read_cold(value) if handle is None else None
        if cold is not None:
            found.append(_DueQueue(name, cold.bounds[0], cold))
            continue
        record = queue_rows.read_queue(name, value) if handle is None else handle.state.record
        found.append(_DueQueue(name, record.waiting_since_ms, None))
    return found


async def _catalog(reader: Reader, queue_ids: Sequence[int]) -> list[tuple[str, bytes]]:
    """Names and rows of queues by their ids, without those that are deleted."""
    names = await reader.load(Table.QUEUES, [u64(each) for each in queue_ids])
    known = [name.decode() for name in names if name is not None]
    values = await reader.load(Table.CATALOG, [queue_rows.catalog_key(name) for name in known])
    rows = zip(known, values, strict=True)
    return [(name, value) for name, value in rows if value is not None]


async def _runs_of(
    partition: Partition,
    reader: Reader,
    topic: str,
    queues: Sequence[_DueQueue],
    due_since: DueSince,
    wanted: TableFilter,
) -> AsyncIterator[list[Row]]:
    """Runs of many queues of a topic. Those that are cold and have one run are read together."""
    singles: list[tuple[str, ColdQueue, int]] = []
    others: list[str] = []
    for lmq_name, _, cold in queues:
        if cold is None or partition.state.erasures.concerns(cold.queue_id):
            others.append(lmq_name)
        elif cold.messages:
            singles.append((lmq_name, cold, cold.next_offset - cold.messages))
    headers = await reader.load(
        Table.RUN_HEADERS,
        [run_rows.plain_run_key(cold.queue_id, first) for _, cold, first in singles],
    )
    number, now_ms = partition.number, partition.now_ms()
    waiting_ms = due_since.get(AgeKind.WAITING, 0)
    settled_ms = due_since.get(AgeKind.SETTLED, 0)
    some: list[Row] = []
    for (lmq_name, cold, first_offset), header in zip(singles, headers, strict=True):
        run = None if header is None else run_rows.read_numbers(header)
        if run is None or run[0] != cold.messages:
            others.append(lmq_name)
            continue
        groups, publish_time_ms = len(cold.groups), run[2]
        waiting = cold.waiting_groups(first_offset + run[0]) if groups else 0
        last_ms = settled_ms if groups and not waiting else waiting_ms
        if publish_time_ms <= last_ms and wanted.has_time(publish_time_ms):
            queue = (number, topic, lmq_name, cold.queue_id)
            some.append(run_row(queue, "", first_offset, run, now_ms, groups, waiting))
    yield some
    for lmq_name in others:
        try:
            state = await partition.state.handles.read_state(lmq_name)
        except QueueNotFound:
            continue  # deleted meanwhile
        async for due in _aged_runs(partition, reader, state, due_since, wanted):
            yield due


async def _aged_runs(
    partition: Partition,
    reader: Reader,
    state: QueueState,
    due_since: DueSince,
    wanted: TableFilter,
) -> AsyncIterator[list[Row]]:
    """Runs of one queue that are old enough for a rule: in each lane the first ones."""
    record = state.record
    bounds = {
        AgeKind.WAITING: record.waiting_since_ms,
        AgeKind.SETTLED: record.settled_since_ms,
    }
    kinds = [kind for kind, last_ms in due_since.items() if 0 < bounds[kind] <= last_ms]
    if not kinds or not record.messages:
        return
    last_ms = max(due_since[kind] for kind in kinds)
    purge = partition.state.erasures.purge_of(record.queue_id)
    keys = await fairness_keys(reader, record.queue_id) if record.keyed else [""]
    for fairness_key in keys:
        ranges = [offsets_of(state, fairness_key, kind) for kind in kinds]
        first = min(start for start, _ in ranges)
        ends = [end for _, end in ranges]
        prefix = run_rows.lane_prefix(record.queue_id, fairness_key)
        stop = prefix_end(prefix)
        if None not in ends:
            stop = prefix + u64(max(end for end in ends if end is not None))
        start = prefix + u64(first)
        while start < stop:
            page = await scan_runs(reader, purge, start, stop, limit=_PAGE_HEADERS)
            runs = run_rows.read_lane_runs(page)
            young = next((at for at, run in enumerate(runs) if run.publish_time_ms > last_ms), None)
            if record.unordered:
                runs = [run for run in runs if run.publish_time_ms <= last_ms]
            elif young is not None:
                runs = runs[:young]
            yield list(rows_of_runs(partition, state, runs, wanted))
            if len(page) < _PAGE_HEADERS or (young is not None and not record.unordered):
                break
            start = successor(page[-1][0])
