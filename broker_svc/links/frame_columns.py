"""Columns of a frame: plain operations and results of many partitions, in arrays of the node.

With few messages for each of many partitions, a message of its own for each of them, and for each
of their operations and results, costs more than what it carries (ADR 43). A plain operation has a
long form as well, for a partition that has other operations in the same frame.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, repeat
from typing import Any, ClassVar, Final

from tidemark.api.storage.v1 import exchange_pb2
from tidemark.errors import TidemarkError
from tidemark.number_rows import rows_of

HandOutRow = tuple[Any, ...]
"""A partition, and a hand-out with the columns of `HandOuts` in their order."""


OPERATION_BYTES: Final = 64
"""A generous size of what a plain operation has in a frame beside its source and its runs or
receipts, in either form."""


class WrongResult(Exception):
    """Storage has answered an operation with a result that cannot be the one of it."""


def check_named(indexes: Sequence[int], count: int) -> None:
    """The entries that a result names, out of so many: refused ones, for example. Raises
    WrongResult if there is no such entry, or one is named twice."""
    if len(set(indexes)) != len(indexes) or max(indexes, default=0) >= count:
        raise WrongResult("it names entries that there are not")


class AskedOperation:
    """One operation of a partition. It is called with its answer in the long form, or with the
    reason why there is none.

    Its request id is set when it is put among the unanswered operations, and whether it is the last
    of its partition in a frame when it is moved into one.
    """

    __slots__ = ("ends_frame", "request_id", "size", "steps")

    is_plain: ClassVar = False
    """Whether it may travel in columns."""

    request_id: int
    ends_frame: bool
    size: int
    """About how many bytes it takes in a frame, rather too many."""
    steps: int
    """For how many operations it counts: one for many runs counts for each of them."""

    def __call__(self, result: exchange_pb2.OperationResult | TidemarkError) -> None:
        """Raises WrongResult, with nothing done."""
        raise NotImplementedError

    def long_form(self) -> exchange_pb2.Operation:
        """Everything but the request id, in a message of its own."""
        raise NotImplementedError

    # --- of a plain operation only -------------------------------------------------------------

    def add_to(self, columns: "OperationColumns", partition: int, broker_epoch: int) -> None:
        """Add its entries."""
        raise NotImplementedError

    def stored(self, places: Sequence[int]) -> None:
        """All its runs are stored now: the queue id and the first offset of each. Raises
        WrongResult, with nothing done."""
        raise WrongResult("it has no runs")

    def acked(self, messages: Sequence[int]) -> None:
        """All its receipts are acknowledged. Raises WrongResult, with nothing done."""
        raise WrongResult("it has no receipts")


class PlainOperation(AskedOperation):
    """Appends or acks, which may travel in columns."""

    __slots__ = ()

    is_plain = True


def as_operation(operation: AskedOperation) -> exchange_pb2.Operation:
    """The long form of an operation."""
    long_form = operation.long_form()
    long_form.request_id = operation.request_id
    return long_form


class OperationColumns:
    """The plain operations of one frame."""

    __slots__ = ("bodies", "lmq_names", "operations", "receipts", "runs", "sources")

    def __init__(self) -> None:
        self.operations: list[int] = []
        """The numbers of each operation, as the field has them."""
        self.sources: defaultdict[str, int] = defaultdict(count().__next__)
        """The index of each source; one that is new gets the next."""
        self.lmq_names: list[str] = []
        self.bodies: list[bytes] = []
        self.runs: list[int] = []
        """The count and the sequence of each run."""
        self.receipts: list[bytes] = []

    def add(self, partition: int, broker_epoch: int, operations: Sequence[AskedOperation]) -> bool:
        """Add all that a partition has in this frame; False, and nothing was added, if anything of
        it has only a long form."""
        for each in operations:
            if not each.is_plain:
                return False
        for each in operations:
            each.add_to(self, partition, broker_epoch)
        return True

    def write_to(self, frame: exchange_pb2.ExchangeRequest) -> bool:
        """Returns whether there is anything."""
        if not self.operations:
            return False
        columns = frame.columns
        columns.operations.extend(self.operations)
        columns.sources.extend(self.sources)
        if self.runs:
            columns.lmq_names.extend(self.lmq_names)
            columns.bodies.extend(self.bodies)
            columns.runs.extend(self.runs)
        if self.receipts:
            columns.receipts.extend(self.receipts)
        return True


PlainResult = tuple[int, Sequence[int], Sequence[int]]
"""The answer to a plain operation: its request id; the queue id and the first offset of each of its
runs, or the messages of its receipts."""

PartitionResults = tuple[int, int, int, Sequence[PlainResult], Sequence[HandOutRow]]
"""What a frame has in columns for one partition: its number, its broker epoch, a commit, results
and hand-outs. A plain tuple, as a result is: there is one of each for every commit."""


def read_results(columns: exchange_pb2.ResultColumns) -> list[PartitionResults]:
    """The results of each partition. Raises ValueError if columns do not belong together."""
    runs, messages = columns.runs[:], columns.messages[:]
    results: list[PlainResult] = []
    run = receipt = 0
    for request_id, run_count, receipt_count in rows_of(columns.results[:], 3):
        if run_count:
            end = run + 2 * run_count
            results.append((request_id, runs[run:end], ()))
            run = end
        else:
            end = receipt + receipt_count
            results.append((request_id, (), messages[receipt:end]))
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
