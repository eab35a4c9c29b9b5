"""The calls of a retention pass, and what they show, in short."""

from typing import Any

import pyarrow as pa

from tests.support.storage_client import ExchangeClient, RunningStorage, reserve, settle
from tidemark.api.storage.v1.action_pb2 import OffsetRange
from tidemark.api.storage.v1.retention_pb2 import (
    ApplyRetentionRequest,
    ListRetentionHistoryRequest,
    MetricRow,
    RetentionRow,
    RetentionType,
    ScanTableName,
    ScanTableRequest,
)

FOREVER_MS = 1 << 60
UNKNOWN_TABLE = ScanTableName.ValueType(99)


async def apply(
    storage: RunningStorage,
    kind: RetentionType.ValueType,
    *rows: RetentionRow,
    pass_id: str = "pass-1",
    partition: int = 0,
) -> tuple[int, int, int]:
    """Messages, queues and stale rows."""
    request = ApplyRetentionRequest(partition=partition, pass_id=pass_id, type=kind, rows=rows)
    applied = await storage.retention.ApplyRetention(request)
    return applied.messages, applied.queues, applied.stale


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


def run(queue_id: int, start: int = 0, end: int = 1, lmq_name: str = "kept") -> RetentionRow:
    return RetentionRow(
        queue_id=queue_id, lmq_name=lmq_name, range=OffsetRange(start=start, end=end)
    )


async def settled(exchange: ExchangeClient, lmq_name: str, group: str = "default") -> None:
    for each in (await exchange.ask(reserve(lmq_name, group=group))).slices:
        await exchange.ask(settle(each.receipt))


def figure(name: str, instance: str = "broker-0") -> MetricRow:
    return MetricRow(instance=instance, name=name, samples=60, min=1.0, max=4.0, mean=2.5, last=3.0)
