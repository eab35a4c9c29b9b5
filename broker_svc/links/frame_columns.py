"""Columns of a frame: plain operations and results of many partitions, in arrays of the node.

With few messages for each of many partitions, a message of its own for each of them, and for each
of their operations and results, costs more than what it carries (ADR 43). A plain operation has a
long form as well, for a partition that has other operations in the same frame.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, Final

from tidemark.api.storage.v1 import exchange_pb2
from tidemark.errors import TidemarkError
from tidemark.number_rows import rows_of

HandOutRow = tuple[Any, ...]
"""A partition, and a hand-out with the columns of `HandOuts` in their order."""


OPERATION_BYTES: Final = 64
"""A generous size of what a plain operation has in a frame beside its source and its runs or
receipts, in either form."""


class PlainOperation:
    """Appends or acks of one partition. It is called with its answer in the long form, or with the
    reason why there is none.

    Not an abstract class: `isinstance` takes many times as long for those.
    """

    __slots__ = ("request_id", "size", "source", "topic_version")

    def __init__(self) -> None:
        self.request_id = 0
        """Set when it is put among the unanswered operations."""
        self.size = 0
        """About how many bytes it takes in a frame, rather too many."""
        self.source = ""
        """The producer of runs, or the client that acknowledges."""
        self.topic_version = 0
        """0 for acks."""

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

    __slots__ = ("_operations", "_sources", "bodies", "lmq_names", "receipts", "runs")

    def __init__(self) -> None:
        self._operations: list[int] = []
        self._sources: dict[str, int] = {}
        self.lmq_names: list[str] = []
        self.bodies: list[bytes] = []
        self.runs: list[int] = []
        """The count and the sequence of each run."""
        self.receipts: list[bytes] = []

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
            self._operations += (
                partition,
                broker_epoch,
                each.request_id,
                source,
                each.topic_version,
                *each.add_to(self),
            )
        return True

    def write_to(self, frame: exchange_pb2.ExchangeRequest) -> bool:
        """Returns whether there is anything."""
        if not self._operations:
            return False
        columns = frame.columns
        columns.operations.extend(self._operations)
        columns.sources.extend(self._sources)
        if self.runs:
            columns.lmq_names.extend(self.lmq_names)
            columns.bodies.extend(self.bodies)
            columns.runs.extend(self.runs)
        if self.receipts:
            columns.receipts.extend(self.receipts)
        return True


PlainResult = tuple[int, Sequence[int], Sequence[int], Sequence[int]]
"""The answer to a plain operation: its request id; the queue ids and first offsets of its runs, or
the messages of its receipts."""

PartitionResults = tuple[int, int, int, Sequence[PlainResult], Sequence[HandOutRow]]
"""What a frame has in columns for one partition: its number, its broker epoch, a commit, results
and hand-outs. A plain tuple, as a result is: there is one of each for every commit."""


def pass_to(operation: PlainOperation, result: PlainResult) -> None:
    _, queue_ids, first_offsets, messages = result
    if queue_ids:
        operation.stored(queue_ids, first_offsets)
    else:
        operation.acked(messages)


def read_results(columns: exchange_pb2.ResultColumns) -> list[PartitionResults]:
    """The results of each partition. Raises ValueError if columns do not belong together."""
    runs, messages = columns.runs[:], columns.messages[:]
    results: list[PlainResult] = []
    run = receipt = 0
    for request_id, run_count, receipt_count in rows_of(columns.results[:], 3):
        if run_count:
            end = run + 2 * run_count
            results.append((request_id, runs[run:end:2], runs[run + 1 : end : 2], ()))
            run = end
        else:
            end = receipt + receipt_count
            results.append((request_id, (), (), messages[receipt:end]))
            receipt = end
    partitions = list(rows_of(columns.partitions[:], 5))
    hand_outs: Sequence[HandOutRow] = ()
    if columns.HasField("hand_outs"):
        hand_outs = _read_hand_outs(columns.hand_outs, partitions)
    read: list[PartitionResults] = []
    first = hand_out = 0
    for partition, epoch, commit, result_count, hand_out_count in partitions:
        last, hand_out_end = first + result_count, hand_out + hand_out_count
        own = hand_outs[hand_out:hand_out_end]
        read.append((partition, epoch, commit, results[first:last], own))
        first, hand_out = last, hand_out_end
    ends = first, hand_out, run, receipt
    if ends != (len(results), len(hand_outs), len(runs), len(messages)):
        raise ValueError("columns of different lengths")
    return read


def _read_hand_outs(
    hand_outs: exchange_pb2.HandOuts, partitions: Sequence[tuple[int, ...]]
) -> Sequence[HandOutRow]:
    """The hand-outs of all partitions, each with its own."""
    if sum([row[4] for row in partitions]) != len(hand_outs.standing_ids):  # before it is used
        raise ValueError("counts of hand-outs and hand-outs disagree")
    owners = [row[0] for row in partitions if row[4] for _ in range(row[4])]
    return list(hand_out_rows(owners, hand_outs))


def hand_outs_of(partition: int, hand_outs: exchange_pb2.HandOuts) -> Iterator[HandOutRow]:
    """The hand-outs of one partition."""
    return hand_out_rows(repeat(partition, len(hand_outs.standing_ids)), hand_outs)


def hand_out_rows(
    partitions: Iterable[int], hand_outs: exchange_pb2.HandOuts
) -> Iterator[HandOutRow]:
    return zip(
        partitions,
        hand_outs.standing_ids[:],
        hand_outs.standing_messages[:],
        hand_outs.reservation_ids[:],
        hand_outs.receipts[:],
        hand_outs.first_offsets[:],
        hand_outs.counts[:],
        hand_outs.bodies[:],
        hand_outs.visibility_ms[:],
        hand_outs.publish_times_ms[:],
        hand_outs.owner_epochs[:],
        strict=True,
    )
