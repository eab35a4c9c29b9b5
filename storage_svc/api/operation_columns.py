"""Operations in columns: the plain appends and acks of all partitions in a frame, decoded at once.

With few messages for each of many partitions, a message of its own for each of them, and for each
of their operations, costs more than what it carries. Everything else has the long form (ADR 43).
"""

from collections.abc import Callable

from storage_svc.api.exchange_part import Asked, ExchangePart
from storage_svc.operations.acks import AckReservations
from storage_svc.operations.operation import ExchangeResult, Operation
from storage_svc.operations.publish import AppendRuns
from tidemark.api.storage.v1 import exchange_pb2
from tidemark.errors import InvalidArgument, TidemarkError

Bound = Callable[[int, int], ExchangePart | None]
"""Gets a partition and a broker epoch; None if the stream does not carry it, which is reported."""


_Row = tuple[int, int, int, int, int, int]
"""Partition, broker epoch, request id, source, count of runs and count of receipts."""


def decode_columns(
    columns: exchange_pb2.OperationColumns,
    bound: Bound,
    answered: Callable[[ExchangePart], None],
) -> list[Asked]:
    """The operations of each partition, as `ExchangePart.decode` gives them.

    Raises InvalidArgument if the columns do not belong together, before `bound` is called.
    """
    try:
        rows = _rows(columns)
        runs = _Runs(columns)
        receipts = _Receipts(columns)
    except ValueError as error:
        raise InvalidArgument(f"columns: {error}", field="columns") from None
    all_asked: list[Asked] = []
    asked: Asked | None = None
    before = (-1, -1)
    for partition, epoch, request_id, source, run_count, receipt_count in rows:
        if before != (partition, epoch):
            before = partition, epoch
            part = bound(partition, epoch)
            asked = None
            if part is not None:
                asked = Asked(part, answered)
                all_asked.append(asked)
        operation: Operation[ExchangeResult] | TidemarkError
        if run_count:
            operation, size = runs.next(run_count, source)
        else:
            operation, size = receipts.next(receipt_count, source)
        if asked is not None:
            asked.add(request_id, operation, run_count or 1, size)
    return all_asked


def _rows(columns: exchange_pb2.OperationColumns) -> list[_Row]:
    """An entry for each operation. Raises ValueError if it stores and acknowledges."""
    rows = list(
        zip(
            columns.partitions,
            columns.broker_epochs,
            columns.request_ids,
            columns.source_indexes,
            columns.run_counts,
            columns.receipt_counts,
            strict=True,
        )
    )
    if any(runs and receipts for *_, runs, receipts in rows):
        raise ValueError("an operation has runs and receipts")
    if max(columns.source_indexes, default=-1) >= len(columns.sources):
        raise ValueError("an operation has an unknown source")
    return rows


class _Runs:
    """The runs of a frame, which its operations take in order."""

    def __init__(self, columns: exchange_pb2.OperationColumns) -> None:
        self._runs = list(
            zip(columns.lmq_names, columns.counts, columns.bodies, columns.sequences, strict=True)
        )
        self._sources = [(each.producer_id, each.topic_version) for each in columns.sources]
        self._taken = 0
        if len(self._runs) != sum(columns.run_counts):
            raise ValueError("counts of runs and runs disagree")

    def next(self, count: int, source: int) -> tuple[AppendRuns | TidemarkError, int]:
        """The append of the next runs, or why it is refused; and its size."""
        start, self._taken = self._taken, self._taken + count
        runs = self._runs[start : self._taken]
        size = 0
        for name, _, body, _ in runs:
            size += len(name) + len(body)
        try:
            return AppendRuns.from_rows(runs, *self._sources[source]), size
        except TidemarkError as error:
            return error, size
        except ValueError as error:  # as `decode_operation` does
            return InvalidArgument(f"appends: {error}", field="appends"), size


class _Receipts:
    """The receipts of a frame, which its operations take in order."""

    def __init__(self, columns: exchange_pb2.OperationColumns) -> None:
        self._receipts = tuple(columns.receipts)
        self._client_ids = [each.client_id for each in columns.sources]
        self._taken = 0
        if len(self._receipts) != sum(columns.receipt_counts):
            raise ValueError("counts of receipts and receipts disagree")

    def next(self, count: int, source: int) -> tuple[AckReservations | TidemarkError, int]:
        """The acks of the next receipts, or why they are refused; and their size."""
        start, self._taken = self._taken, self._taken + count
        receipts = self._receipts[start : self._taken]
        size = sum(map(len, receipts))
        try:
            return AckReservations.of(receipts, self._client_ids[source]), size
        except TidemarkError as error:
            return error, size
