"""The retention API: tables to plan from, bounded deletions, their history, and metrics."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from storage_svc.operations.history import RetentionType
from storage_svc.operations.retention import OF_PASSES, ApplyRetention
from storage_svc.operations.retention_rules import RetentionRow
from storage_svc.operations.system_metrics import Measurement, RecordMetrics
from storage_svc.partition.partitions import Partitions
from storage_svc.pass_tally import PassTally
from storage_svc.reads import tables
from storage_svc.reads.history import HistoryFilter, list_history
from storage_svc.reads.next_due import DueRules, next_due
from storage_svc.reads.table_filter import TableFilter, TableName
from storage_svc.scheduler_lease import SchedulerLease
from tidemark import limits
from tidemark.api.storage.v1 import retention_pb2, retention_pb2_grpc
from tidemark.clock import Clock
from tidemark.errors import BatchTooLarge, InvalidArgument, TidemarkError, Unavailable
from tidemark.names import LmqName

Context = grpc.aio.ServicerContext[Any, Any]

BATCH_ROWS_MAX = 65_536
BATCH_ROWS_DEFAULT = 8_192
MEASUREMENTS_MAX = 1_000
HOLD_MS_MAX = 600_000
_TABLE_PREFIX = "SCAN_TABLE_NAME_"
_TYPE_PREFIX = "RETENTION_TYPE_"
_NO_TABLE = "unspecified"


class RetentionService(retention_pb2_grpc.RetentionServiceServicer):
    """The calls of retention passes and of their scheduler."""

    def __init__(self, partitions: Partitions, clock: Clock) -> None:
        self._partitions = partitions
        self._clock = clock
        self._scheduler_lease = SchedulerLease()
        self._tally = PassTally()

    async def ScanTable(
        self, request: retention_pb2.ScanTableRequest, context: Context
    ) -> AsyncIterator[retention_pb2.ScanTableResponse]:
        if request.batch_rows > BATCH_ROWS_MAX:
            raise InvalidArgument(f"at most {BATCH_ROWS_MAX} rows a batch", field="batch_rows")
        wanted = TableFilter(
            request.columns,
            request.topic,
            request.after_time.ToMilliseconds(),
            request.before_time.ToMilliseconds(),
            request.lmq_name,
            request.prefix,
            request.age_ms_min,
            frozenset(map(_type, request.due_types)),
        )
        if request.lmq_name:
            LmqName.parse(request.lmq_name)
        partition = self._partitions.get(request.partition)
        batch_rows = request.batch_rows or BATCH_ROWS_DEFAULT
        async with aclosing(
            tables.scan(partition, _table(request.table), wanted, batch_rows, self._clock)
        ) as batches:
            async for arrow, rows in batches:
                yield retention_pb2.ScanTableResponse(arrow=arrow, rows=rows)

    async def ApplyRetention(
        self, request: retention_pb2.ApplyRetentionRequest, context: Context
    ) -> retention_pb2.ApplyRetentionResponse:
        _check_name(request.pass_id, "pass_id")
        if len(request.rows) > limits.RETENTION_ROWS_MAX:
            raise BatchTooLarge(f"at most {limits.RETENTION_ROWS_MAX} rows a call")
        if not request.rows:
            raise InvalidArgument("there is nothing to apply", field="rows")
        partition = self._partitions.get(request.partition)
        operation = ApplyRetention(
            request.pass_id, _type(request.type), tuple(map(_row, request.rows))
        )
        operation.check()
        response = retention_pb2.ApplyRetentionResponse()
        # One after the other, so that other operations join the commits in between.
        for part in operation.split():
            applied = await partition.call(part)
            if not applied.more:  # otherwise the call is repeated
                self._tally.add(part.pass_id, sum(row.planned_rows for row in part.rows))
            response.messages += applied.messages
            response.bytes += applied.body_bytes
            response.queues += applied.queues
            response.stale += applied.stale
            response.more |= applied.more
            response.groups += applied.groups
        return response

    async def GetPassProgress(
        self, request: retention_pb2.GetPassProgressRequest, context: Context
    ) -> retention_pb2.GetPassProgressResponse:
        _check_name(request.pass_id, "pass_id")
        return retention_pb2.GetPassProgressResponse(rows=self._tally.rows(request.pass_id))

    async def NextDue(
        self, request: retention_pb2.NextDueRequest, context: Context
    ) -> retention_pb2.NextDueResponse:
        rules = DueRules(
            frozenset(map(_type, request.types)),
            request.inactive_queue_age_ms,
            request.old_records_age_ms,
        )
        if not rules.types or not rules.types <= set(OF_PASSES):
            raise InvalidArgument("types are rules that a pass applies", field="types")
        response = retention_pb2.NextDueResponse()
        for number in sorted(self._partitions.held):
            answer = response.partitions.add(partition=number)
            try:
                found = await next_due(self._partitions.get(number), rules, self._clock)
            except TidemarkError as error:  # the others answer
                answer.error = error.detail
                continue
            if found.due_in_ms is not None:
                answer.due_in_ms = found.due_in_ms
            answer.due_types.extend(map(_type_to_proto, found.types))
            answer.due_tables.extend(
                retention_pb2.ScanTableName.Value(_TABLE_PREFIX + table.upper())
                for table in found.tables
            )
        return response

    async def ListRetentionHistory(
        self, request: retention_pb2.ListRetentionHistoryRequest, context: Context
    ) -> retention_pb2.ListRetentionHistoryResponse:
        if request.page_size > limits.PAGE_SIZE_MAX:
            raise InvalidArgument(f"at most {limits.PAGE_SIZE_MAX} a page", field="page_size")
        if request.lmq_name:
            LmqName.parse(request.lmq_name)
        wanted = HistoryFilter(
            _type(request.type) if request.type else None,
            request.lmq_name,
            request.topic,
            request.pass_id,
        )
        held = self._partitions.held
        numbers = [request.partition] if request.HasField("partition") else sorted(held)
        listed, next_page_token = await list_history(
            [self._partitions.get(number) for number in numbers],
            wanted,
            request.page_token,
            request.page_size or limits.PAGE_SIZE_DEFAULT,
        )
        response = retention_pb2.ListRetentionHistoryResponse(next_page_token=next_page_token)
        for each in listed:
            added = response.rows.add(
                partition=each.partition,
                lmq_name=each.lmq_name,
                messages=each.messages,
                bytes=each.body_bytes,
                type=_type_to_proto(RetentionType(each.row.type)),
                pass_id=each.row.pass_id,
            )
            added.execute_time.FromMilliseconds(each.row.executed_at_ms)
        return response

    async def RecordMetrics(
        self, request: retention_pb2.RecordMetricsRequest, context: Context
    ) -> retention_pb2.RecordMetricsResponse:
        if not request.rows:
            raise InvalidArgument("there is nothing to record", field="rows")
        if len(request.rows) > MEASUREMENTS_MAX:
            raise BatchTooLarge(f"at most {MEASUREMENTS_MAX} rows a call")
        if not self._partitions.held:
            raise Unavailable("this node holds no partition")
        partition = self._partitions.get(min(self._partitions.held))
        await partition.call(RecordMetrics(tuple(map(_measurement, request.rows))))
        return retention_pb2.RecordMetricsResponse()

    async def HoldSchedule(
        self, request: retention_pb2.HoldScheduleRequest, context: Context
    ) -> retention_pb2.HoldScheduleResponse:
        _check_name(request.holder, "holder")
        if request.hold_ms > HOLD_MS_MAX:
            raise InvalidArgument(f"at most {HOLD_MS_MAX} ms", field="hold_ms")
        now_ms = self._clock.monotonic_ms()
        holder, ends_in_ms = self._scheduler_lease.hold(request.holder, request.hold_ms, now_ms)
        return retention_pb2.HoldScheduleResponse(
            held=holder == request.holder, holder=holder, ends_in_ms=ends_in_ms
        )


def _check_name(name: str, field: str) -> None:
    if not 0 < len(name.encode()) <= limits.PRODUCER_ID_BYTES_MAX:
        raise InvalidArgument(
            f"{field} is 1 to {limits.PRODUCER_ID_BYTES_MAX} bytes long", field=field
        )


def _measurement(proto: retention_pb2.MetricRow) -> Measurement:
    _check_name(proto.instance, "instance")
    _check_name(proto.name, "name")
    return Measurement(
        proto.instance,
        proto.name,
        proto.samples,
        proto.min,
        proto.max,
        proto.mean,
        proto.last,
    )


def _table(proto: retention_pb2.ScanTableName.ValueType) -> TableName:
    try:
        return TableName(retention_pb2.ScanTableName.Name(proto).removeprefix(_TABLE_PREFIX))
    except ValueError:
        raise InvalidArgument("not a table that can be read", field="table") from None


def _type(proto: retention_pb2.RetentionType.ValueType) -> RetentionType:
    try:
        return RetentionType[retention_pb2.RetentionType.Name(proto).removeprefix(_TYPE_PREFIX)]
    except (KeyError, ValueError):
        raise InvalidArgument("not a retention type", field="type") from None


def _type_to_proto(kind: RetentionType) -> retention_pb2.RetentionType.ValueType:
    return retention_pb2.RetentionType.Value(_TYPE_PREFIX + kind.name)


def _row(proto: retention_pb2.RetentionRow) -> RetentionRow:
    table = _NO_TABLE
    if proto.table:  # most rows are about messages
        try:
            name = retention_pb2.ScanTableName.Name(proto.table)
        except ValueError:
            raise InvalidArgument("there is no such table", field="table") from None
        table = name.removeprefix(_TABLE_PREFIX).lower()
    messages = proto.range
    return RetentionRow(
        proto.queue_id,
        proto.lmq_name,
        proto.fairness_key,
        messages.start,
        messages.end,
        proto.before_ms,
        table,
        proto.age_ms,
        proto.group,
        proto.planned_rows or 1,
    )
