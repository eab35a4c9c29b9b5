"""Operations in columns: the plain appends and acks of all partitions in a frame, decoded at once.

With few messages for each of many partitions, a message of its own for each of them, and for each
of their operations, costs more than what it carries. Everything else has the long form (ADR 43).
"""

from collections.abc import Callable, Iterable
from operator import add, mul
from typing import NamedTuple

from storage_svc.api.exchange_part import Asked, ExchangePart
from storage_svc.operations.acks import AckReservations
from storage_svc.operations.operation import ExchangeResult, Operation
from storage_svc.operations.publish import AppendRuns
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.errors import InvalidArgument, TidemarkError
from tidemark.number_rows import rows_of

Bound = Callable[[int, int], ExchangePart | None]
"""Gets a partition and a broker epoch; None if the stream does not carry it, which is reported."""


_Row = tuple[int, ...]
"""Partition, broker epoch, request id, source, topic version, count of runs and of receipts."""

_Run = tuple[str, bytes, tuple[int, ...]]
"""Queue, body, and with it count and sequence."""

_Decoded = Operation[ExchangeResult] | TidemarkError
"""An operation, or why it is refused."""


class _Columns(NamedTuple):
    """What operations take in order, and what they refer to."""

    rows: Iterable[_Row]
    sources: list[str]
    runs: list[_Run]
    run_bytes: list[int]
    receipts: tuple[bytes, ...]


def decode_columns(columns: exchange_pb2.OperationColumns, bound: Bound) -> list[Asked]:
    """The operations of each partition, as `ExchangePart.decode` gives them.

    Raises InvalidArgument if the columns do not belong together, before `bound` is called.
    """
    try:
        rows, sources, runs, run_bytes, receipts = _read(columns)
    except ValueError as error:
        raise InvalidArgument(f"columns: {error}", field="columns") from None
    all_asked: list[Asked] = []
    asked: Asked | None = None
    before = (-1, -1)
    run = receipt = 0
    for partition, epoch, request_id, source, version, run_count, receipt_count in rows:
        operation: _Decoded
        if run_count:
            steps = unanswered = run_count
            end = run + run_count
            operation = _appends(runs[run:end], sources[source], version)
            size = run_bytes[run] if run_count == 1 else sum(run_bytes[run:end])
            run = end
        else:
            steps, unanswered = receipt_count, 1
            own = receipts[receipt : receipt + receipt_count]
            receipt += receipt_count
            operation = _acks(own, sources[source])
            size = len(own[0]) if receipt_count == 1 else sum(map(len, own))
        if before != (partition, epoch):
            before = partition, epoch
            part = bound(partition, epoch)
            asked = None
            if part is None:
                continue
            if not isinstance(operation, TidemarkError):  # mostly the only one of its partition
                asked = Asked(part, [operation], [request_id], unanswered, steps, size)
                all_asked.append(asked)
                continue
            asked = Asked(part, [], [], 0, 0, 0)
            all_asked.append(asked)
        if asked is not None:
            asked.add(request_id, operation, unanswered, steps, size)
    return all_asked


def _read(columns: exchange_pb2.OperationColumns) -> _Columns:
    """Raises ValueError if columns do not belong together, or an operation stores and
    acknowledges."""
    operations = columns.operations[:]
    sources, names, bodies = columns.sources[:], columns.lmq_names[:], columns.bodies[:]
    runs = list(zip(names, bodies, rows_of(columns.runs[:], 2), strict=True))
    receipts = columns.receipts[:]
    run_counts, receipt_counts = operations[5::7], operations[6::7]
    if len(operations) % 7:
        raise ValueError("the last operation is not complete")
    if any(map(mul, run_counts, receipt_counts)):
        raise ValueError("an operation has runs and receipts")
    if operations and max(operations[3::7]) >= len(sources):
        raise ValueError("an operation has an unknown source")
    if len(runs) != sum(run_counts):
        raise ValueError("counts of runs and runs disagree")
    if len(receipts) != sum(receipt_counts):
        raise ValueError("counts of receipts and receipts disagree")
    run_bytes = list(map(add, map(len, names), map(len, bodies)))
    return _Columns(rows_of(operations, 7), sources, runs, run_bytes, tuple(receipts))


def _appends(runs: list[_Run], producer_id: str, topic_version: int) -> AppendRuns | TidemarkError:
    try:
        return AppendRuns.from_rows(runs, producer_id, topic_version)
    except TidemarkError as error:
        return error
    except ValueError as error:  # as `decode_operation` does
        return InvalidArgument(f"appends: {error}", field="appends")


def _acks(receipts: tuple[bytes, ...], client_id: str) -> AckReservations | TidemarkError:
    try:
        return AckReservations.of(receipts, client_id)
    except TidemarkError as error:
        return error
