"""Columns of a frame, split into columns of its single partitions."""

from collections.abc import Iterator

from tidemark.api.storage.v1.exchange_pb2 import HandOuts, OperationColumns, ResultColumns

_HAND_OUTS = [field.name for field in HandOuts.DESCRIPTOR.fields]


def split_operations(columns: OperationColumns) -> Iterator[tuple[int, int, OperationColumns]]:
    """Each operation with its partition and epoch."""
    run = receipt = 0
    for index, (partition, epoch) in enumerate(
        zip(columns.partitions, columns.broker_epochs, strict=True)
    ):
        run_end = run + columns.run_counts[index]
        receipt_end = receipt + columns.receipt_counts[index]
        yield (
            partition,
            epoch,
            OperationColumns(
                partitions=[partition],
                broker_epochs=[epoch],
                request_ids=[columns.request_ids[index]],
                source_indexes=[columns.source_indexes[index]],
                run_counts=[columns.run_counts[index]],
                receipt_counts=[columns.receipt_counts[index]],
                sources=columns.sources,
                lmq_names=columns.lmq_names[run:run_end],
                counts=columns.counts[run:run_end],
                bodies=columns.bodies[run:run_end],
                sequences=columns.sequences[run:run_end],
                receipts=columns.receipts[receipt:receipt_end],
            ),
        )
        run, receipt = run_end, receipt_end


def split_results(columns: ResultColumns) -> Iterator[tuple[int, ResultColumns]]:
    """The results of each partition."""
    result = run = receipt = hand_out = 0
    for index, partition in enumerate(columns.partitions):
        result_end = result + columns.result_counts[index]
        run_end = run + sum(columns.run_counts[result:result_end])
        receipt_end = receipt + sum(columns.receipt_counts[result:result_end])
        hand_out_end = hand_out + columns.hand_out_counts[index]
        yield (
            partition,
            ResultColumns(
                partitions=[partition],
                broker_epochs=[columns.broker_epochs[index]],
                commits=[columns.commits[index]],
                result_counts=[columns.result_counts[index]],
                hand_out_counts=[columns.hand_out_counts[index]],
                request_ids=columns.request_ids[result:result_end],
                run_counts=columns.run_counts[result:result_end],
                receipt_counts=columns.receipt_counts[result:result_end],
                queue_ids=columns.queue_ids[run:run_end],
                first_offsets=columns.first_offsets[run:run_end],
                messages=columns.messages[receipt:receipt_end],
                hand_outs=_slice(columns.hand_outs, hand_out, hand_out_end),
            ),
        )
        result, run, receipt, hand_out = result_end, run_end, receipt_end, hand_out_end


def _slice(hand_outs: HandOuts, first: int, end: int) -> HandOuts:
    return HandOuts(**{name: getattr(hand_outs, name)[first:end] for name in _HAND_OUTS})
