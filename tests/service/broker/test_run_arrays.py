"""Runs in columns: many are published with one part of a frame, each as by itself (S2, S3, S11)."""

import asyncio
from collections.abc import Sequence
from typing import TypeAlias

import pytest

from tests.service.broker.conftest import Gated
from tests.support.local_broker import (
    QUEUE,
    TOPIC,
    LocalBroker,
    in_time,
    payloads_of,
    run_of,
    take,
)
from tests.support.session import Session
from tidemark import limits
from tidemark.api.broker.v1.broker_pb2 import Hello, SessionRequest
from tidemark.api.broker.v1.broker_pb2_grpc import BrokerServiceStub
from tidemark.api.broker.v1.message_pb2 import Message, MessageBatch, PublishResult, RunArray
from tidemark.bodies import body_of
from tidemark.client.transport.codec import Stored
from tidemark.client.transport.frames import PlainRun
from tidemark.errors import InvalidArgument, TidemarkError
from tidemark.names import partition_of
from tidemark.rpc.callbacks import complete
from tidemark.rpc.statuses import from_status

RunResult: TypeAlias = PublishResult | Stored
"""A result of its own, or what came in columns."""

UNLIKE_PARSED = b"\x0a\x02\x0a\x00"
"""One empty message, in a form that is shorter once it is parsed and serialized again."""


def plain(
    lmq_name: str,
    body: bytes,
    *,
    count: int = 1,
    sequence: int = 0,
    partition: int | None = None,
) -> PlainRun:
    where = partition_of(lmq_name, 2) if partition is None else partition
    return lmq_name, body, count, sequence, where


def batch(*messages: Message) -> bytes:
    return MessageBatch(messages=messages).SerializeToString(deterministic=True)


class Sent:
    """Runs that were sent in columns, with the futures of their results."""

    def __init__(self, runs: int) -> None:
        loop = asyncio.get_running_loop()
        self.answers: list[asyncio.Future[RunResult]] = [loop.create_future() for _ in range(runs)]
        self.first_id = 0

    def stored(self, request_id: int, stored: Stored) -> None:
        self.answers[request_id - self.first_id].set_result(stored)

    def answered(self, request_id: int, result: PublishResult | TidemarkError) -> None:
        complete(self.answers[request_id - self.first_id], result)


async def publish(session: Session, runs: Sequence[PlainRun]) -> list[RunResult]:
    """Publish runs in one array; returns their results."""
    sent = Sent(len(runs))
    sent.first_id = session.send_plain_runs(runs, sent)
    return await in_time(asyncio.gather(*sent.answers))


def reason_of(result: RunResult) -> str:
    """Why a run was refused; empty if it is stored."""
    if isinstance(result, PublishResult) and result.HasField("error"):
        return from_status(result.error).reason
    return ""


async def test_runs_for_many_queues_of_all_partitions_are_stored(local: LocalBroker) -> None:
    """S2: more than one operation takes, of queues with and without a publisher."""
    session = await local.session()
    queues = [f"{TOPIC}/{number}" for number in range(limits.APPENDS_PER_OPERATION_MAX * 3 // 2)]
    await publish(session, [plain(queue, body_of([b"1"])) for queue in queues[::2]])

    results = await publish(session, [plain(queue, body_of([b"2"])) for queue in queues])

    stored = [each for each in results if isinstance(each, tuple)]
    assert [first_offset for _, first_offset, _ in stored] == [1, 0] * (len(queues) // 2)
    assert all(queue_id and publisher_id for queue_id, _, publisher_id in stored)
    consumer = session.open_consumer(credit=10_000)
    await consumer.subscribe(*queues[:4])
    assert sorted(payloads_of(await take(consumer, 6))) == [b"1", b"1", *[b"2"] * 4]


async def test_a_run_that_is_refused_spoils_no_other(local: LocalBroker) -> None:
    """S3: the reasons are those of runs that are sent one by one."""
    session = await local.session()
    one = body_of([b"1"])
    many_headers = {str(number): "" for number in range(limits.HEADERS_COUNT_MAX + 1)}
    runs = {
        plain(QUEUE, one): "",
        plain(f"{TOPIC}/\n", one): "INVALID_NAME",
        plain("nowhere/x", one): "TOPIC_NOT_FOUND",
        plain(QUEUE, one, count=2): "INVALID_ARGUMENT",
        plain(QUEUE, b""): "INVALID_ARGUMENT",
        plain(QUEUE, b"\x0a\xff"): "INVALID_ARGUMENT",
        plain(QUEUE, one, partition=77): "INVALID_ARGUMENT",
        plain(QUEUE, one, partition=1 - partition_of(QUEUE, 2)): "INVALID_ARGUMENT",
        plain(QUEUE, body_of([bytes(limits.MESSAGE_BYTES_MAX + 1)])): "MESSAGE_TOO_LARGE",
        plain(QUEUE, batch(Message(headers=many_headers))): "HEADERS_TOO_LARGE",
        plain(QUEUE, body_of([bytes(1_000_000)] * 5), count=5): "BATCH_TOO_LARGE",
        plain(QUEUE, batch(Message(payload=b"3", headers={"a": "b"}))): "",
        plain(QUEUE, body_of([b"4", b"5"]), count=2): "",
    }

    results = await publish(session, list(runs))

    assert list(map(reason_of, results)) == list(runs.values())
    stored = [each for each in results if isinstance(each, tuple)]
    assert [first_offset for _, first_offset, _ in stored] == [0, 1, 2]
    assert (await local.queue(QUEUE)).messages == 4


async def test_a_repeat_gets_the_first_answer(local: LocalBroker) -> None:
    """S11: also among others, and in either form."""
    session = await local.session()
    one = body_of([b"1"])
    first, *_ = await publish(session, [plain(QUEUE, one, sequence=1), plain(QUEUE, one)])

    again, fresh, other = await publish(
        session,
        [
            plain(QUEUE, one, sequence=1),
            plain(QUEUE, one, sequence=2),
            plain(QUEUE, body_of([b"another"]), sequence=1),
        ],
    )
    alone = await session.submit(run_of(QUEUE, b"1", sequence=2))

    assert isinstance(first, tuple)
    assert isinstance(again, PublishResult)
    assert isinstance(fresh, PublishResult)
    assert (again.receipt.duplicate, again.receipt.first_offset) == (True, first[1])
    assert (fresh.receipt.duplicate, fresh.receipt.first_offset) == (False, 2)
    assert reason_of(other) == "SEQUENCE_CONFLICT"
    assert (alone.receipt.duplicate, alone.receipt.first_offset) == (True, 2)
    assert (await local.queue(QUEUE)).messages == 3


async def test_a_repeat_at_a_broker_that_knows_nothing_yet_is_the_same_to_the_byte(
    local: LocalBroker,
) -> None:
    """S11: it waits for its topic there, and is not sent as part of an array."""
    session = await local.session(producer_id="till-7")
    run = plain(QUEUE, UNLIKE_PARSED, sequence=1)
    await publish(session, [run])
    await local.stop_broker()
    await local.start_broker()
    session = await local.session(producer_id="till-7")

    (again,) = await publish(session, [run])

    assert isinstance(again, PublishResult)
    assert again.receipt.duplicate


async def test_a_repeat_with_its_headers_in_another_order_is_the_same(local: LocalBroker) -> None:
    """S11: their order on the way has no meaning, and differs from one process to the next."""
    session = await local.session()
    headers = [(f"name-{number}", "value") for number in range(limits.HEADERS_COUNT_MAX)]
    first, again = (Message(headers=dict(each)) for each in (headers, headers[::-1]))
    await session.publish(QUEUE, [first], sequence=1)

    repeated = await session.publish(QUEUE, [again], sequence=1)
    (in_columns,) = await publish(session, [plain(QUEUE, batch(again), sequence=1)])

    assert repeated.duplicate
    assert isinstance(in_columns, PublishResult)
    assert in_columns.receipt.duplicate


async def test_runs_of_a_queue_stay_in_order_while_its_topic_is_looked_up(
    local: LocalBroker,
) -> None:
    """S2: those that wait for it, and those that come later."""
    await local.stop_broker()
    await local.start_broker()
    session = await local.session()
    payloads = [b"%d" % number for number in range(50)]
    runs = [plain(QUEUE, body_of([each])) for each in payloads]

    first = publish(session, runs[:25])
    results = await in_time(asyncio.gather(first, publish(session, runs[25:])))

    assert not any(map(reason_of, [each for part in results for each in part]))
    consumer = session.open_consumer(credit=100)
    await consumer.subscribe(QUEUE)
    assert payloads_of(await take(consumer, len(payloads))) == payloads


async def test_runs_whose_answer_was_lost_are_refused_and_can_be_repeated(gated: Gated) -> None:
    """S11: each of them, under its own number."""
    local, gates = gated
    session = await local.session()
    runs = [plain(f"{TOPIC}/{n}", body_of([b"1"]), sequence=n, partition=0) for n in (1, 2, 3)]
    await publish(session, [plain(f"{TOPIC}/{n}", body_of([b"0"]), partition=0) for n in (1, 2, 3)])
    link = gates.links[0]
    link.answers.close()
    publishing = asyncio.create_task(publish(session, runs))
    await in_time(link.answers.until_held())
    await link.break_now()
    link.answers.let_go()
    assert list(map(reason_of, await publishing)) == ["UNAVAILABLE"] * 3

    while any(map(reason_of, again := await publish(session, runs))):
        assert session.ended is None

    assert [each.receipt.duplicate for each in again if isinstance(each, PublishResult)] == [
        True
    ] * 3


@pytest.mark.parametrize("frame_bytes", [limits.RUN_BYTES_MAX + 100, limits.GRPC_RECEIVE_BYTES_MAX])
async def test_a_body_that_is_large_only_until_it_is_parsed_is_refused(
    local: LocalBroker, frame_bytes: int
) -> None:
    """S3: of a field that comes often only the last counts, but it is sent on as it came. One of a
    whole frame would not fit a frame to storage, and would break the link of all clients."""
    bystander = await local.session()
    await bystander.publish(QUEUE, [Message(payload=b"before")])
    call = BrokerServiceStub(await local.channel()).Session()
    hello = Hello(client_id="eve", producer_id="p" * limits.PRODUCER_ID_BYTES_MAX)
    await call.write(SessionRequest(hello=hello))

    await call.write(repeated_field(frame_bytes))
    result = await in_time(anext(each async for frame in call for each in frame.published))

    assert reason_of(result) == "BATCH_TOO_LARGE"
    await bystander.publish(QUEUE, [Message(payload=b"after")])
    assert (await local.queue(QUEUE)).messages == 2


def repeated_field(frame_bytes: int) -> SessionRequest:
    """A frame of nearly so many bytes with one run, whose only message has its payload again and
    again."""
    again = Message(payload=b"x").SerializeToString()
    message = again * ((frame_bytes - 50) // len(again))
    # Its length as four groups of seven bits, each but the last with a bit that more follow.
    groups = [len(message) >> shift & 0x7F | 0x80 for shift in (0, 7, 14)]
    array = RunArray(
        lmq_names=[QUEUE],
        bodies=[b"\x0a" + bytes([*groups, len(message) >> 21]) + message],
        runs=[1, 1, 1, partition_of(QUEUE, 2)],
    )
    return SessionRequest(run_arrays=[array])


@pytest.mark.parametrize(
    "array",
    [
        RunArray(lmq_names=[QUEUE], bodies=[b""], runs=[1, 1, 0]),
        RunArray(lmq_names=[QUEUE], bodies=[b""]),
        RunArray(
            lmq_names=[QUEUE] * (limits.FRAME_RUNS_MAX + 1),
            bodies=[b""] * (limits.FRAME_RUNS_MAX + 1),
            runs=[1, 1, 0, 0] * (limits.FRAME_RUNS_MAX + 1),
        ),
    ],
    ids=["a number is missing", "a column is missing", "too many runs"],
)
async def test_an_array_that_breaks_the_contract_ends_the_session(
    local: LocalBroker, array: RunArray
) -> None:
    """S3."""
    call = BrokerServiceStub(await local.channel()).Session()
    await call.write(SessionRequest(hello=Hello(client_id="eve")))
    await call.write(SessionRequest(run_arrays=[array]))

    with pytest.raises(InvalidArgument) as ended:
        async for _ in call:
            pass

    assert ended.value.metadata == {"field": "run_arrays"}
