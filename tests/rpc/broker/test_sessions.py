"""Sessions: publishing in frames, publishers, the beginning and the end of the stream."""

import asyncio

import pytest

from tests.rpc.broker.conftest import StartBroker
from tests.rpc.broker.local_broker import (
    LocalBroker,
    in_time,
    payloads_of,
    reason_of,
    run_of,
    take,
    until,
)
from tidemark import limits
from tidemark.api.broker.v1 import broker_pb2, topic_pb2
from tidemark.api.broker.v1.broker_pb2_grpc import BrokerServiceStub
from tidemark.api.broker.v1.message_pb2 import Ack, Message
from tidemark.clock import ManualClock
from tidemark.errors import (
    BatchTooLarge,
    HeadersTooLarge,
    InvalidArgument,
    InvalidName,
    MessageTooLarge,
    PublisherNotFound,
    ShuttingDown,
    TidemarkError,
    Unavailable,
)
from tidemark.rpc import from_status

# --- publishing ---------------------------------------------------------------------------------


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


# --- publishers ---------------------------------------------------------------------------------


async def evicted(local: LocalBroker, lmq_name: str) -> str:
    request = topic_pb2.TryEvictInactiveQueueRequest(lmq_name=lmq_name)
    outcome = (await local.topics.TryEvictInactiveQueue(request)).outcome
    return topic_pb2.EvictionOutcome.Name(outcome).removeprefix("EVICTION_OUTCOME_")


async def test_an_opened_publisher_has_its_queue_loaded(local: LocalBroker) -> None:
    """I2."""
    session = await local.session()

    opened = await session.open_publisher("orders/x")

    queue = await local.queue("orders/x")
    assert queue.activity == topic_pb2.QUEUE_ACTIVITY_MATERIALIZED
    assert list(opened.partitions) == [queue.partition]
    receipt = await session.publish("orders/x", [b"1"], publisher_id=opened.publisher_id)
    assert receipt.publisher_id == opened.publisher_id


async def test_a_publisher_of_a_topic_that_is_not_there_is_refused(local: LocalBroker) -> None:
    session = await local.session()

    with pytest.raises(InvalidName):
        await session.open_publisher("orders/")
    with pytest.raises(TidemarkError, match="TOPIC_NOT_FOUND"):
        await session.open_publisher("nowhere")


async def test_a_destroyed_publisher_keeps_its_queue_no_longer(
    start: StartBroker, clock: ManualClock
) -> None:
    """I8."""
    local = await start(clock, topic={"idle_after_ms": 1000})
    session = await local.session()
    by_call = await session.open_publisher("orders/call")
    by_frame = await session.open_publisher("orders/frame")
    await clock.advance_ms(1500)
    assert await evicted(local, "orders/call") == "ACTIVE"

    await local.api.DestroyPublisher(
        broker_pb2.DestroyPublisherRequest(publisher_id=by_call.publisher_id)
    )
    session.destroy_publisher(by_frame.publisher_id)
    await session.publish("orders/barrier", [b""])

    assert await evicted(local, "orders/call") == "NOT_IDLE_ENOUGH"
    assert await evicted(local, "orders/frame") == "NOT_IDLE_ENOUGH"
    with pytest.raises(PublisherNotFound):
        await local.api.DestroyPublisher(
            broker_pb2.DestroyPublisherRequest(publisher_id=by_call.publisher_id)
        )


async def test_destroying_an_unknown_publisher_is_told_as_an_error(local: LocalBroker) -> None:
    """I8."""
    session = await local.session()

    session.destroy_publisher(12345)
    async with session.told:
        await in_time(session.told.wait_for(lambda: bool(session.errors)))

    (error,) = session.errors
    assert error.publisher_id == 12345
    assert isinstance(from_status(error.error), PublisherNotFound)


async def test_a_run_through_a_publisher_that_is_not_there_is_refused(local: LocalBroker) -> None:
    """I8."""
    session = await local.session()

    with pytest.raises(PublisherNotFound):
        await session.publish("orders/x", [b"1"], publisher_id=12345)


async def test_the_least_recently_used_publisher_leaves_first(
    start: StartBroker, clock: ManualClock
) -> None:
    """I5."""
    local = await start(clock, publishers_per_connection_max=2, topic={"idle_after_ms": 1000})
    session = await local.session()
    await session.publish("orders/a", [b""])
    await session.publish("orders/b", [b""])
    await session.publish("orders/a", [b""])

    await session.publish("orders/c", [b""])

    assert await evicted(local, "orders/a") == "ACTIVE"
    assert await evicted(local, "orders/b") == "NOT_IDLE_ENOUGH"
    assert await evicted(local, "orders/c") == "ACTIVE"


async def test_idle_publishers_of_a_connection_are_dropped_where_that_is_set(
    start: StartBroker, clock: ManualClock
) -> None:
    """I5."""
    local = await start(
        clock, publisher_cache_idle_timeout_ms=5000, topic={"idle_after_ms": 100_000}
    )
    session = await local.session()
    await session.publish("orders/idle", [b""])
    await session.publish("orders/busy", [b""])
    await clock.advance_ms(4000)
    await session.publish("orders/busy", [b""])

    await clock.advance_ms(2000)

    assert await evicted(local, "orders/idle") == "NOT_IDLE_ENOUGH"
    assert await evicted(local, "orders/busy") == "ACTIVE"


async def test_a_disconnect_drops_the_leases_of_publishers(
    start: StartBroker, clock: ManualClock
) -> None:
    """I3, I5."""
    local = await start(clock, topic={"idle_after_ms": 1000})
    session = await local.session()
    await session.publish("orders/x", [b""])
    assert await evicted(local, "orders/x") == "ACTIVE"

    await session.abort()

    async def released() -> bool:
        return await evicted(local, "orders/x") == "NOT_IDLE_ENOUGH"

    await until(released)


@pytest.mark.parametrize("turns", range(0, 12, 2))
async def test_a_disconnect_in_the_middle_of_a_first_publish_leaves_no_lease(
    start: StartBroker, clock: ManualClock, turns: int
) -> None:
    """I3: the broker does not know the topic yet, so that the run waits while the client leaves."""
    local = await start(clock, partitions=1, topic={"idle_after_ms": 1000})
    await local.stop_broker()
    await local.start_broker()
    session = await local.session()

    _ = session.submit(run_of("orders/x", b"1"))
    for _ in range(turns):
        await clock.sleep_ms(0)
    await session.abort()

    async def settled() -> bool:
        return await evicted(local, "orders/x") in {
            "NOT_IDLE_ENOUGH",
            "NOT_PRESENT",
            "NOT_MATERIALIZED",
        }

    await local.publish(run_of("orders/barrier", b""))
    await until(settled)


# --- the stream itself --------------------------------------------------------------------------


async def test_the_first_frame_says_hello(local: LocalBroker) -> None:
    call = BrokerServiceStub(await local.channel()).Session()
    await call.write(broker_pb2.SessionRequest(runs=[run_of("orders/x", b"1")]))

    with pytest.raises(InvalidArgument) as refused:
        await in_time(anext(aiter(call)))

    assert refused.value.metadata == {"field": "hello"}


async def test_hello_comes_once(local: LocalBroker) -> None:
    call = BrokerServiceStub(await local.channel()).Session()
    hello = broker_pb2.SessionRequest(hello=broker_pb2.Hello(client_id="ada"))
    frames = aiter(call)
    await call.write(hello)
    await in_time(anext(frames))

    await call.write(hello)

    with pytest.raises(InvalidArgument):
        await in_time(anext(frames))


async def test_a_client_without_a_legal_name_is_refused(local: LocalBroker) -> None:
    for client_id in ("", "\x00", "x" * 257):
        with pytest.raises(InvalidName):
            await local.session(client_id)


async def test_a_stream_that_never_says_hello_is_ended(
    start: StartBroker, clock: ManualClock
) -> None:
    local = await start(clock, client_timeout_ms=5000)
    call = BrokerServiceStub(await local.channel()).Session()

    async def opened() -> bool:
        return local.server.calls_in_progress > 1  # the watch of health is one

    async def read() -> None:
        async for _ in call:
            pass

    reading = asyncio.create_task(read())
    await until(opened)
    await clock.advance_ms(7000)

    with pytest.raises(TidemarkError):
        await in_time(reading)


async def test_a_silent_client_is_gone_and_one_that_sends_heartbeats_is_not(
    start: StartBroker, clock: ManualClock
) -> None:
    """V6."""
    local = await start(clock, client_timeout_ms=5000)
    silent = await local.session("silent")
    alive = await local.session("alive")
    for _ in range(3):
        await clock.advance_ms(2000)
        alive.heartbeat()
        await alive.publish("orders/barrier", [b""])

    await clock.advance_ms(2000)
    await in_time(silent.until_ended())

    await alive.publish("orders/x", [b"still here"])


async def test_a_stopping_broker_says_so_and_answers_what_it_took(local: LocalBroker) -> None:
    """S5."""
    session = await local.session()
    results = [session.submit(run_of(f"orders/{number}", b"1")) for number in range(200)]
    await in_time(asyncio.wait(results, return_when=asyncio.FIRST_COMPLETED))

    stopping = asyncio.create_task(local.server.stop(5000))
    ended = await in_time(session.until_ended())
    await in_time(stopping)

    assert isinstance(ended, Unavailable | ShuttingDown)
    (go_away,) = session.go_aways
    assert not go_away.HasField("partition")
    assert not any(reason_of(result.result()) for result in results)


async def test_everybody_who_waits_is_told_when_the_session_ends(local: LocalBroker) -> None:
    session = await local.session()
    consumer = session.open_consumer(credit=1)
    await consumer.subscribe("orders/x")
    waiting = asyncio.create_task(consumer.deliveries())

    await local.stop_broker()

    with pytest.raises(Unavailable):
        await in_time(waiting)
    with pytest.raises(Unavailable):
        await session.publish("orders/x", [b"1"])
    with pytest.raises(Unavailable):
        await session.settle(1, Ack())


async def test_a_client_that_never_reads_is_not_read_from_for_ever(local: LocalBroker) -> None:
    """S3: what it is told waits in the broker, so there is an end to it."""
    call = BrokerServiceStub(await local.channel()).Session()
    await call.write(broker_pb2.SessionRequest(hello=broker_pb2.Hello(client_id="deaf")))
    frame = broker_pb2.SessionRequest()
    for tag in range(1, 10_001):
        frame.settlements.add(delivery_tag=tag, ack=Ack())
    written = 0

    async def write() -> None:
        nonlocal written
        for _ in range(5_000):
            await call.write(frame)
            written += 1

    writing = asyncio.create_task(write())
    other = await local.session("other")
    for _ in range(200):
        await other.publish("orders/x", [b"as fast as ever"])

    assert written < 5_000
    writing.cancel()


async def test_many_answers_go_out_in_frames_that_fit(local: LocalBroker) -> None:
    session = await local.session()

    for tag in range(1, 50_001):
        session.settle_nowait(tag, Ack())
    async with session.told:
        await in_time(
            session.told.wait_for(
                lambda: session.ended is not None or len(session.failed_settlements) == 50_000
            )
        )

    assert session.ended is None
