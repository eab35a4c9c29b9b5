"""The calls of a retention pass, and what they show, in short."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import pyarrow as pa

from tests.support.exchange_client import ExchangeClient, reserve, settle
from tests.support.storage_client import RunningStorage
from tidemark.api.storage.v1.retention_pb2 import (
    SCAN_TABLE_NAME_UNSPECIFIED,
    ApplyRetentionRequest,
    ListRetentionHistoryRequest,
    MetricRow,
    RetentionPart,
    RetentionPartResult,
    RetentionType,
    ScanTableName,
    ScanTableRequest,
)

FOREVER_MS = 1 << 60
UNKNOWN_TABLE = ScanTableName.ValueType(99)


class Planned(NamedTuple):
    """One planned deletion."""

    queue_id: int = 0
    lmq_name: str = ""
    start: int = 0
    end: int = 0
    before_ms: int = 0
    group: str = ""
    table: ScanTableName.ValueType = SCAN_TABLE_NAME_UNSPECIFIED
    age_ms: int = 0
    runs: int = 0


def part_of(
    kind: RetentionType.ValueType, rows: Sequence[Planned], partition: int = 0
) -> RetentionPart:
    """Planned deletions as columns; of one table, or one age."""
    part = RetentionPart(partition=partition, type=kind, table=rows[0].table, age_ms=rows[0].age_ms)
    if rows[0].queue_id:
        part.queue_ids.extend(row.queue_id for row in rows)
        part.lmq_names.extend(row.lmq_name for row in rows)
        part.first_offsets.extend(row.start for row in rows)
        part.end_offsets.extend(row.end for row in rows)
        part.before_ms.extend(row.before_ms for row in rows)
        part.groups.extend(row.group for row in rows)
    if rows[0].runs:
        part.planned_rows.extend(row.runs for row in rows)
    return part


async def apply(
    storage: RunningStorage,
    kind: RetentionType.ValueType,
    *rows: Planned,
    pass_id: str = "pass-1",
    partition: int = 0,
) -> tuple[int, int, int]:
    """Messages, queues and stale rows."""
    alike = groupby(rows, lambda row: (row.table, row.age_ms))
    parts = [part_of(kind, list(some), partition) for _, some in alike]
    applied = await apply_parts(storage.retention, *parts, pass_id=pass_id)
    return (
        sum(each.messages for each in applied),
        sum(each.queues for each in applied),
        sum(each.stale for each in applied),
    )


async def apply_parts(
    retention: Any, *parts: RetentionPart, pass_id: str = "pass-1"
) -> Sequence[RetentionPartResult]:
    """The results, from a stub of RetentionService."""
    response = await retention.ApplyRetention(ApplyRetentionRequest(pass_id=pass_id, parts=parts))
    results: Sequence[RetentionPartResult] = response.parts
    return results


async def history(storage: RunningStorage, **asked: Any) -> list[tuple[str, int, int, str]]:
    """Queue, messages, type and pass, newest first."""
    answer = await storage.retention.ListRetentionHistory(ListRetentionHistoryRequest(**asked))
    return [(row.lmq_name, row.messages, row.type, row.pass_id) for row in answer.rows]


async def table(
    storage: RunningStorage, name: ScanTableName.ValueType, **asked: Any
) -> list[dict[str, Any]]:
    return await rows_of(storage.retention, name, **asked)


async def rows_of(
    retention: Any, name: ScanTableName.ValueType, **asked: Any
) -> list[dict[str, Any]]:
    """The rows of a table, from a stub of RetentionService."""
    found: list[dict[str, Any]] = []
    async for piece in retention.ScanTable(ScanTableRequest(table=name, **asked)):
        with pa.ipc.open_stream(piece.arrow) as stream:
            rows = stream.read_all().to_pylist()
        assert len(rows) == piece.rows
        found += rows
    return found


def run(queue_id: int, start: int = 0, end: int = 1, lmq_name: str = "kept") -> Planned:
    return Planned(queue_id, lmq_name, start, end)


async def settled(exchange: ExchangeClient, lmq_name: str, group: str = "default") -> None:
    for each in (await exchange.ask(reserve(lmq_name, group=group))).slices:
        await exchange.ask(settle(each.receipt))


def figure(name: str, instance: str = "broker-0") -> MetricRow:
    return MetricRow(instance=instance, name=name, samples=60, min=1.0, max=4.0, mean=2.5, last=3.0)
