"""The columns of a planned deletion as rows, and deletions as a result per part.

Columns are checked here: a call of which any part could not be applied changes nothing.
"""

from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import ge
from typing import TypeVar

from storage_svc.operations.history import RetentionType
from storage_svc.operations.retention import (
    OF_AGE,
    OF_PASSES,
    RECORD_TABLES,
    ApplyRetention,
    RetentionApplied,
)
from storage_svc.operations.retention_rules import OF_MESSAGES, RetentionRow
from tidemark import limits
from tidemark.api.storage.v1 import retention_pb2
from tidemark.errors import BatchTooLarge, InvalidArgument

TABLE_PREFIX = "SCAN_TABLE_NAME_"
_TYPE_PREFIX = "RETENTION_TYPE_"

T = TypeVar("T")


def read_type(proto: retention_pb2.RetentionType.ValueType) -> RetentionType:
    try:
        return RetentionType[retention_pb2.RetentionType.Name(proto).removeprefix(_TYPE_PREFIX)]
    except (KeyError, ValueError):
        raise InvalidArgument("not a retention type", field="type") from None


def type_to_proto(kind: RetentionType) -> retention_pb2.RetentionType.ValueType:
    return retention_pb2.RetentionType.Value(_TYPE_PREFIX + kind.name)


def read_parts(request: retention_pb2.ApplyRetentionRequest) -> list[ApplyRetention]:
    """An operation per part. Raises if any of them could not be applied."""
    rows = sum(max(1, len(part.queue_ids)) for part in request.parts)
    if rows > limits.RETENTION_ROWS_MAX:
        raise BatchTooLarge(f"at most {limits.RETENTION_ROWS_MAX} rows a call")
    if not rows:
        raise InvalidArgument("there is nothing to apply", field="parts")
    return [_read_part(request.pass_id, part) for part in request.parts]


def _read_part(pass_id: str, part: retention_pb2.RetentionPart) -> ApplyRetention:
    kind = read_type(part.type)
    if kind not in OF_PASSES:
        raise InvalidArgument(f"{kind.value} is not applied by a pass", field="type")
    if kind in OF_AGE and not part.age_ms:
        raise InvalidArgument("queues and records require an age", field="age_ms")
    if kind is RetentionType.OLD_RECORDS:
        return ApplyRetention(
            pass_id, kind, (RetentionRow(table=_table(part), age_ms=part.age_ms),)
        )
    count = len(part.queue_ids)
    if not count:
        raise InvalidArgument("there is nothing to apply", field="queue_ids")
    of_messages, of_groups = kind in OF_MESSAGES, kind is RetentionType.ABANDONED_GROUP
    offset = None if of_messages else 0
    rows = zip(
        part.queue_ids,
        _column("lmq_names", part.lmq_names, count),
        _column("fairness_keys", part.fairness_keys, count, ""),
        _column("first_offsets", part.first_offsets, count, offset),
        _column("end_offsets", part.end_offsets, count, offset),
        _column("before_ms", part.before_ms, count, 0 if of_messages else None),
        repeat("", count),
        repeat(part.age_ms, count),
        _column("groups", part.groups, count, None if of_groups else ""),
        _column("planned_rows", part.planned_rows, count, 0),
        strict=True,
    )
    if of_messages and any(map(ge, part.first_offsets, part.end_offsets)):
        raise InvalidArgument("a row of messages requires a range", field="end_offsets")
    if of_groups and not all(part.groups):
        raise InvalidArgument("a row of groups requires a group", field="groups")
    return ApplyRetention(pass_id, kind, tuple(map(RetentionRow._make, rows)))


def _column(field: str, values: Sequence[T], count: int, default: T | None = None) -> Iterable[T]:
    """A column of a part, which has an element per row; where it has a default it may be empty."""
    if not values and default is not None:
        return repeat(default, count)
    if len(values) != count:
        raise InvalidArgument(f"{len(values)} elements for {count} rows", field=field)
    return values


def _table(part: retention_pb2.RetentionPart) -> str:
    try:
        name = retention_pb2.ScanTableName.Name(part.table)
    except ValueError:
        raise InvalidArgument("there is no such table", field="table") from None
    table = name.removeprefix(TABLE_PREFIX).lower()
    if table not in RECORD_TABLES:
        raise InvalidArgument(f"{table!r} is not a table of records", field="table")
    return table


def add_applied(proto: retention_pb2.RetentionPartResult, applied: RetentionApplied) -> None:
    """Add the deletions of one commit to the result of its part."""
    proto.messages += applied.messages
    proto.bytes += applied.body_bytes
    proto.queues += applied.queues
    proto.stale += applied.stale
    proto.more |= applied.more
    proto.groups += applied.groups
