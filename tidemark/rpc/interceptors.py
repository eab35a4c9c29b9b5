"""Wrapping of every handler on a Tidemark server: errors, tracing, the default deadline.

A handler is wrapped once, when it is registered. gRPC's interceptors run a chain of coroutines per
call and do not see the iteration of a stream. An error that a handler raises, also in the middle of
a stream, ends the call with a status that carries its reason; an unexpected exception is logged and
answered as INTERNAL without its text.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias

import grpc
from opentelemetry.context import attach
from opentelemetry.trace import SpanKind

from tidemark.errors import Internal, InvalidArgument, TidemarkError, Unimplemented
from tidemark.rpc.deadline import DefaultDeadline, has_deadline
from tidemark.rpc.statuses import to_status, to_trailers
from tidemark.telemetry.traces import extract, span, tracer

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_log = logging.getLogger(__name__)
_tracer = tracer(__name__)

_FAILURES = (Exception, asyncio.CancelledError)

_BEGIN_NO_TRACE: Final = (
    "grpc.",
    "tidemark.api.storage.",
    "tidemark.api.lifecycle.",
    "tidemark.api.broker.v1.BrokerService/Heartbeat",
)
"""Probes, heartbeats, and calls between the services of a cluster: part of a trace only where the
caller has one, or an idle cluster would trace itself (O3)."""


class CallsInProgress:
    """Counts running handlers, so that a stop can wait until the last one has cleaned up."""

    __slots__ = ("_count", "_idle")

    def __init__(self) -> None:
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return self._count

    def __enter__(self) -> None:
        self._count += 1
        self._idle.clear()

    def __exit__(self, *exc_info: object) -> None:
        self._count -= 1
        if not self._count:
            self._idle.set()

    async def ended(self) -> None:
        """Return once no handler is running."""
        await self._idle.wait()


@dataclass(frozen=True, slots=True)
class Interception:
    """State shared by all handlers of one server."""

    calls: CallsInProgress
    deadline: DefaultDeadline | None

    def wrap(self, method: str, handler: Handler) -> Handler:
        """Wrap the handler of `/package.Service/Method`."""
        call = _Call(self, method, handler)
        if handler.request_streaming and handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                call.stream_stream, call.parse, handler.response_serializer
            )
        if handler.request_streaming:
            return grpc.stream_unary_rpc_method_handler(call.stream_unary, call.parse)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                call.unary_stream, None, handler.response_serializer
            )
        return grpc.unary_unary_rpc_method_handler(call.unary_unary)


class _Call:
    """One RPC method, with an entry point for each of the four kinds of calls.

    Single requests are parsed and single responses serialized here rather than by gRPC, so that a
    malformed request gets a reason and an invalid response is logged like any other failure.
    """

    __slots__ = (
        "_attributes",
        "_begins_trace",
        "_behavior",
        "_deserializer",
        "_method",
        "_name",
        "_serializer",
        "_shared",
    )

    def __init__(self, shared: Interception, method: str, handler: Handler) -> None:
        self._shared = shared
        self._method = method
        self._name = method.removeprefix("/")
        service, _, name = self._name.partition("/")
        self._attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}
        self._begins_trace = not self._name.startswith(_BEGIN_NO_TRACE)
        self._behavior: Any = (
            handler.unary_unary
            or handler.unary_stream
            or handler.stream_unary
            or handler.stream_stream
        )
        self._deserializer: Any = handler.request_deserializer
        self._serializer: Any = handler.response_serializer

    async def unary_unary(self, raw: bytes, context: Context) -> Any:
        shared = self._shared
        with shared.calls:
            try:
                request = self.parse(raw)
                with self._span(context):
                    answer = self._invoke(request, context)
                    if shared.deadline is None or has_deadline(context):
                        response = await answer
                    else:
                        response = await shared.deadline.enforce(answer)
                return self._serialize(response)
            except _FAILURES as error:
                await self._end(context, error)

    async def stream_unary(self, requests: Any, context: Context) -> Any:
        with self._shared.calls:
            try:
                self._join_trace(context)
                return self._serialize(await self._invoke(requests, context))
            except _FAILURES as error:
                await self._end(context, error)

    async def unary_stream(self, raw: bytes, context: Context) -> None:
        with self._shared.calls:
            try:
                await self._stream(self.parse(raw), context)
            except _FAILURES as error:
                await self._end(context, error)

    async def stream_stream(self, requests: Any, context: Context) -> None:
        with self._shared.calls:
            try:
                await self._stream(requests, context)
            except _FAILURES as error:
                await self._end(context, error)

    def parse(self, raw: bytes) -> Any:
        """Parse one request. gRPC calls this for each request of a stream."""
        if self._deserializer is None:
            return raw
        try:
            return self._deserializer(raw)
        except Exception:
            raise InvalidArgument("the request cannot be parsed", rpc=self._method) from None

    async def _stream(self, request: Any, context: Context) -> None:
        self._join_trace(context)
        responses = self._invoke(request, context)
        if not hasattr(responses, "__aiter__"):
            await responses  # a coroutine that reads and writes through the context
            return
        # When a write fails, closing makes the handler clean up now, in its own task.
        async with aclosing(responses):
            async for response in responses:
                await context.write(response)

    def _invoke(self, request: Any, context: Context) -> Any:
        """The coroutine or async generator of the handler, not started yet."""
        try:
            return self._behavior(request, context)
        except NotImplementedError:
            # Handlers are coroutines or generators. Only methods of a generated base class are
            # plain functions, which raise here.
            raise Unimplemented(f"{self._method} is not implemented", rpc=self._method) from None

    def _span(self, context: Context) -> AbstractContextManager[object]:
        """Around one call, below the caller's span or the first of a trace."""
        trace = extract(context.invocation_metadata())
        if not trace and not self._begins_trace:
            return nullcontext()
        return span(
            _tracer,
            self._name,
            context=trace or None,
            kind=SpanKind.SERVER,
            attributes=self._attributes,
        )

    def _join_trace(self, context: Context) -> None:
        """Make the caller's trace current. A stream may live for days, so it has no span itself;
        work done on it does. The call has its own task, so there is nothing to restore."""
        if trace := extract(context.invocation_metadata()):
            attach(trace)

    def _serialize(self, response: Any) -> Any:
        return response if self._serializer is None else self._serializer(response)

    async def _end(self, context: Context, error: BaseException) -> NoReturn:
        """End the call with the status of the error."""
        if isinstance(error, grpc.aio.BaseError) or _is_cancellation(error):
            raise error  # gRPC handles these itself
        if not isinstance(error, TidemarkError):
            _log.error("%s failed", self._method, exc_info=error)
            error = Internal("unexpected failure; see the log of the service", rpc=self._method)
        status = to_status(error)
        await context.abort(error.code, status.message, to_trailers(status))


def _is_cancellation(error: BaseException) -> bool:
    """Whether the call itself is being cancelled.

    A CancelledError can also leak from something that the handler awaited. gRPC would then end the
    call without a response, and the caller would wait indefinitely.
    """
    if not isinstance(error, asyncio.CancelledError):
        return False
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
