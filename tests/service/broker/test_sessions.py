"""Sessions as streams: their beginning, their frames and their end."""

import asyncio

import pytest

from tests.service.broker.conftest import Gated, StartBroker, StartGated
from tests.support.local_broker import LocalBroker, in_time, reason_of, run_of, until
from tidemark.api.broker.v1 import broker_pb2
from tidemark.api.broker.v1.broker_pb2_grpc import BrokerServiceStub
from tidemark.api.broker.v1.message_pb2 import Ack, DeadLetter
from tidemark.clock import ManualClock
from tidemark.errors import InvalidArgument, InvalidName, ShuttingDown, TidemarkError, Unavailable

pytestmark = pytest.mark.slow


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


async def test_a_client_that_is_not_read_from_because_storage_is_slow_is_not_silent(
    start_gated: StartGated, clock: ManualClock
) -> None:
    """V6: its heartbeats wait behind the runs that storage has not answered."""
    local, gates = await start_gated(1, clock=clock, client_timeout_ms=5000)
    session = await local.session()
    await session.publish("orders/x", [b"1"])
    gates.links[0].requests.close()
    results = [session.submit(run_of("orders/x", b"x" * 1_000_000)) for _ in range(20)]
    await in_time(gates.links[0].requests.until_held())

    for _ in range(10):
        for _ in range(20):  # round trips, in which everything could be read
            await local.api.Heartbeat(broker_pb2.HeartbeatRequest(client_id="other"))
        session.heartbeat()
        await clock.advance_ms(1000)
    gates.links[0].requests.let_go()

    assert not any(map(reason_of, await in_time(asyncio.gather(*results))))
    assert session.ended is None


async def test_a_stopping_broker_says_so_and_answers_what_it_took(local: LocalBroker) -> None:
    """S5."""
    session = await local.session()
    results = [session.submit(run_of(f"orders/{number}", b"1")) for number in range(200)]
    await in_time(asyncio.wait(results, return_when=asyncio.FIRST_COMPLETED))

    stopping = asyncio.create_task(local.server.stop(60_000))
    ended = await in_time(session.until_ended())
    await in_time(stopping)

    assert isinstance(ended, Unavailable | ShuttingDown)
    (go_away,) = session.go_aways
    assert not go_away.HasField("partition")
    assert not any(reason_of(result.result()) for result in results)


async def test_every_waiting_call_fails_when_the_session_ends(local: LocalBroker) -> None:
    session = await local.session()
    consumer = session.open_consumer(credit=1)
    await consumer.subscribe("orders/x")
    waiting = asyncio.create_task(consumer.deliveries())

    await local.stop_broker()

    with pytest.raises((Unavailable, ShuttingDown)):
        await in_time(waiting)
    with pytest.raises((Unavailable, ShuttingDown)):
        await session.publish("orders/x", [b"1"])
    with pytest.raises((Unavailable, ShuttingDown)):
        await session.settle(1, Ack())


async def test_a_client_that_never_reads_is_not_read_from_for_ever(local: LocalBroker) -> None:
    """S3: its unread results wait in the broker, so they are bounded."""
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


async def test_a_client_that_settles_far_ahead_of_storage_is_not_read_from_for_ever(
    gated: Gated,
) -> None:
    """S3: what storage has not answered waits in the broker, so there is an end to it."""
    local, gates = gated
    await local.publish(run_of("orders/x", b"1"))
    (held,) = await local.pull("orders/x")
    call = BrokerServiceStub(await local.channel()).Session()
    await call.write(broker_pb2.SessionRequest(hello=broker_pb2.Hello(client_id="ahead")))
    frame = broker_pb2.SessionRequest()
    for _ in range(1000):
        frame.settlements.add(receipt=held.receipt, dead_letter=DeadLetter(reason="x" * 1000))
    written = 0

    async def write() -> None:
        nonlocal written
        for _ in range(50):
            await call.write(frame)
            written += 1

    gates.links[0].requests.close()
    writing = asyncio.create_task(write())
    for _ in range(200):  # round trips, in which everything could be read
        await local.api.Heartbeat(broker_pb2.HeartbeatRequest(client_id="other"))

    assert written < 50
    writing.cancel()
    call.cancel()
    gates.links[0].requests.let_go()


async def test_many_answers_go_out_in_frames_that_fit(local: LocalBroker) -> None:
    session = await local.session()

    for tag in range(1, 50_001):
        session.settle_nowait(tag, Ack())
    await in_time(
        session.notified.wait_for(
            lambda: session.ended is not None or len(session.failed_settlements) == 50_000
        )
    )

    assert session.ended is None
