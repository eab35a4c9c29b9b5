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
from tidemark.number_rows import rows_of

Bound = Callable[[int, int], ExchangePart | None]
"""Gets a partition and a broker epoch; None if the stream does not carry it, which is reported."""


_Row = tuple[int, ...]
"""Partition, broker epoch, request id, source, topic version, count of runs and of receipts."""

_Run = tuple[str, bytes, tuple[int, ...]]
"""Queue, body, and with it count and sequence."""


def decode_columns(
    columns: exchange_pb2.OperationColumns,
    bound: Bound,
) -> list[Asked]:
    """The operations of each partition, as `ExchangePart.decode` gives them.

    Raises InvalidArgument if the columns do not belong together, before `bound` is called.
    """
    try:
        rows, sources, runs, receipts = _read(columns)
    except ValueError as error:
        raise InvalidArgument(f"columns: {error}", field="columns") from None
    all_asked: list[Asked] = []
    asked: Asked | None = None
    before = (-1, -1)
    for partition, epoch, request_id, source, version, run_count, receipt_count in rows:
        if before != (partition, epoch):
            before = partition, epoch
            part = bound(partition, epoch)
            asked = None
            if part is not None:
                asked = Asked(part)
                all_asked.append(asked)
        operation: Operation[ExchangeResult] | TidemarkError
        if run_count:
            operation, size = runs.next(run_count, sources[source], version)
        else:
            operation, size = receipts.next(receipt_count, sources[source])
        if asked is not None:
            asked.add(request_id, operation, run_count or 1, run_count or receipt_count, size)
    return all_asked


def _read(
    columns: exchange_pb2.OperationColumns,
) -> "tuple[list[_Row], list[str], _Runs, _Receipts]":
    """An entry for each operation, their sources, and what they take in order. Raises ValueError if
    columns do not belong together, or an operation stores and acknowledges."""
    rows = list(rows_of(columns.operations[:], 7))
    sources = columns.sources[:]
    numbers = rows_of(columns.runs[:], 2)
    runs = list(zip(columns.lmq_names[:], columns.bodies[:], numbers, strict=True))
    receipts = columns.receipts[:]
    run_count = receipt_count = 0
    for _, _, _, source, _, of_runs, of_receipts in rows:
        if of_runs and of_receipts:
            raise ValueError("an operation has runs and receipts")
        if source >= len(sources):
            raise ValueError("an operation has an unknown source")
        run_count += of_runs
        receipt_count += of_receipts
    if len(runs) != run_count:
        raise ValueError("counts of runs and runs disagree")
    if len(receipts) != receipt_count:
        raise ValueError("counts of receipts and receipts disagree")
    return rows, sources, _Runs(runs), _Receipts(receipts)


class _Runs:
    """The runs of a frame, which its operations take in order."""

    __slots__ = ("_runs", "_taken")

    def __init__(self, runs: list[_Run]) -> None:
        self._runs = runs
        self._taken = 0

    def next(
        self, count: int, producer_id: str, topic_version: int
    ) -> tuple[AppendRuns | TidemarkError, int]:
        """The append of the next runs, or why it is refused; and its size."""
        start, self._taken = self._taken, self._taken + count
        runs = self._runs[start : self._taken]
        size = 0
        for name, body, _ in runs:
            size += len(name) + len(body)
        try:
            return AppendRuns.from_rows(runs, producer_id, topic_version), size
        except TidemarkError as error:
            return error, size
        except ValueError as error:  # as `decode_operation` does
            return InvalidArgument(f"appends: {error}", field="appends"), size


class _Receipts:
    """The receipts of a frame, which its operations take in order."""

    __slots__ = ("_receipts", "_taken")

    def __init__(self, receipts: list[bytes]) -> None:
        self._receipts = receipts
        self._taken = 0

    def next(self, count: int, client_id: str) -> tuple[AckReservations | TidemarkError, int]:
        """The acks of the next receipts, or why they are refused; and their size."""
        start, self._taken = self._taken, self._taken + count
        receipts = tuple(self._receipts[start : self._taken])
        size = sum(map(len, receipts))
        try:
            return AckReservations.of(receipts, client_id), size
        except TidemarkError as error:
            return error, size
