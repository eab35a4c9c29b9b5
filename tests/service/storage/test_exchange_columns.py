"""Operations and results of several partitions in columns: what is shared, and what is not (C7)."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from tests.support.exchange_client import ExchangeClient, apply_topic, operation, reserve
from tests.support.faulty_engine import Fault, FaultyEngines
from tests.support.storage_client import RunningStorage
from tests.support.storage_fixtures import StartStorage
from tidemark import errors, limits
from tidemark.api.storage.v1.exchange_pb2 import (
    AckReservations,
    AppendRuns,
    ExchangeRequest,
    Operation,
    OperationColumns,
)
from tidemark.bodies import body_of
from tidemark.rpc.statuses import from_status

PARTITIONS = 4

pytestmark = pytest.mark.slow


@pytest.fixture
async def node(start_storage: StartStorage, faulty_disks: list[FaultyEngines]) -> RunningStorage:
    """A storage node with several partitions."""
    return await start_storage(partitions=PARTITIONS)


@asynccontextmanager
async def parts_of(node: RunningStorage) -> AsyncIterator[list[ExchangeClient]]:
    """All partitions, claimed and bound by one broker, with the topic `jobs`."""
    claims = [
        (partition, (await node.claim(partition)).broker_epoch) for partition in range(PARTITIONS)
    ]
    async with node.stream() as stream:
        parts = await stream.bind_all(*claims)
        for part in parts:
            await part.healths.get()
        topic = await node.create_topic("jobs")
        for part in parts[1:]:
            await apply_topic(part, topic)
        stream.in_columns.clear()
        yield parts


def appends(*lmq_names: str, body: bytes | None = None, sequence: int = 0) -> Operation:
    runs = AppendRuns(
        lmq_names=lmq_names,
        counts=[1] * len(lmq_names),
        bodies=[body_of([b"x"]) if body is None else body] * len(lmq_names),
        sequences=[sequence] * len(lmq_names),
        producer_id="till-7" if sequence else "",
    )
    return operation(appends=runs)


async def test_what_partitions_store_hand_out_and_acknowledge_travels_in_columns(
    node: RunningStorage,
) -> None:
    """S2, C7: each partition has its own commit, and its own answers."""
    async with parts_of(node) as parts:
        stream = parts[0].stream
        for part in parts:
            await part.ask(appends("jobs/a"))
            (first,) = (await part.ask(reserve("jobs/a"))).slices
            await part.ask(operation(acks=AckReservations(receipts=[first.receipt])))
            await part.ask(reserve("jobs/a", standing_id=9, standing_messages=9))
        stream.in_columns.clear()

        asked = {part: [appends("jobs/a", "jobs/b"), appends("jobs/c")] for part in parts}
        stored = await stream.ask_in_columns(asked)
        handed_out = [await part.handed_out.get() for part in parts]
        receipts = [[each.receipt for each in reserved.slices] for reserved in handed_out]
        acks = {
            part: [operation(acks=AckReservations(receipts=each))]
            for part, each in zip(parts, receipts, strict=True)
        }
        acked = await stream.ask_in_columns(acks)
        again = await stream.ask_in_columns(acks)

        assert [[list(each.first_offsets) for each in part] for part in stored] == (
            [[[1, 0], [0]]] * PARTITIONS
        )
        assert [(each.standing_id, each.standing_messages) for each in handed_out] == (
            [(9, 8)] * PARTITIONS
        )
        assert [list(part[0].messages) for part in acked] == [[1]] * PARTITIONS
        assert [list(part[0].messages) for part in again] == [[0]] * PARTITIONS
        assert stream.in_columns == set(range(PARTITIONS))


async def test_a_refused_run_and_a_repeat_are_answered_in_the_long_form(
    node: RunningStorage,
) -> None:
    """S3, S11: those of other partitions stay in columns."""
    async with parts_of(node) as parts:
        stream = parts[0].stream
        await parts[1].ask(appends("jobs/a", sequence=1))
        stream.in_columns.clear()

        asked = [
            appends("jobs/a", "nowhere/a"),
            appends("jobs/a", sequence=1),
            appends("jobs/a", body=b"nonsense"),
            appends("jobs/a"),
        ]
        operations = {part: [each] for part, each in zip(parts, asked, strict=True)}
        (refused,), (repeated,), (malformed,), (stored,) = await stream.ask_in_columns(operations)

        assert isinstance(from_status(refused.refused[0].error), errors.TopicNotFound)
        assert [each.index for each in repeated.repeated_runs] == [0]
        assert isinstance(malformed, errors.InvalidArgument)
        assert list(stored.first_offsets) == [0]
        assert stream.in_columns == {3}


@pytest.mark.parametrize("unknown", ["epoch", "partition"])
async def test_a_partition_that_is_not_bound_ends_its_part_alone(
    node: RunningStorage, unknown: str
) -> None:
    """L1, S8: its entries are refused, and those before and behind it are carried out."""
    async with parts_of(node) as parts:
        stream, frame = parts[0].stream, ExchangeRequest()
        asked = [part for part in parts for _ in range(2)]
        waiting = [part.add_to_columns(frame.columns, appends("jobs/a")) for part in asked]
        number, epoch = parts[1].partition, parts[1].broker_epoch
        number, epoch = (number, epoch + 1) if unknown == "epoch" else (PARTITIONS, epoch)
        for row in (2, 3):
            frame.columns.operations[7 * row : 7 * row + 2] = [number, epoch]
        other = ExchangeClient(stream, number, epoch)
        stream.watch(other)

        await stream.write(frame)
        results = [await waiting[index] for index in (0, 1, 4, 5, 6, 7)]

        assert isinstance(await other.ended, errors.InvalidArgument)
        assert [list(each.appends.first_offsets) for each in results] == [[0], [1]] * 3
        assert not any(part.ended.done() for part in parts)
        assert not any(each.done() for each in waiting[2:4])
        for each in waiting[2:4]:
            each.cancel()


async def test_a_partition_that_is_fenced_refuses_only_its_own_entries(
    node: RunningStorage,
) -> None:
    """L1, S8."""
    async with parts_of(node) as parts:
        await node.claim(2, broker_id="broker-b")

        stream, others = parts[0].stream, [parts[0], parts[1], parts[3]]
        stored = await stream.ask_in_columns({part: [appends("jobs/a")] for part in others})

        assert isinstance(await parts[2].ended, errors.Fenced)
        assert [list(each.first_offsets) for (each,) in stored] == [[0]] * 3


async def test_a_commit_that_fails_spoils_no_other_of_its_columns(
    node: RunningStorage, faulty_disks: list[FaultyEngines]
) -> None:
    """L1, S2: its outcome is unknown, in the long form."""
    (disk,) = faulty_disks
    async with parts_of(node) as parts:
        disk.only = 3
        disk.next_commit = Fault.BEFORE_WRITING

        stream = parts[0].stream
        answers = await stream.ask_in_columns({part: [appends("jobs/a")] for part in parts})
        (failed,) = answers.pop(3)

        assert isinstance(failed, errors.CommitOutcomeUnknown)
        assert [list(answer.first_offsets) for (answer,) in answers] == [[0]] * (PARTITIONS - 1)
        assert stream.in_columns == {0, 1, 2}


COLUMNS = [field.name for field in OperationColumns.DESCRIPTOR.fields]
ONE_MORE = OperationColumns(
    operations=[0, 1, 9, 0, 0, 1, 0],
    lmq_names=["jobs/b"],
    bodies=[b""],
    runs=[1, 0],
    receipts=[b"r"],
)


def shorten(columns: OperationColumns, column: str) -> None:
    del getattr(columns, column)[-1]


def lengthen(columns: OperationColumns, column: str) -> None:
    getattr(columns, column).extend(getattr(ONE_MORE, column))


def point_past_sources(columns: OperationColumns, column: str) -> None:
    columns.operations[7 + 3] = len(columns.sources)


def mix_runs_and_receipts(columns: OperationColumns, column: str) -> None:
    columns.operations[6] = 1
    columns.receipts.append(b"r")


def name_an_impossible_partition(columns: OperationColumns, column: str) -> None:
    columns.operations[0] = 2**32


def leave_a_row_incomplete(columns: OperationColumns, column: str) -> None:
    getattr(columns, column).append(0)


@pytest.mark.parametrize(
    ("spoil", "column"),
    [
        *[(shorten, each) for each in COLUMNS if each != "receipts"],  # there is none
        *[(lengthen, each) for each in COLUMNS if each != "sources"],  # one may be without use
        (point_past_sources, ""),
        (mix_runs_and_receipts, ""),
        (name_an_impossible_partition, ""),
        (leave_a_row_incomplete, "operations"),
        (leave_a_row_incomplete, "runs"),
    ],
)
async def test_columns_that_do_not_belong_together_end_the_stream(
    node: RunningStorage, spoil: Callable[[OperationColumns, str], None], column: str
) -> None:
    """S3: which entry belongs to which partition is not known, and none is carried out."""
    async with parts_of(node) as parts:
        frame = ExchangeRequest()
        waiting = [part.add_to_columns(frame.columns, appends("jobs/a")) for part in parts]
        spoil(frame.columns, column)

        await parts[0].stream.write(frame)
        reasons = [await part.ended for part in parts]

        assert {type(each) for each in reasons} == {errors.InvalidArgument}
        assert all(isinstance(each.exception(), errors.InvalidArgument) for each in waiting)
    async with parts_of(node) as parts:
        stored = await parts[0].stream.ask_in_columns({each: [appends("jobs/a")] for each in parts})
        assert [list(each.first_offsets) for (each,) in stored] == [[0]] * PARTITIONS


async def test_an_operation_that_is_malformed_is_refused_alone(node: RunningStorage) -> None:
    """S3: others of its partition are carried out."""
    async with parts_of(node) as parts:
        asked = [
            appends("jobs/a"),
            operation(acks=AckReservations()),
            appends(*["jobs/a"] * (limits.APPENDS_PER_OPERATION_MAX + 1)),
            appends("not a name"),
            operation(acks=AckReservations(receipts=[b"nonsense"])),
            appends("jobs/a"),
        ]
        (answers,) = await parts[0].stream.ask_in_columns({parts[2]: asked})

        first, none, too_many, misnamed, unknown, last = answers
        assert [list(each.first_offsets) for each in (first, last)] == [[0], [1]]
        assert isinstance(none, errors.InvalidArgument)
        assert isinstance(too_many, errors.InvalidArgument)
        assert isinstance(misnamed, errors.InvalidName)
        assert [each.index for each in unknown.refused] == [0]


async def test_entries_of_a_partition_that_do_not_adjoin_keep_their_order(
    node: RunningStorage,
) -> None:
    """S2."""
    async with parts_of(node) as parts:
        frame = ExchangeRequest()
        order = [parts[0], parts[1], parts[0], parts[1], parts[0]]
        waiting = [part.add_to_columns(frame.columns, appends("jobs/a")) for part in order]

        await parts[0].stream.write(frame)

        offsets = [(await each).appends.first_offsets[0] for each in waiting]
        assert offsets == [0, 0, 1, 1, 2]


async def test_an_empty_set_of_columns_asks_nothing(node: RunningStorage) -> None:
    async with parts_of(node) as parts:
        await parts[0].stream.write(ExchangeRequest(columns=OperationColumns()))

        assert list((await parts[0].ask(appends("jobs/a"))).first_offsets) == [0]


async def test_results_in_columns_are_sent_before_the_stream_ends(node: RunningStorage) -> None:
    """S2."""
    async with parts_of(node) as parts:
        frame = ExchangeRequest()
        waiting = [part.add_to_columns(frame.columns, appends("jobs/a")) for part in parts]

        await parts[0].stream.write(frame)
        await parts[0].stream.done_writing()

        assert [list((await each).appends.first_offsets) for each in waiting] == [[0]] * PARTITIONS
