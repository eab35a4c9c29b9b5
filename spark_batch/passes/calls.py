"""Calls: folds a plan and packs it into bounded requests to storage.

Pure. Consecutive runs of one lane become one row of a request, because storage then loads the queue
once for all of them. A run in between that is not planned is checked by storage like the others. A
plan has a row per run, so that it stays in columns from the plan to the request: Arrow folds and
cuts them, and nothing here goes row by row.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import reduce
from itertools import pairwise
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from spark_batch.passes import retention_types
from tidemark.api.storage.v1.retention_pb2 import (
    ApplyRetentionRequest,
    RetentionPart,
    RetentionType,
    ScanTableName,
)

RUNS_PER_ROW_MAX: Final = 100
"""Runs in one row of a request, of which storage puts as many into one commit as it can bear."""

_OF_PART: Final = ("partition", "topic", "retention_type", "age_ms")
"""The columns that the rows of one part share."""

_OF_LANE: Final = (*_OF_PART, "lmq_name", "queue_id", "group", "fairness_key")
"""The columns that planned rows of one lane share."""

COLUMNS: Final = (*_OF_LANE, "first_offset", "messages", "before_ms")
"""The columns of a plan that requests are made of."""

END_OFFSET: Final = "end_offset"
ROWS: Final = "rows"
"""Columns of folding: where the last run of a row ends, and how many planned rows it stands for."""


def fold(plan: pa.RecordBatch, rows_max: int) -> pa.RecordBatch:
    """Fold the rows of a plan (`rules.PLAN`), in order, at most `rows_max` into one."""
    count = plan.num_rows
    # Queues, groups and records have no offsets, so each starts a new row.
    begins = pc.or_(_changes(plan, _OF_LANE), _compared(pc.less_equal, plan, "first_offset"))
    heads, lasts = plan, plan
    sizes = pa.array([1] * count, pa.int64())
    if begins.true_count != count:
        starts = _cut(begins, rows_max)
        ends = pa.concat_arrays([starts.slice(1), pa.array([count], pa.int64())])
        heads, lasts = plan.take(starts), plan.take(pc.subtract(ends, 1))
        sizes = pc.subtract(ends, starts)
    end_offsets = pc.add(lasts.column("first_offset"), lasts.column("messages"))
    return heads.append_column(END_OFFSET, end_offsets).append_column(ROWS, sizes)


def _changes(plan: pa.RecordBatch, names: Iterable[str]) -> pa.Array:
    """Whether each row differs from the one before it; the first one does."""
    return reduce(pc.or_, (_compared(pc.not_equal, plan, name) for name in names))


def _compared(compare: Any, plan: pa.RecordBatch, name: str) -> pa.Array:
    """Every row with the one before it; true for the first one."""
    column = plan.column(name)
    first = pa.array([True] * min(1, len(column)), pa.bool_())
    before = column.slice(0, max(0, len(column) - 1))
    return pa.concat_arrays([first, compare(column.slice(1), before)])


def _cut(begins: pa.Array, rows_max: int) -> pa.Array:
    """Where rows begin that are not longer than `rows_max`."""
    starts = pc.indices_nonzero(begins).cast(pa.int64())
    place = pa.array(range(len(begins)), pa.int64())
    start = starts.take(pc.subtract(pc.cumulative_sum(begins.cast(pa.int64())), 1))
    within = pc.subtract(place, start)
    full = pc.multiply(pc.divide(within, rows_max), rows_max)
    return pc.indices_nonzero(pc.equal(within, full)).cast(pa.int64())


class Call(NamedTuple):
    """A request to one storage service, with the topic and retention type of each of its parts."""

    address: str
    request: ApplyRetentionRequest
    subjects: list[tuple[str, str]]

    @property
    def partitions(self) -> set[int]:
        return {part.partition for part in self.request.parts}


def pack(
    plan: Iterable[pa.RecordBatch],
    addresses: Mapping[int, str],
    pass_id: str,
    batch_size: int,
    failed: Collection[int] = (),
) -> Iterator[Call]:
    """Requests that cover folded rows, with at most `batch_size` planned rows each.

    Rows of several partitions, topics and types of one storage service share a request. Folded rows
    are not split, so they must not be larger than `batch_size`. Partitions that are found in
    `failed`, which may grow meanwhile, are left out.
    """
    begun: dict[str, tuple[Call, int]] = {}
    for batch in plan:
        for rows in _parts(batch):
            partition = rows.column("partition")[0].as_py()
            address = addresses[partition]
            ends = _values(pc.cumulative_sum(rows.column(ROWS)))
            start = before = 0
            while start < len(ends) and partition not in failed:
                call, taken = begun.pop(address, (_empty(address, pass_id), 0))
                end = bisect_right(ends, before + batch_size - taken)
                if end > start:
                    call.subjects.append(_add(call.request, rows.slice(start, end - start)))
                    taken += ends[end - 1] - before
                    start, before = end, ends[end - 1]
                if start < len(ends) or taken == batch_size:
                    yield call
                else:
                    begun[address] = call, taken
    for call, _ in begun.values():
        yield call


def _parts(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The rows, cut where a part ends."""
    starts = _values(pc.indices_nonzero(_changes(rows, _OF_PART)))
    for start, end in pairwise([*starts, rows.num_rows]):
        yield rows.slice(start, end - start)


def _empty(address: str, pass_id: str) -> Call:
    return Call(address, ApplyRetentionRequest(pass_id=pass_id), [])


def _add(request: ApplyRetentionRequest, rows: pa.RecordBatch) -> tuple[str, str]:
    """Add rows as a part; returns their topic and retention type."""
    partition, topic, retention_type, age_ms = (rows.column(name)[0].as_py() for name in _OF_PART)
    kind = RetentionType.Value(f"RETENTION_TYPE_{retention_type.upper()}")
    part = request.parts.add(partition=partition, type=kind, age_ms=age_ms)
    if retention_type == retention_types.OLD_RECORDS:
        part.table = ScanTableName.Value(f"SCAN_TABLE_NAME_{topic.upper()}")
        return topic, retention_type
    part.queue_ids.extend(_values(rows.column("queue_id")))
    part.lmq_names.extend(_values(rows.column("lmq_name")))
    match retention_type:
        case retention_types.INACTIVE_QUEUE:
            part.before_ms.extend(_values(rows.column("before_ms")))
        case retention_types.ABANDONED_GROUP:
            part.before_ms.extend(_values(rows.column("before_ms")))
            part.groups.extend(_values(rows.column("group")))
        case _:
            _add_runs(part, rows)
    return topic, retention_type


def _add_runs(part: RetentionPart, rows: pa.RecordBatch) -> None:
    part.first_offsets.extend(_values(rows.column("first_offset")))
    part.end_offsets.extend(_values(rows.column(END_OFFSET)))
    fairness_keys = rows.column("fairness_key")
    if pc.any(pc.not_equal(fairness_keys, "")).as_py():
        part.fairness_keys.extend(_values(fairness_keys))
    if pc.any(pc.not_equal(rows.column("messages"), 1)).as_py():
        part.planned_rows.extend(_values(rows.column(ROWS)))


def _values(column: pa.Array) -> list[Any]:
    """The same as `to_pylist`, which makes an object of Arrow for every element."""
    values: list[Any] = column.to_numpy(zero_copy_only=False).tolist()
    return values
