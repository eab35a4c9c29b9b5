"""Columns of a frame, split into columns of its single partitions."""

from collections.abc import Iterator

from tidemark.api.storage.v1.exchange_pb2 import HandOuts, OperationColumns, ResultColumns
from tidemark.number_rows import rows_of

_HAND_OUTS = [field.name for field in HandOuts.DESCRIPTOR.fields]


def split_operations(columns: OperationColumns) -> Iterator[tuple[int, int, OperationColumns]]:
    """Each operation with its partition and epoch."""
    run = receipt = 0
    for row in rows_of(columns.operations, 7):
        partition, epoch, *_, runs, receipts = row
        run_end, receipt_end = run + runs, receipt + receipts
        yield (
            partition,
            epoch,
            OperationColumns(
                operations=row,
                sources=columns.sources,
                lmq_names=columns.lmq_names[run:run_end],
                bodies=columns.bodies[run:run_end],
                runs=columns.runs[2 * run : 2 * run_end],
                receipts=columns.receipts[receipt:receipt_end],
            ),
        )
        run, receipt = run_end, receipt_end


def split_results(columns: ResultColumns) -> Iterator[tuple[int, ResultColumns]]:
    """The results of each partition."""
    result = run = receipt = hand_out = 0
    results = list(rows_of(columns.results, 3))
    for row in rows_of(columns.partitions, 5):
        partition, _, _, of_partition, hand_outs = row
        result_end = result + of_partition
        run_end = run + sum(runs for _, runs, _ in results[result:result_end])
        receipt_end = receipt + sum(receipts for *_, receipts in results[result:result_end])
        hand_out_end = hand_out + hand_outs
        yield (
            partition,
            ResultColumns(
                partitions=row,
                results=columns.results[3 * result : 3 * result_end],
                runs=columns.runs[2 * run : 2 * run_end],
                messages=columns.messages[receipt:receipt_end],
                hand_outs=_slice(columns.hand_outs, hand_out, hand_out_end),
            ),
        )
        result, run, receipt, hand_out = result_end, run_end, receipt_end, hand_out_end


def _slice(hand_outs: HandOuts, first: int, end: int) -> HandOuts:
    return HandOuts(**{name: getattr(hand_outs, name)[first:end] for name in _HAND_OUTS})
