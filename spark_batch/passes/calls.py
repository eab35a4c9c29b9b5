"""Calls: folds a plan and packs it into bounded requests to storage.

Pure. Consecutive runs of one lane become one row of a request, because storage then loads the queue
once for all of them. A run in between that is not planned is checked by storage like the others. A
plan has a row per run, so folding is done by Arrow, column by column.
"""

from collections.abc import Iterable, Iterator
from functools import reduce
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from spark_batch.passes import retention_types
from tidemark.api.storage.v1.retention_pb2 import (
    ApplyRetentionRequest,
    RetentionRow,
    RetentionType,
    ScanTableName,
)

RUNS_PER_ROW_MAX: Final = 100
"""Runs in one row of a request; storage puts up to 32 rows into one commit."""

_SHARED: Final = (
    "partition",
    "topic",
    "retention_type",
    "lmq_name",
    "queue_id",
    "group",
    "fairness_key",
)
"""The columns that planned rows of one lane share."""

_OF_FIRST: Final = ("first_offset", "before_ms", "age_ms")
"""The columns that are taken from the first of them."""


class Planned(NamedTuple):
    """Consecutive planned rows of one lane, one queue, one group, or one table of old records."""

    partition: int
    topic: str
    retention_type: str
    lmq_name: str
    queue_id: int
    group: str
    fairness_key: str
    first_offset: int
    before_ms: int
    age_ms: int
    end_offset: int
    rows: int


def fold(plan: pa.RecordBatch, rows_max: int) -> Iterator[Planned]:
    """Fold the rows of a plan (`retention_types.PLAN`), in order, at most `rows_max` into one."""
    count = plan.num_rows
    if not count:
        return

    def neighbours(name: str) -> tuple[pa.Array, pa.Array]:
        column = plan.column(name)
        return column.slice(1), column.slice(0, count - 1)

    # Queues, groups and records have no offsets, so each starts a new row.
    begins = reduce(
        pc.or_,
        (pc.not_equal(*neighbours(name)) for name in _SHARED),
        pc.less_equal(*neighbours("first_offset")),
    )
    starts = [0, *(at + 1 for at in pc.indices_nonzero(begins).to_pylist())]
    pieces = [
        (at, min(at + rows_max, end))
        for start, end in zip(starts, [*starts[1:], count], strict=True)
        for at in range(start, end, rows_max)
    ]
    heads = plan.take([start for start, _ in pieces])
    lasts = plan.take([end - 1 for _, end in pieces])
    columns = [heads.column(name).to_pylist() for name in (*_SHARED, *_OF_FIRST)]
    ends = pc.add(lasts.column("first_offset"), lasts.column("messages")).to_pylist()
    sizes = [end - start for start, end in pieces]
    yield from map(Planned._make, zip(*columns, ends, sizes, strict=True))


class Call(NamedTuple):
    """A request, with the topic and type that it belongs to."""

    topic: str
    retention_type: str
    request: ApplyRetentionRequest


def pack(plan: Iterable[Planned], pass_id: str, batch_size: int) -> Iterator[Call]:
    """Requests that cover the plan in its order, with at most `batch_size` planned rows each.

    Folded rows are not split, so they must not be larger than `batch_size`.
    """
    call: Call | None = None
    about: tuple[object, ...] = ()
    taken = 0
    for planned in plan:
        same_call = planned[:3] == about and taken + planned.rows <= batch_size
        if call is None or not same_call:
            if call is not None:
                yield call
            call, taken, about = _empty(planned, pass_id), 0, planned[:3]
        _add(call.request, planned)
        taken += planned.rows
    if call is not None:
        yield call


def _empty(planned: Planned, pass_id: str) -> Call:
    kind = RetentionType.Value(f"RETENTION_TYPE_{planned.retention_type.upper()}")
    request = ApplyRetentionRequest(partition=planned.partition, pass_id=pass_id, type=kind)
    return Call(planned.topic, planned.retention_type, request)


def _add(request: ApplyRetentionRequest, planned: Planned) -> None:
    row: RetentionRow = request.rows.add(
        lmq_name=planned.lmq_name, queue_id=planned.queue_id, planned_rows=planned.rows
    )
    match planned.retention_type:
        case retention_types.OLD_RECORDS:
            row.table = ScanTableName.Value(f"SCAN_TABLE_NAME_{planned.topic.upper()}")
            row.age_ms = planned.age_ms
        case retention_types.INACTIVE_QUEUE:
            row.before_ms = planned.before_ms
            row.age_ms = planned.age_ms
        case retention_types.ABANDONED_GROUP:
            row.group = planned.group
            row.before_ms = planned.before_ms
        case _:
            row.fairness_key = planned.fairness_key
            row.range.start = planned.first_offset
            row.range.end = planned.end_offset
