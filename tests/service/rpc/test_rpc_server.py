"""Server and channel over real sockets: addresses, health, reflection, deadlines, traces."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, StatusCode, TraceFlags

from tests.support.echo_service import SERVICE, Echo, serving
from tidemark import errors
from tidemark.clock import ManualClock
from tidemark.local.ports import free_address
from tidemark.rpc import (
    AddressInUse,
    RpcServer,
    interceptors,
    open_channel,
    remaining_ms,
    wait_until_serving,
)
from tidemark.telemetry.traces import current_traceparent

NOT_SERVING = HealthCheckResponse.NOT_SERVING
SERVING = HealthCheckResponse.SERVING


async def echo_back(request: bytes, context: Any) -> bytes:
    return request


# --- addresses ----------------------------------------------------------------------------------


async def test_port_zero_becomes_a_real_port() -> None:
    async with serving({"unary_unary": echo_back}) as echo:
        answer = await echo.unary(b"hello")

        assert echo.server.port > 0
        assert echo.server.address == f"127.0.0.1:{echo.server.port}"
    assert answer == b"hello"


async def test_a_port_in_use_is_refused_in_one_clear_line() -> None:
    async with serving({}) as first:
        second = RpcServer(first.server.address)

        with pytest.raises(AddressInUse) as caught:
            await second.start()

    assert caught.value.strerror == f"cannot listen on {second.address}: already in use"


async def test_a_port_in_use_by_another_program_is_refused_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        server = RpcServer(f"127.0.0.1:{other.getsockname()[1]}")

        with pytest.raises(AddressInUse):
            await server.start()


async def test_a_port_is_free_again_right_after_the_stop() -> None:
    async with serving({"unary_unary": echo_back}, address=free_address()) as first:
        await first.unary(b"leave a connection behind")

    second = RpcServer(first.server.address)
    await second.start()
    await second.stop(0)


async def test_an_address_of_another_machine_is_refused_with_its_cause() -> None:
    server = RpcServer("192.0.2.1:7400")

    with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1:7400: Cannot assign"):
        await server.start()


# --- health and reflection ----------------------------------------------------------------------


async def check(echo: Echo, service: str) -> int:
    stub: Any = HealthStub(echo.channel)
    answer: HealthCheckResponse = await stub.Check(HealthCheckRequest(service=service))
    return answer.status


async def test_services_serve_from_the_start_and_flip_one_by_one() -> None:
    """S1: the health service is on."""
    async with serving({"unary_unary": echo_back}) as echo:
        assert await check(echo, "") == SERVING
        assert await check(echo, SERVICE) == SERVING

        echo.server.set_serving(SERVICE, False)

        assert await check(echo, "") == SERVING
        assert await check(echo, SERVICE) == NOT_SERVING


async def test_a_service_can_start_before_it_serves() -> None:
    server = RpcServer("127.0.0.1:0")
    server.add_service(SERVICE, {})
    server.set_serving(SERVICE, False)
    await server.start()

    async with open_channel(server.address) as channel:
        waiting = asyncio.create_task(wait_until_serving(channel, SERVICE, 30_000))
        assert await check(Echo(server, channel), SERVICE) == NOT_SERVING
        assert not waiting.done()
        server.set_serving(SERVICE, True)
        await waiting

    await server.stop(0)


async def test_health_of_an_unknown_service_is_not_found() -> None:
    async with serving({}) as echo:
        with pytest.raises(errors.ClientError) as caught:
            await check(echo, "test.Nowhere")

    assert caught.value.code is grpc.StatusCode.NOT_FOUND


async def test_a_watcher_sees_each_change_and_the_end() -> None:
    async with serving({"unary_unary": echo_back}) as echo:
        stub: Any = HealthStub(echo.channel)
        watch = stub.Watch(HealthCheckRequest(service=SERVICE))
        states = [(await watch.read()).status]
        echo.server.set_serving(SERVICE, False)
        states.append((await watch.read()).status)
        echo.server.set_serving(SERVICE, True)
        states.append((await watch.read()).status)

        await echo.server.stop(30_000)

        states += [answer.status async for answer in read_all(watch)]
    assert states == [SERVING, NOT_SERVING, SERVING, NOT_SERVING]


async def read_all(stream: Any) -> AsyncIterator[Any]:
    while (answer := await stream.read()) is not grpc.aio.EOF:
        yield answer


async def test_waiting_for_a_server_that_starts_later_succeeds() -> None:
    server = RpcServer(free_address())

    async with open_channel(server.address) as channel:
        waiting = asyncio.create_task(wait_until_serving(channel, "", 30_000))
        async with asyncio.timeout(20):
            # One look each time: a state that changes between two looks would be waited for twice.
            while (state := channel.get_state()) is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                await channel.wait_for_state_change(state)
        await server.start()
        await waiting

    await server.stop(0)


async def test_waiting_for_a_service_that_never_serves_ends_with_unavailable() -> None:
    clock = ManualClock()

    async with serving({"unary_unary": echo_back}) as echo:
        echo.server.set_serving(SERVICE, False)
        waiting = asyncio.create_task(wait_until_serving(echo.channel, SERVICE, 5_000, clock))
        await clock.until_sleepers(1)
        await clock.advance_ms(5_000)

        with pytest.raises(errors.Unavailable, match=f"{SERVICE} was not serving within 5000 ms"):
            await waiting


async def test_reflection_lists_every_service() -> None:
    """S1: the reflection service is on."""
    async with serving({"unary_unary": echo_back}) as echo:
        channel: Any = echo.channel
        stub: Any = ServerReflectionStub(channel)
        stream = stub.ServerReflectionInfo()
        await stream.write(ServerReflectionRequest(list_services=""))
        answer = await stream.read()
        await stream.done_writing()

    names = {service.name for service in answer.list_services_response.service}
    assert names == {
        SERVICE,
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }


# --- deadlines ----------------------------------------------------------------------------------


async def test_a_unary_call_without_a_deadline_is_cut_off_by_the_default() -> None:
    clock = ManualClock()
    remaining: list[int | None] = []
    cancelled = asyncio.Event()

    async def wait(request: bytes, context: Any) -> bytes:
        remaining.append(remaining_ms(context))
        try:
            await clock.sleep_ms(1_000)
            remaining.append(remaining_ms(context))
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return b"never"

    async with serving({"unary_unary": wait}, clock=clock, unary_deadline_ms=3_000) as echo:
        call = asyncio.create_task(echo.unary())
        await clock.until_sleepers(2)
        await clock.advance_ms(3_000)

        with pytest.raises(errors.DeadlineExceeded, match="not finished within"):
            await call

    assert remaining == [3_000, 2_000]
    assert cancelled.is_set()


async def test_a_deadline_of_the_caller_replaces_the_default() -> None:
    clock = ManualClock()
    remaining: list[int | None] = []

    async def answer(request: bytes, context: Any) -> bytes:
        remaining.append(remaining_ms(context))
        return b""

    async with serving({"unary_unary": answer}, clock=clock, unary_deadline_ms=1) as echo:
        await echo.unary(timeout=1_000)

    assert remaining[0] is not None
    assert abs(remaining[0] - 1_000_000) < 50_000  # gRPC rounds deadlines on the wire


async def test_a_call_past_the_deadline_of_its_caller_is_deadline_exceeded() -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def wait(request: bytes, context: Any) -> bytes:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return b"never"

    async with serving({"unary_unary": wait}) as echo:
        with pytest.raises(errors.DeadlineExceeded):
            await echo.unary(timeout=1)
        if started.is_set():  # a machine may be too busy for the call to arrive in time
            await cancelled.wait()


async def test_a_timeout_inside_a_handler_is_not_taken_for_the_deadline() -> None:
    async def answer(request: bytes, context: Any) -> bytes:
        raise TimeoutError("of the handler's own")

    async with serving({"unary_unary": answer}) as echo:
        with pytest.raises(errors.Internal):
            await echo.unary()


async def test_streams_have_no_default_deadline() -> None:
    clock = ManualClock()
    remaining: list[int | None] = []

    async def answers(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            remaining.append(remaining_ms(context))
            yield request

    async with serving({"stream_stream": answers}, clock=clock, unary_deadline_ms=1) as echo:
        stream = echo.method("stream_stream")()
        await stream.write(b"first")
        assert await stream.read() == b"first"
        await clock.advance_ms(10_000)
        await stream.write(b"second")
        assert await stream.read() == b"second"

    assert remaining == [None, None]
    assert clock.sleepers == 0


# --- traces -------------------------------------------------------------------------------------

CALLER = SpanContext(
    trace_id=0x4BF92F3577B34DA6A3CE929D0E0E4736,
    span_id=0x00F067AA0BA902B7,
    is_remote=False,
    trace_flags=TraceFlags(TraceFlags.SAMPLED),
)
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def answer_traceparent(request: bytes, context: Any) -> bytes:
    return current_traceparent().encode()


async def answer_traceparent_twice(request: Any, context: Any) -> AsyncIterator[bytes]:
    yield current_traceparent().encode()
    yield current_traceparent().encode()


async def test_the_trace_of_the_caller_is_current_in_the_handler() -> None:
    """S4: traces go across processes, also through one that does not trace itself."""
    behaviors = {"unary_unary": answer_traceparent, "unary_stream": answer_traceparent_twice}

    async with serving(behaviors) as echo:
        untraced = await echo.unary()
        with trace.use_span(NonRecordingSpan(CALLER)):
            traced = await echo.unary()
            streamed = await echo.call("unary_stream", [b""])

    assert untraced == b""
    assert traced.decode() == TRACEPARENT
    assert [each.decode() for each in streamed] == [TRACEPARENT, TRACEPARENT]


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What the server traces. The provider of a process can be set once, so it is put in place."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    monkeypatch.setattr(interceptors, "_tracer", provider.get_tracer("test"))
    return exporter


@pytest.mark.parametrize(
    ("error", "is_error", "attributes"),
    [
        (
            errors.NotOwner("call another", owner="b-1"),
            False,
            {"tidemark.reason": "NOT_OWNER"},
        ),
        (errors.QueueNotFound("no orders/ada"), True, {"error.type": "QUEUE_NOT_FOUND"}),
        (ValueError("orders/ada has a secret"), True, {"error.type": "ValueError"}),
    ],
)
async def test_a_span_names_the_reason_of_a_failure_and_a_redirect_is_none(
    exporter: InMemorySpanExporter, error: Exception, is_error: bool, attributes: dict[str, str]
) -> None:
    """S4: without the text of the error, which may name a queue or quote a payload."""

    async def refuse(request: bytes, context: Any) -> bytes:
        raise error

    async with serving({"unary_unary": refuse}) as echo:
        with pytest.raises(errors.TidemarkError):
            await echo.unary()

    (span,) = exporter.get_finished_spans()
    assert (span.status.status_code is StatusCode.ERROR) == is_error
    assert attributes.items() <= dict(span.attributes or {}).items()
    assert span.events == ()
    assert "orders/ada" not in span.to_json()


async def test_a_probe_begins_no_trace_and_is_part_of_its_callers(
    exporter: InMemorySpanExporter,
) -> None:
    """O3: it comes every few seconds, for as long as a service runs."""
    check = HealthCheckRequest()

    async with serving({}) as echo:
        health: Any = HealthStub(echo.channel)
        await health.Check(check)
        probes = exporter.get_finished_spans()
        with trace.use_span(NonRecordingSpan(CALLER)):
            await health.Check(check)

    assert probes == ()
    assert [span.name for span in exporter.get_finished_spans()] == ["grpc.health.v1.Health/Check"]


async def test_a_unary_call_is_one_server_span_under_the_span_of_its_caller(
    exporter: InMemorySpanExporter,
) -> None:
    """S4: a span per unary call, none per stream, which may live for days."""
    behaviors = {"unary_unary": answer_traceparent, "unary_stream": answer_traceparent_twice}

    async with serving(behaviors) as echo:
        with trace.use_span(NonRecordingSpan(CALLER)):
            await echo.unary()
            await echo.call("unary_stream", [b""])

    (span,) = exporter.get_finished_spans()
    assert span.name == f"{SERVICE}/unary_unary"
    assert span.kind is SpanKind.SERVER
    assert span.parent is not None
    assert (span.parent.trace_id, span.parent.span_id) == (CALLER.trace_id, CALLER.span_id)
