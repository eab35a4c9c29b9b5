"""Errors over real sockets: whatever a handler raises reaches the caller with its reason."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthServicer
from grpc_status import rpc_status

from tests.support.echo_service import HANDLER_OF_KIND, SERVICE, serving, unary_method
from tidemark import errors
from tidemark.errors import TidemarkError
from tidemark.limits import GRPC_RECEIVE_BYTES_MAX
from tidemark.local.ports import free_address
from tidemark.rpc import from_rpc_error, open_channel, revive

KINDS = tuple(HANDLER_OF_KIND)

Handler = Callable[[Any, Any], Any]


def failing_at_once(kind: str, error: Exception) -> Handler:
    """A handler of the kind that raises before it reads or answers anything."""

    async def answer(request: Any, context: Any) -> bytes:
        raise error

    async def answers(request: Any, context: Any) -> AsyncIterator[bytes]:
        yield await answer(request, context)

    return answers if kind.endswith("_stream") else answer


async def error_of(call: Callable[[], Awaitable[object]]) -> TidemarkError:
    """The error of the server, with which the call fails.

    gRPC may lose the status of a stream that ends before it has begun. Such a call has failed as on
    a broken connection, and is repeated.
    """
    while True:
        with pytest.raises(TidemarkError) as caught:
            await call()
        if not isinstance(caught.value, errors.Unavailable):
            return caught.value


@pytest.mark.parametrize("error", errors.ALL, ids=lambda error: error.reason)
async def test_every_error_arrives_as_itself_with_its_metadata_and_retry(
    error: type[TidemarkError],
) -> None:
    """S3: bad input gets a machine-readable reason."""
    raised = error("héllo, wörld", retry_after_ms=1_234, owner="broker-1:7400", lmq_name="t/ü")

    async with serving({"unary_unary": failing_at_once("unary_unary", raised)}) as echo:
        with pytest.raises(error) as caught:
            await echo.unary()

    assert type(caught.value) is error
    assert caught.value.detail == "héllo, wörld"
    assert caught.value.metadata == {"owner": "broker-1:7400", "lmq_name": "t/ü"}
    assert caught.value.retry_after_ms == 1_234


@pytest.mark.parametrize("kind", KINDS)
async def test_an_error_before_the_first_answer_has_its_reason(kind: str) -> None:
    raised = errors.NotOwner("elsewhere", owner="broker-2:7400")

    async with serving({kind: failing_at_once(kind, raised)}) as echo:
        caught = await error_of(partial(echo.call, kind, [b"request"]))

    assert type(caught) is errors.NotOwner
    assert caught.metadata == {"owner": "broker-2:7400"}


async def test_an_error_in_the_middle_of_a_response_stream_follows_what_was_sent() -> None:
    async def answers(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"one"
        yield b"two"
        raise errors.Fenced("a newer owner took over", epoch="8")

    async with serving({"unary_stream": answers}) as echo:
        responses = aiter(echo.method("unary_stream")(b"go"))
        received = [await anext(responses), await anext(responses)]
        with pytest.raises(errors.Fenced) as caught:
            await anext(responses)

    assert received == [b"one", b"two"]
    assert caught.value.metadata == {"epoch": "8"}


async def test_an_error_in_the_middle_of_a_request_stream_ends_the_call() -> None:
    async def answer(requests: AsyncIterator[bytes], context: Any) -> bytes:
        async for request in requests:
            if request == b"bad":
                raise errors.InvalidArgument("refused", field="request")
        return b"all good"

    async with serving({"stream_unary": answer}) as echo:
        accepted = await echo.call("stream_unary", [b"good", b"good"])
        with pytest.raises(errors.InvalidArgument) as caught:
            await echo.call("stream_unary", [b"good", b"bad", b"good"])

    assert accepted == [b"all good"]
    assert caught.value.metadata == {"field": "request"}


async def echo_until_bad(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        if request == b"bad":
            raise errors.QueueFull("no room", retry_after_ms=50)
        yield request


async def echo_until_bad_by_hand(_: Any, context: Any) -> None:
    while (request := await context.read()) is not grpc.aio.EOF:
        if request == b"bad":
            raise errors.QueueFull("no room", retry_after_ms=50)
        await context.write(request)


@pytest.mark.parametrize("handler", [echo_until_bad, echo_until_bad_by_hand])
async def test_an_error_in_the_middle_of_a_two_way_stream_reaches_its_reader(
    handler: Handler,
) -> None:
    async with serving({"stream_stream": handler}) as echo:
        stream = echo.method("stream_stream")()
        await stream.write(b"good")
        first = await stream.read()
        await stream.write(b"bad")
        with pytest.raises(errors.QueueFull) as caught:
            await stream.read()

    assert first == b"good"
    assert caught.value.retry_after_ms == 50


async def test_writing_to_a_stream_that_failed_tells_why_it_failed() -> None:
    async with serving({"stream_stream": echo_until_bad}) as echo:
        stream = echo.method("stream_stream")()
        await stream.write(b"bad")
        assert await stream.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

        with pytest.raises(errors.QueueFull) as caught:
            await stream.write(b"more")

    assert caught.value.detail == "no room"


async def test_writing_to_a_stream_that_the_server_ended_is_unavailable() -> None:
    async def hang_up(requests: Any, context: Any) -> AsyncIterator[bytes]:
        yield b"bye"

    async with serving({"stream_stream": hang_up}) as echo:
        stream = echo.method("stream_stream")()
        assert [response async for response in stream] == [b"bye"]

        with pytest.raises(errors.Unavailable):
            await stream.write(b"hello?")


async def test_writing_after_done_writing_stays_a_mistake_of_the_program() -> None:
    reading = asyncio.Event()

    async def wait(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        await reading.wait()
        yield b""

    async with serving({"stream_stream": wait}) as echo:
        stream = echo.method("stream_stream")()
        await stream.done_writing()

        with pytest.raises(asyncio.InvalidStateError):
            await stream.write(b"more")


@pytest.mark.parametrize("kind", KINDS)
async def test_an_unforeseen_exception_is_logged_and_tells_the_caller_nothing(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    raised = ValueError("the password is hunter2")

    async with serving({kind: failing_at_once(kind, raised)}) as echo:
        with pytest.raises(errors.Internal) as caught:
            await echo.call(kind, [b"request"])

    assert "hunter2" not in str(caught.value)
    assert caught.value.metadata == {"rpc": f"/{SERVICE}/{kind}"}
    (record,) = [each for each in caplog.records if each.name == "tidemark.rpc.interceptors"]
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert record.exc_info[1] is raised


async def test_a_response_that_cannot_be_serialized_is_an_internal_error() -> None:
    async def answer(request: bytes, context: Any) -> None:
        return None

    async def answers(request: bytes, context: Any) -> AsyncIterator[None]:
        yield None

    behaviors = {"unary_unary": answer, "unary_stream": answers}
    async with serving(behaviors, serializer=HealthCheckRequest.SerializeToString) as echo:
        for kind in behaviors:
            with pytest.raises(errors.Internal):
                await echo.call(kind, [b"request"])


async def test_a_handler_cleans_up_at_once_when_its_stream_fails() -> None:
    cleaned_up = asyncio.Event()

    async def answers(request: bytes, context: Any) -> AsyncIterator[Any]:
        try:
            yield None
        finally:
            cleaned_up.set()

    async with serving(
        {"unary_stream": answers}, serializer=HealthCheckRequest.SerializeToString
    ) as echo:
        with pytest.raises(errors.Internal):
            await echo.call("unary_stream", [b"request"])

        assert cleaned_up.is_set()


async def test_a_cancellation_that_leaks_from_inside_a_handler_is_still_answered() -> None:
    async def answer(request: bytes, context: Any) -> bytes:
        abandoned: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        abandoned.cancel()
        return await abandoned

    async with serving({"unary_unary": answer}) as echo:
        with pytest.raises(errors.Internal):
            await echo.unary(timeout=30)


async def test_a_caller_that_gives_up_cancels_the_handler_without_a_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def answer(request: bytes, context: Any) -> bytes:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return b"never"

    async with serving({"unary_unary": answer}) as echo:
        call = asyncio.create_task(echo.unary())
        await started.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await cancelled.wait()

    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []


async def test_a_malformed_request_is_refused_with_a_reason_on_every_kind_of_call() -> None:
    """S3: bad input gets a machine-readable reason."""

    async def read_all(requests: Any) -> None:
        async for _ in requests:
            pass

    async def unary(request: Any, context: Any) -> bytes:
        return b"parsed"

    async def unary_stream(request: Any, context: Any) -> AsyncIterator[bytes]:
        yield b"parsed"

    async def stream_unary(requests: Any, context: Any) -> bytes:
        await read_all(requests)
        return b"parsed"

    async def stream_stream(requests: Any, context: Any) -> AsyncIterator[bytes]:
        await read_all(requests)
        yield b"parsed"

    behaviors = {
        "unary_unary": unary,
        "unary_stream": unary_stream,
        "stream_unary": stream_unary,
        "stream_stream": stream_stream,
    }
    async with serving(behaviors, deserializer=HealthCheckRequest.FromString) as echo:
        for kind in KINDS:
            assert await echo.call(kind, [b""]) == [b"parsed"]
            with pytest.raises(errors.InvalidArgument) as caught:
                await echo.call(kind, [b"\xff\xff\xff"])
            assert caught.value.metadata == {"rpc": f"/{SERVICE}/{kind}"}


async def test_a_generated_method_without_code_is_unimplemented_by_name() -> None:
    generated = HealthServicer()
    behaviors = {"unary_unary": generated.Check, "unary_stream": getattr(generated, "Watch")}  # noqa: B009

    async with serving(behaviors) as echo:
        for kind in behaviors:
            with pytest.raises(errors.Unimplemented) as caught:
                await echo.call(kind, [b""])
            assert caught.value.metadata == {"rpc": f"/{SERVICE}/{kind}"}


async def test_not_implemented_inside_a_written_handler_is_a_fault_of_the_service() -> None:
    raised = NotImplementedError("an abstract method was called")

    async with serving({"unary_unary": failing_at_once("unary_unary", raised)}) as echo:
        with pytest.raises(errors.Internal):
            await echo.unary()


async def test_a_method_that_does_not_exist_gets_the_answer_of_grpc() -> None:
    async with serving({}) as echo:
        with pytest.raises(errors.Unimplemented) as caught:
            await unary_method(echo.channel, "/test.Nowhere/Method")(b"")

    assert caught.value.metadata == {}


async def test_a_plain_client_reads_code_text_and_standard_details() -> None:
    raised = errors.DiskFull("past the watermark", retry_after_ms=2_500, partition="3")

    async with (
        serving({"unary_unary": failing_at_once("unary_unary", raised)}) as echo,
        grpc.aio.insecure_channel(echo.server.address) as plain,
    ):
        call = unary_method(plain)(b"")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        status = await rpc_status.aio.from_call(call)

    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.details() == "past the watermark"
    info, retry = ErrorInfo(), RetryInfo()
    assert status is not None
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(retry)
    assert (info.reason, info.domain, dict(info.metadata)) == (
        "DISK_FULL",
        "tidemark",
        {"partition": "3"},
    )
    assert retry.retry_delay.ToMilliseconds() == 2_500


async def test_an_endless_text_still_reaches_a_plain_client_with_its_reason() -> None:
    raised = errors.InvalidName("名" * 50_000, name="名" * 50_000, topic="名" * 50_000)

    async with (
        serving({"unary_unary": failing_at_once("unary_unary", raised)}) as echo,
        grpc.aio.insecure_channel(echo.server.address) as plain,
    ):
        with pytest.raises(errors.InvalidName):
            await revive(unary_method(plain)(b""))


async def answer_length(request: bytes, context: Any) -> bytes:
    return str(len(request)).encode()


async def test_a_frame_at_the_size_limit_passes_and_one_past_it_is_too_large() -> None:
    """S3: every limit is tested at the limit and one past it."""
    at_limit = bytes(GRPC_RECEIVE_BYTES_MAX)

    async with serving({"unary_unary": answer_length}) as echo:
        assert await echo.unary(at_limit) == str(len(at_limit)).encode()
        with pytest.raises(errors.BatchTooLarge):
            await echo.unary(at_limit + b"x")
        assert await echo.unary(b"still there") == b"11"


async def test_the_server_refuses_an_oversize_frame_of_a_client_without_a_limit() -> None:
    """S3: every limit is tested at the limit and one past it."""
    past_limit = bytes(GRPC_RECEIVE_BYTES_MAX + 1)

    async with (
        serving({"unary_unary": answer_length}) as echo,
        grpc.aio.insecure_channel(
            echo.server.address, options=[("grpc.max_send_message_length", -1)]
        ) as unlimited,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await unary_method(unlimited)(past_limit)

    assert type(from_rpc_error(caught.value)) is errors.BatchTooLarge


async def test_an_answer_that_is_too_large_is_an_error_and_not_a_broken_link() -> None:
    async def answer(request: bytes, context: Any) -> bytes:
        return bytes(GRPC_RECEIVE_BYTES_MAX + 1)

    async with serving({"unary_unary": answer}) as echo:
        with pytest.raises(errors.BatchTooLarge):
            await echo.unary()


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    """I2: a broken link is UNAVAILABLE."""
    async with open_channel(free_address()) as channel:
        with pytest.raises(errors.Unavailable) as caught:
            await unary_method(channel)(b"")

    assert caught.value.retry_after_ms == errors.Unavailable.retry_after_ms


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_that_goes_away_under_a_call_is_unavailable(kind: str) -> None:
    """I2: a broken link is UNAVAILABLE."""
    started = asyncio.Event()

    async def answer(request: Any, context: Any) -> bytes:
        started.set()
        await asyncio.Event().wait()
        return b"never"

    async def answers(request: Any, context: Any) -> AsyncIterator[bytes]:
        started.set()
        await asyncio.Event().wait()
        yield b"never"

    handler = answers if kind.endswith("_stream") else answer
    async with serving({kind: handler}) as echo:
        call = asyncio.create_task(echo.call(kind, [b"request"]))
        await started.wait()
        await echo.server.stop(0)

        with pytest.raises(errors.Unavailable):
            await call
