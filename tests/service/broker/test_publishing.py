"""Publishing over sessions: many runs in a frame, order, repeats, and limits (S2, S3, S11)."""

import asyncio

import pytest

from tests.support.local_broker import LocalBroker, in_time, payloads_of, reason_of, run_of, take
from tidemark import limits
from tidemark.api.broker.v1 import broker_pb2
from tidemark.api.broker.v1.broker_pb2_grpc import BrokerServiceStub
from tidemark.api.broker.v1.message_pb2 import Message
from tidemark.errors import BatchTooLarge, HeadersTooLarge, InvalidArgument, MessageTooLarge


async def test_one_frame_holds_runs_for_many_queues(local: LocalBroker) -> None:
    session = await local.session()
    queues = [f"orders/{number}" for number in range(500)]

    results = await in_time(
        asyncio.gather(*(session.submit(run_of(queue, b"1", b"2")) for queue in queues))
    )

    assert [reason_of(result) for result in results] == [""] * len(queues)
    assert {result.receipt.partition for result in results} == {0, 1}
    assert {result.receipt.first_offset for result in results} == {0}


async def test_a_run_that_is_refused_spoils_no_other(local: LocalBroker) -> None:
    """S3."""
    session = await local.session()
    runs = [
        run_of("orders/good", b"1"),
        run_of("orders/\n", b"1"),
        run_of("nowhere/x", b"1"),
        run_of("orders/good", b"1", b"2", count=3),
        run_of("orders/good"),
        run_of("orders/good", b"1", fairness_key="k" * 129),
        run_of("orders/good", b"1", delay_ms=limits.DELAY_MS_MAX + 1),
        run_of("orders/good", b"1", partition=77),
        run_of("orders/good", b"2"),
    ]

    results = await in_time(asyncio.gather(*(session.submit(run) for run in runs)))

    assert [reason_of(result) for result in results] == [
        "",
        "INVALID_NAME",
        "TOPIC_NOT_FOUND",
        "INVALID_ARGUMENT",
        "INVALID_ARGUMENT",
        "INVALID_NAME",
        "INVALID_ARGUMENT",
        "INVALID_ARGUMENT",
        "",
    ]
    assert results[-1].receipt.first_offset == 1


async def test_a_repeat_gets_the_first_answer(local: LocalBroker) -> None:
    """S11."""
    session = await local.session()
    first = await session.publish("orders/x", [b"1"], sequence=1)

    again = await session.publish("orders/x", [b"1"], sequence=1)
    other = await session.submit(run_of("orders/x", b"another", sequence=1))

    assert again.duplicate
    assert again.first_offset == first.first_offset
    assert reason_of(other) == "SEQUENCE_CONFLICT"
    assert (await local.queue("orders/x")).messages == 1


@pytest.mark.also_on_redis
async def test_a_repeat_from_another_session_of_the_same_producer_is_known(
    local: LocalBroker,
) -> None:
    """S11."""
    first = await local.session("ada", producer_id="till-7")
    await first.publish("orders/x", [b"1"], sequence=1)
    await first.abort()
    second = await local.session("ada", producer_id="till-7")

    again = await second.publish("orders/x", [b"1"], sequence=1)

    assert again.duplicate


@pytest.mark.parametrize("fresh_broker", [False, True], ids=["topic known", "topic not known"])
@pytest.mark.also_on_redis
async def test_order_is_kept_under_pipelining_also_for_cold_queues(
    local: LocalBroker, fresh_broker: bool
) -> None:
    """S2."""
    if fresh_broker:
        await local.stop_broker()
        await local.start_broker()
    session = await local.session()
    queues = [f"orders/{number}" for number in range(5)]
    keys = ["", "gold"]

    results = await in_time(
        asyncio.gather(
            *(
                session.submit(run_of(queue, b"%d" % number, fairness_key=key))
                for number in range(100)
                for queue in queues
                for key in keys
            )
        )
    )

    assert not any(map(reason_of, results))
    consumer = session.open_consumer(credit=10_000)
    await consumer.subscribe(*queues)
    taken = await take(consumer, 1000)
    for queue in queues:
        for key in keys:
            lane = [each for each in taken if (each.lmq_name, each.fairness_key) == (queue, key)]
            assert payloads_of(lane) == [b"%d" % number for number in range(100)]


async def test_what_a_client_sent_before_it_half_closed_is_answered(local: LocalBroker) -> None:
    call = BrokerServiceStub(await local.channel()).Session()
    await call.write(
        broker_pb2.SessionRequest(
            hello=broker_pb2.Hello(client_id="ada"),
            runs=[run_of("orders/x", b"1", request_id=7)],
        )
    )
    await call.done_writing()

    async def all_results() -> list[int]:
        return [result.request_id async for frame in call for result in frame.published]

    assert await in_time(all_results()) == [7]


async def test_a_million_byte_message_fits_and_one_byte_more_does_not(local: LocalBroker) -> None:
    """S3."""
    session = await local.session()

    await session.publish("orders/x", [b"x" * limits.MESSAGE_BYTES_MAX])
    with pytest.raises(MessageTooLarge):
        await session.publish("orders/x", [b"x" * (limits.MESSAGE_BYTES_MAX + 1)])


async def test_a_message_that_is_too_large_is_found_among_many_small_ones(
    local: LocalBroker,
) -> None:
    """S3."""
    session = await local.session()
    large = b"x" * (limits.MESSAGE_BYTES_MAX + 1)

    with pytest.raises(MessageTooLarge):
        await session.publish("orders/x", [b""] * 5000 + [large])


async def test_headers_fit_up_to_their_limits(local: LocalBroker) -> None:
    """S3."""
    session = await local.session()
    most = {str(number): "" for number in range(limits.HEADERS_COUNT_MAX)}
    largest = {"k": "v" * (limits.HEADERS_BYTES_MAX - 1)}

    await session.publish("orders/x", [Message(headers=most), Message(headers=largest)])
    with pytest.raises(HeadersTooLarge):
        await session.publish("orders/x", [Message(headers={**most, "one more": ""})])
    with pytest.raises(HeadersTooLarge):
        await session.publish("orders/x", [Message(headers={"kk": largest["k"]})])
    with pytest.raises(HeadersTooLarge):
        await session.publish("orders/x", [b""] * 100 + [Message(headers={"kk": largest["k"]})])


async def test_a_run_has_at_most_so_many_messages_and_bytes(local: LocalBroker) -> None:
    """S3."""
    session = await local.session()

    await session.publish("orders/x", [b""] * limits.RUN_MESSAGES_MAX)
    with pytest.raises(BatchTooLarge):
        await session.publish("orders/x", [b""] * (limits.RUN_MESSAGES_MAX + 1))
    with pytest.raises(BatchTooLarge):
        await session.publish("orders/x", [b"x" * limits.MESSAGE_BYTES_MAX] * 4)


async def test_a_traceparent_is_short(local: LocalBroker) -> None:
    """S3: it is kept with every run, and travels in frames that have a limit."""
    session = await local.session()

    with pytest.raises(InvalidArgument):
        await session.publish("orders/x", [b"1"], traceparent="x" * 1_000_000)
