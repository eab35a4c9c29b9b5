"""Calls: packs planned deletions into bounded requests to storage.

Pure. Consecutive runs of one lane become one row of a request, because storage loads the queue once
for all of them; a run that is not planned but lies between two that are is checked like the others.
"""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from spark_batch import rules
from tidemark.api.storage.v1.retention_pb2 import (
    ApplyRetentionRequest,
    RetentionRow,
    RetentionType,
    ScanTableName,
)

RUNS_PER_ROW_MAX: Final = 100
"""Runs that one row of a request names: storage puts up to 32 rows into one commit."""


class Planned(NamedTuple):
    """One row of a plan, in the order of `rules.PLAN`."""

    partition: int
    topic: str
    retention_type: str
    lmq_name: str
    queue_id: int
    fairness_key: str
    first_offset: int
    messages: int
    bytes: int
    before_ms: int


class Call(NamedTuple):
    """A request, and what it is about."""

    topic: str
    retention_type: str
    request: ApplyRetentionRequest


def pack(plan: Iterable[Planned], pass_id: str, batch_size: int) -> Iterator[Call]:
    """Requests that cover the plan in its order, with at most `batch_size` planned rows each."""
    call: Call | None = None
    taken = runs = 0
    last: Planned | None = None
    for planned in plan:
        same_call = (
            call is not None
            and last is not None
            and planned[:3] == last[:3]  # partition, topic and type
            and taken < batch_size
        )
        if call is not None and not same_call:
            yield call
        if call is None or not same_call:
            call, taken, last = _empty(planned, pass_id), 0, None
        if last is not None and runs < RUNS_PER_ROW_MAX and _follows(planned, last):
            call.request.rows[-1].range.end = planned.first_offset + planned.messages
            runs += 1
        else:
            _add(call.request, planned)
            runs = 1
        taken += 1
        last = planned
    if call is not None:
        yield call


def _follows(planned: Planned, last: Planned) -> bool:
    return (
        planned.retention_type not in (rules.INACTIVE_QUEUE, rules.OLD_RECORDS)
        and planned.queue_id == last.queue_id
        and planned.fairness_key == last.fairness_key
        and planned.first_offset > last.first_offset
    )


def _empty(planned: Planned, pass_id: str) -> Call:
    kind = RetentionType.Value(f"RETENTION_TYPE_{planned.retention_type.upper()}")
    request = ApplyRetentionRequest(partition=planned.partition, pass_id=pass_id, type=kind)
    return Call(planned.topic, planned.retention_type, request)


def _add(request: ApplyRetentionRequest, planned: Planned) -> None:
    row: RetentionRow = request.rows.add(lmq_name=planned.lmq_name, queue_id=planned.queue_id)
    match planned.retention_type:
        case rules.OLD_RECORDS:
            row.table = ScanTableName.Value(f"SCAN_TABLE_NAME_{planned.topic.upper()}")
            row.before_ms = planned.before_ms
        case rules.INACTIVE_QUEUE:
            row.before_ms = planned.before_ms
        case _:
            row.fairness_key = planned.fairness_key
            row.range.start = planned.first_offset
            row.range.end = planned.first_offset + planned.messages
