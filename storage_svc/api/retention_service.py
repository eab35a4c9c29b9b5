"""The retention API: tables to plan from, bounded deletions, their history, and metrics."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import grpc

from storage_svc.api.retention_codec import (
    TABLE_PREFIX,
    add_applied,
    read_parts,
    read_type,
    type_to_proto,
)
from storage_svc.operations.history import RetentionType
from storage_svc.operations.retention import OF_PASSES, ApplyRetention, in_commits
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
from tidemark.field_checks import unix_ms
from tidemark.names import LmqName
from tidemark.rpc.statuses import to_status

Context = grpc.aio.ServicerContext[Any, Any]
_Part = tuple[ApplyRetention, retention_pb2.RetentionPartResult]

BATCH_ROWS_MAX = 65_536
BATCH_ROWS_DEFAULT = 8_192
MEASUREMENTS_MAX = 1_000
HOLD_MS_MAX = 600_000


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
            unix_ms("after_time", request.after_time),
            unix_ms("before_time", request.before_time),
            request.lmq_name,
            request.prefix,
            request.age_ms_min,
            frozenset(map(read_type, request.due_types)),
        )
        if request.lmq_name:
            LmqName.parse(request.lmq_name)
        partition = self._partitions.get(request.partition)
        batch_rows = request.batch_rows or BATCH_ROWS_DEFAULT
        async with (
            partition.verified(),  # its end is an answer as well
            aclosing(
                tables.scan(partition, _table(request.table), wanted, batch_rows, self._clock)
            ) as batches,
        ):
            async for arrow, rows in batches:
                await partition.verify()
                yield retention_pb2.ScanTableResponse(arrow=arrow, rows=rows)

    async def ApplyRetention(
        self, request: retention_pb2.ApplyRetentionRequest, context: Context
    ) -> retention_pb2.ApplyRetentionResponse:
        _check_name(request.pass_id, "pass_id")
        operations = read_parts(request)
        self._tally.add(request.pass_id, planned=request.planned_rows)
        places: dict[int, list[int]] = {}
        for at, part in enumerate(request.parts):
            places.setdefault(part.partition, []).append(at)
        response = retention_pb2.ApplyRetentionResponse()
        for _ in operations:
            response.parts.add()
        # At the same time, so that the commits of several partitions share a sync.
        async with asyncio.TaskGroup() as applying:
            for number, some in places.items():
                parts = [(operations[at], response.parts[at]) for at in some]
                applying.create_task(self._apply(number, parts))
        return response

    async def _apply(self, number: int, parts: Sequence[_Part]) -> None:
        """Apply the parts of one partition, commit by commit, up to the first that is refused."""
        at = 0
        try:
            partition = self._partitions.get(number)
            # One after the other, so that other operations join the commits in between.
            for some in in_commits([operation for operation, _ in parts]):
                at = some[0][0]
                answers = await partition.submit([operation for _, operation in some])
                for (at, operation), applied in zip(some, answers, strict=True):
                    if isinstance(applied, TidemarkError):
                        raise applied
                    add_applied(parts[at][1], applied)
                    if not applied.more:  # otherwise the call is repeated
                        rows = sum(row.planned_rows or 1 for row in operation.rows)
                        self._tally.add(operation.pass_id, applied=rows)
        except TidemarkError as error:
            for _, result in parts[at:]:
                result.error.CopyFrom(to_status(error))

    async def GetPassProgress(
        self, request: retention_pb2.GetPassProgressRequest, context: Context
    ) -> retention_pb2.GetPassProgressResponse:
        _check_name(request.pass_id, "pass_id")
        found = self._tally.rows(request.pass_id)
        return retention_pb2.GetPassProgressResponse(rows=found.applied, planned_rows=found.planned)

    async def NextDue(
        self, request: retention_pb2.NextDueRequest, context: Context
    ) -> retention_pb2.NextDueResponse:
        rules = DueRules(
            frozenset(map(read_type, request.types)),
            request.inactive_queue_age_ms,
            request.old_records_age_ms,
        )
        if not rules.types or not rules.types <= set(OF_PASSES):
            raise InvalidArgument("types must be rules that a pass applies", field="types")
        response = retention_pb2.NextDueResponse()
        for number in sorted(self._partitions.held):
            answer = response.partitions.add(partition=number)
            try:
                partition = self._partitions.get(number)
                async with partition.verified():
                    found = await next_due(partition, rules, self._clock)
            except TidemarkError as error:  # the others answer
                answer.error = error.detail
                continue
            if found.due_in_ms is not None:
                answer.due_in_ms = found.due_in_ms
            answer.due_types.extend(map(type_to_proto, found.types))
            answer.due_tables.extend(
                retention_pb2.ScanTableName.Value(TABLE_PREFIX + table.upper())
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
            read_type(request.type) if request.type else None,
            request.lmq_name,
            request.topic,
            request.pass_id,
        )
        held = self._partitions.held
        numbers = [request.partition] if request.HasField("partition") else sorted(held)
        partitions = [self._partitions.get(number) for number in numbers]
        listed, next_page_token = await list_history(
            partitions,
            wanted,
            request.page_token,
            request.page_size or limits.PAGE_SIZE_DEFAULT,
        )
        await asyncio.gather(*(each.verify() for each in partitions))
        response = retention_pb2.ListRetentionHistoryResponse(next_page_token=next_page_token)
        for each in listed:
            added = response.rows.add(
                partition=each.partition,
                lmq_name=each.lmq_name,
                messages=each.messages,
                bytes=each.body_bytes,
                type=type_to_proto(RetentionType(each.row.type)),
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
        return TableName(retention_pb2.ScanTableName.Name(proto).removeprefix(TABLE_PREFIX))
    except ValueError:
        raise InvalidArgument("not a table that can be read", field="table") from None
