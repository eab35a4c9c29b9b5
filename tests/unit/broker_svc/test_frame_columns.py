"""Frames in columns as a broker sends and takes them: what is shared, and what stays apart (C7)."""

import tracemalloc
from collections.abc import Callable, Sequence

import pytest
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from broker_svc.links.frame_columns import OperationColumns, PlainOperation
from tests.unit.broker_svc.test_storage_node_link import EPOCH, Node, node, small
from tests.unit.broker_svc.test_wrong_results import ACKS, Asked
from tidemark.api.storage.v1.exchange_pb2 import (
    ExchangeRequest,
    ExchangeResponse,
    HandOuts,
    Operation,
    OperationResult,
    PartitionResponse,
    ResultColumns,
)
from tidemark.errors import Fenced, TidemarkError, Unavailable
from tidemark.limits import UNANSWERED_OPERATIONS_MAX
from tidemark.number_rows import rows_of
from tidemark.rpc.statuses import to_status

__all__ = ["node"]


class Runs(PlainOperation):
    """One run."""

    def __init__(self, lmq_name: str, steps: int = 1) -> None:
        self.size, self.steps = 100, steps
        self.lmq_name = lmq_name
        self.answers: list[object] = []

    def add_to(self, columns: OperationColumns, partition: int, broker_epoch: int) -> None:
        columns.lmq_names.append(self.lmq_name)
        columns.bodies.append(b"x")
        columns.runs += (1, 7)
        source = columns.sources["till-7"]
        columns.operations += (partition, broker_epoch, self.request_id, source, 3, 1, 0)

    def long_form(self) -> Operation:
        operation = Operation()
        operation.appends.lmq_names.append(self.lmq_name)
        return operation

    def stored(self, places: Sequence[int]) -> None:
        self.answers.append((*places,))

    def __call__(self, result: OperationResult | TidemarkError) -> None:
        self.answers.append(result)


class Acks(PlainOperation):
    """Two acks."""

    def __init__(self) -> None:
        self.size, self.steps = 100, 1
        self.answers: list[object] = []

    def add_to(self, columns: OperationColumns, partition: int, broker_epoch: int) -> None:
        columns.receipts += [b"r", b"s"]
        source = columns.sources["till"]
        columns.operations += (partition, broker_epoch, self.request_id, source, 0, 0, 2)

    def long_form(self) -> Operation:
        raise AssertionError("it is not needed")

    def acked(self, messages: Sequence[int]) -> None:
        self.answers.append(list(messages))

    def __call__(self, result: OperationResult | TidemarkError) -> None:
        self.answers.append(result)


def take(node: Node, columns: ResultColumns) -> None:
    node.link._take_frame(ExchangeResponse(columns=columns))


def operations(frame: ExchangeRequest) -> list[tuple[int, int, int, int]]:
    """Partitions, epochs and counts of what is in columns."""
    rows = rows_of(frame.columns.operations, 7)
    return [(partition, epoch, runs, receipts) for partition, epoch, *_, runs, receipts in rows]


async def test_plain_operations_of_all_partitions_leave_in_columns(node: Node) -> None:
    """C7: in the order of each partition."""
    node.connect()
    for partition in (2, 5):
        node.links[partition].ask_plain(Runs(f"t/{partition}"))
        node.links[partition].ask_plain(Acks())

    frame = node.frame()

    assert operations(frame) == [(2, 7, 1, 0), (2, 7, 0, 2), (5, 7, 1, 0), (5, 7, 0, 2)]
    assert frame.columns.operations[3::7] == [0, 1, 0, 1]
    assert frame.columns.sources == ["till-7", "till"]
    assert frame.columns.operations[4::7] == [3, 0, 3, 0]
    assert list(frame.columns.lmq_names) == ["t/2", "t/5"]
    assert list(frame.columns.receipts) == [b"r", b"s"] * 2
    assert not frame.parts
    assert not node.has_frame()


async def test_a_partition_that_asks_something_else_keeps_its_order(node: Node) -> None:
    """S2: all that it has in the frame has the long form; other partitions stay in columns."""
    node.connect()
    node.links[0].ask_plain(Runs("t/a"))
    node.send(0, small())
    node.links[0].ask_plain(Runs("t/b"))
    node.links[1].ask_plain(Runs("t/c"))

    frame = node.frame()

    (part,) = frame.parts
    assert [each.WhichOneof("kind") for each in part.operations] == ["appends", "purge", "appends"]
    assert operations(frame) == [(1, EPOCH, 1, 0)]


async def test_acks_are_answered_in_columns_also_to_a_traced_caller(node: Node) -> None:
    """S4, V6: the form of an answer does not depend on that of its operation."""
    node.connect()
    sampled = TraceFlags(TraceFlags.SAMPLED)
    with use_span(NonRecordingSpan(SpanContext(1, 1, is_remote=False, trace_flags=sampled))):
        asked = Asked(node)
    node.frame()

    take(node, ResultColumns(partitions=[0, EPOCH, 4, 1, 0], results=[ACKS, 0, 2], messages=[1, 1]))

    assert asked.answers[ACKS] == ["done"] * 2
    assert not node.ended


async def test_results_in_columns_reach_what_has_asked(node: Node) -> None:
    """S2: each gets its own entries, and may send again."""
    node.connect()
    runs, acks = [Runs("t/a"), Runs("t/b"), Runs("t/c")], Acks()
    node.links[0].ask_plain(runs[0])
    node.links[0].ask_plain(acks)
    node.links[1].ask_plain(runs[1])
    node.links[2].ask_plain(runs[2])
    node.frame()

    columns = ResultColumns(
        partitions=[*(1, EPOCH, 4, 1, 0), *(0, EPOCH, 5, 2, 0), *(2, EPOCH - 1, 6, 1, 0)],
        results=[*(1, 1, 0), *(1, 1, 0), *(2, 0, 2), *(1, 1, 0)],
        runs=[*(11, 21), *(12, 22), *(13, 23)],
        messages=[1, 0],
    )
    take(node, columns)

    assert [each.answers for each in runs] == [[(12, 22)], [(11, 21)], []]
    assert acks.answers == [[1, 0]]
    assert [node.links[each].waiting for each in (0, 1, 2)] == [0, 0, 1]
    assert node.links[2].witnessed_commit == 0


async def test_what_a_partition_has_in_columns_is_taken_before_the_rest(node: Node) -> None:
    """S2, S8: also the end of its part, which would drop its callers."""
    node.connect()
    runs = Runs("t/a")
    node.links[0].ask_plain(runs)
    node.frame()

    frame = ExchangeResponse()
    frame.columns.partitions.extend([0, EPOCH, 5, 1, 0])
    frame.columns.results.extend([1, 1, 0])
    frame.columns.runs.extend([11, 21])
    part = frame.parts.add(partition=0, broker_epoch=EPOCH)
    part.end.CopyFrom(to_status(Fenced("another broker holds it")))
    node.link._take_frame(frame)

    assert runs.answers == [(11, 21)]
    assert node.links[0].waiting == 0


async def test_a_partition_may_have_several_entries_in_columns(node: Node) -> None:
    """S2: each is of another commit."""
    node.connect()
    runs = [Runs("t/a"), Runs("t/b")]
    for each in runs:
        node.links[0].ask_plain(each)
    node.frame()

    columns = ResultColumns(
        partitions=[*(0, EPOCH, 4, 1, 0), *(0, EPOCH, 5, 1, 0)],
        results=[*(1, 1, 0), *(2, 1, 0)],
        runs=[*(11, 21), *(12, 22)],
    )
    take(node, columns)

    assert [each.answers for each in runs] == [[(11, 21)], [(12, 22)]]
    assert node.links[0].witnessed_commit == 5


WIDTHS = {"partitions": 5, "results": 3, "runs": 2, "messages": 1}
"""Numbers of an entry in each column."""

ONE_HAND_OUT = HandOuts(
    standing_ids=[1],
    standing_messages=[1],
    reservation_ids=[1],
    receipts=[b"r"],
    first_offsets=[1],
    counts=[1],
    bodies=[b"x"],
    visibility_ms=[1],
    publish_times_ms=[1],
    owner_epochs=[0],
)


def shorten(columns: ResultColumns, column: str) -> None:
    if column == "hand_outs":
        columns.hand_outs.receipts.append(b"one more")
    else:
        del getattr(columns, column)[-1]


def lengthen(columns: ResultColumns, column: str) -> None:
    if column == "hand_outs":
        columns.hand_outs.standing_ids.append(1)
    else:
        getattr(columns, column).append(1)


def drop_entry(columns: ResultColumns, column: str) -> None:
    if column == "hand_outs":
        columns.partitions[4] = 1
    else:
        del getattr(columns, column)[-WIDTHS[column] :]


def repeat_entry(columns: ResultColumns, column: str) -> None:
    if column == "hand_outs":
        columns.hand_outs.CopyFrom(ONE_HAND_OUT)
    else:
        getattr(columns, column).extend(getattr(columns, column)[-WIDTHS[column] :])


@pytest.mark.parametrize("column", [each.name for each in ResultColumns.DESCRIPTOR.fields])
@pytest.mark.parametrize("spoil", [shorten, lengthen, drop_entry, repeat_entry])
async def test_columns_that_do_not_belong_together_break_the_stream(
    node: Node, spoil: Callable[[ResultColumns, str], None], column: str
) -> None:
    """S2: which result is whose is not known, so that every caller gets UNAVAILABLE."""
    node.connect()
    runs, acks = Runs("t/a"), Acks()
    node.links[0].ask_plain(runs)
    node.links[0].ask_plain(acks)
    node.frame()
    columns = ResultColumns(
        partitions=[0, EPOCH, 1, 2, 0],
        results=[*(1, 1, 0), *(2, 0, 2)],
        runs=[1, 3],
        messages=[1, 1],
    )
    spoil(columns, column)

    with pytest.raises(Unavailable):
        take(node, columns)

    assert not runs.answers
    assert not acks.answers


async def test_nothing_of_a_frame_is_taken_whose_columns_cannot_be_read(node: Node) -> None:
    """S2: results of other partitions in the long form neither."""
    node.connect()
    in_columns, in_long_form = Runs("t/a"), Runs("t/b")
    node.links[0].ask_plain(in_columns)
    node.links[1].ask_plain(in_long_form)
    node.frame()
    result = OperationResult(request_id=1)
    result.appends.queue_ids.append(7)
    result.appends.first_offsets.append(7)
    part = PartitionResponse(partition=1, broker_epoch=EPOCH, commit=9, results=[result])
    columns = ResultColumns(partitions=[0, EPOCH, 1, 2, 0], results=[1, 1, 0], runs=[1, 3])

    with pytest.raises(Unavailable):
        node.link._take_frame(ExchangeResponse(parts=[part], columns=columns))

    assert not in_columns.answers
    assert not in_long_form.answers
    assert node.links[1].witnessed_commit == 0


async def test_a_count_of_hand_outs_that_is_too_high_takes_no_memory(node: Node) -> None:
    """S3: the columns are refused before the count is used."""
    node.connect()
    columns = ResultColumns(partitions=[0, EPOCH, 1, 0, 10**6], hand_outs=ONE_HAND_OUT)

    tracemalloc.start()
    try:
        with pytest.raises(Unavailable):
            take(node, columns)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak_bytes < 10**6


async def test_a_caller_that_raises_keeps_no_other_from_its_result(node: Node) -> None:
    """L1."""
    node.connect()
    asked = [Runs("t/a"), Runs("t/b")]
    asked[0].stored = lambda *_: [][1]  # type: ignore[method-assign]
    for each in asked:
        node.links[0].ask_plain(each)
    node.frame()

    columns = ResultColumns(
        partitions=[0, EPOCH, 1, 2, 0],
        results=[*(1, 1, 0), *(2, 1, 0)],
        runs=[*(1, 3), *(2, 4)],
    )
    take(node, columns)

    assert asked[1].answers == [(2, 4)]


async def test_columns_count_for_what_a_partition_may_leave_unanswered(node: Node) -> None:
    """L1: storage would stop reading, also what other partitions send."""
    node.connect()
    for _ in range(3):
        node.links[0].ask_plain(Runs("t/a", UNANSWERED_OPERATIONS_MAX // 2))

    sent = operations(node.frame())

    assert len(sent) == 2
    assert not node.has_frame()


async def test_a_link_that_breaks_answers_what_is_in_columns(node: Node) -> None:
    """S2."""
    node.connect()
    asked, refused = Runs("t/a"), Runs("t/b")
    node.links[0].ask_plain(asked)
    node.frame()

    node.links[0]._drop_callers()
    node.links[0].ask_plain(refused)

    assert [type(each) for each in (*asked.answers, *refused.answers)] == [Unavailable] * 2
