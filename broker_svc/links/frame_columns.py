"""Columns of a frame: plain operations and results of many partitions, in arrays of the node.

With few messages for each of many partitions, a message of its own for each of them, and for each
of their operations and results, costs more than what it carries (ADR 43). A plain operation has a
long form as well, for a partition that has other operations in the same frame.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple

from tidemark.api.storage.v1 import exchange_pb2
from tidemark.errors import TidemarkError

HandOutRow = tuple[Any, ...]
"""A partition, and a hand-out with the columns of `HandOuts` in their order."""


class Source(NamedTuple):
    """What operations share: see `OperationSource`."""

    producer_id: str = ""
    topic_version: int = 0
    client_id: str = ""


class PlainOperation:
    """Appends or acks of one partition. It is called with its answer in the long form, or with the
    reason why there is none.

    Not an abstract class: `isinstance` takes many times as long for those.
    """

    __slots__ = ("request_id", "size", "source")

    def __init__(self) -> None:
        self.request_id = 0
        """Set when it is put among the unanswered operations."""
        self.size = 0
        """About how many bytes it takes in a frame, rather too many."""
        self.source = Source()

    def __call__(self, result: exchange_pb2.OperationResult | TidemarkError) -> None:
        raise NotImplementedError

    def add_to(self, columns: "OperationColumns") -> tuple[int, int]:
        """Add its entries; returns how many runs, and how many receipts it has."""
        raise NotImplementedError

    def long_form(self) -> exchange_pb2.Operation:
        """The same with everything but the request id."""
        raise NotImplementedError

    def stored(self, queue_ids: Sequence[int], first_offsets: Sequence[int]) -> None:
        """All its runs are stored now."""
        raise NotImplementedError

    def acked(self, messages: Sequence[int]) -> None:
        """All its receipts are acknowledged."""
        raise NotImplementedError


AnyOperation = exchange_pb2.Operation | PlainOperation


def as_operation(operation: AnyOperation) -> exchange_pb2.Operation:
    """The long form of an operation."""
    if not isinstance(operation, PlainOperation):
        return operation
    long_form = operation.long_form()
    long_form.request_id = operation.request_id
    return long_form


class OperationColumns:
    """The plain operations of one frame."""

    __slots__ = ("_rows", "_sources", "bodies", "counts", "lmq_names", "receipts", "sequences")

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int, int, int, int]] = []
        self._sources: dict[Source, int] = {}
        self.lmq_names: list[str] = []
        self.counts: list[int] = []
        self.bodies: list[bytes] = []
        self.sequences: list[int] = []
        self.receipts: list[bytes] = []

    def __len__(self) -> int:
        """How many operations it has."""
        return len(self._rows)

    def add(self, partition: int, broker_epoch: int, operations: Sequence[AnyOperation]) -> bool:
        """Add all that a partition has in this frame; False, and nothing was added, if anything of
        it has only a long form."""
        for each in operations:
            if not isinstance(each, PlainOperation):
                return False
        sources = self._sources
        for each in operations:
            assert isinstance(each, PlainOperation)
            source = sources.setdefault(each.source, len(sources))
            self._rows.append(
                (partition, broker_epoch, each.request_id, source, *each.add_to(self))
            )
        return True

    def write_to(self, frame: exchange_pb2.ExchangeRequest) -> None:
        if not self._rows:
            return
        columns = frame.columns
        partitions, epochs, request_ids, sources, run_counts, receipt_counts = zip(
            *self._rows, strict=True
        )
        columns.partitions.extend(partitions)
        columns.broker_epochs.extend(epochs)
        columns.request_ids.extend(request_ids)
        columns.source_indexes.extend(sources)
        columns.run_counts.extend(run_counts)
        columns.receipt_counts.extend(receipt_counts)
        for producer_id, topic_version, client_id in self._sources:
            columns.sources.add(
                producer_id=producer_id, topic_version=topic_version, client_id=client_id
            )
        columns.lmq_names.extend(self.lmq_names)
        columns.counts.extend(self.counts)
        columns.bodies.extend(self.bodies)
        columns.sequences.extend(self.sequences)
        columns.receipts.extend(self.receipts)


class PlainResult(NamedTuple):
    """The answer to a plain operation: of its runs or of its receipts."""

    request_id: int
    queue_ids: Sequence[int]
    first_offsets: Sequence[int]
    messages: Sequence[int]

    def pass_to(self, operation: PlainOperation) -> None:
        if self.queue_ids:
            operation.stored(self.queue_ids, self.first_offsets)
        else:
            operation.acked(self.messages)


class PartitionResults(NamedTuple):
    """What a frame has in columns for one partition."""

    partition: int
    broker_epoch: int
    commit: int
    results: Sequence[PlainResult]
    hand_outs: Sequence[HandOutRow]


def read_results(columns: exchange_pb2.ResultColumns) -> Iterator[PartitionResults]:
    """The results of each partition. Raises ValueError if columns do not belong together."""
    _check_lengths(columns)
    queue_ids, first_offsets = list(columns.queue_ids), list(columns.first_offsets)
    messages = list(columns.messages)
    results: list[PlainResult] = []
    run = receipt = 0
    for request_id, runs, receipts in zip(
        columns.request_ids, columns.run_counts, columns.receipt_counts, strict=True
    ):
        if runs:
            end = run + runs
            results.append(PlainResult(request_id, queue_ids[run:end], first_offsets[run:end], ()))
            run = end
        else:
            end = receipt + receipts
            results.append(PlainResult(request_id, (), (), messages[receipt:end]))
            receipt = end
    counts = list(columns.hand_out_counts)
    owners = [
        partition
        for partition, count in zip(columns.partitions, counts, strict=True)
        for _ in range(count)
    ]
    hand_outs = list(hand_out_rows(owners, columns.hand_outs))
    result = hand_out = 0
    for partition, epoch, commit, result_count, hand_out_count in zip(
        columns.partitions,
        columns.broker_epochs,
        columns.commits,
        columns.result_counts,
        counts,
        strict=True,
    ):
        end, hand_out_end = result + result_count, hand_out + hand_out_count
        yield PartitionResults(
            partition, epoch, commit, results[result:end], hand_outs[hand_out:hand_out_end]
        )
        result, hand_out = end, hand_out_end


def _check_lengths(columns: exchange_pb2.ResultColumns) -> None:
    """Of what follows the counts; `zip` checks those that have equal lengths."""
    if (
        sum(columns.result_counts) != len(columns.request_ids)
        or sum(columns.hand_out_counts) != len(columns.hand_outs.standing_ids)
        or not sum(columns.run_counts) == len(columns.queue_ids) == len(columns.first_offsets)
        or sum(columns.receipt_counts) != len(columns.messages)
    ):
        raise ValueError("columns of different lengths")


def hand_outs_of(partition: int, hand_outs: exchange_pb2.HandOuts) -> Iterator[HandOutRow]:
    """The hand-outs of one partition."""
    return hand_out_rows(repeat(partition, len(hand_outs.standing_ids)), hand_outs)


def hand_out_rows(
    partitions: Iterable[int], hand_outs: exchange_pb2.HandOuts
) -> Iterator[HandOutRow]:
    return zip(
        partitions,
        hand_outs.standing_ids,
        hand_outs.standing_messages,
        hand_outs.reservation_ids,
        hand_outs.receipts,
        hand_outs.first_offsets,
        hand_outs.counts,
        hand_outs.bodies,
        hand_outs.visibility_ms,
        hand_outs.publish_times_ms,
        hand_outs.owner_epochs,
        strict=True,
    )
