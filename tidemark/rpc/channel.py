"""Channels to Tidemark servers: options, trace context, and statuses raised as exceptions.

Every stub over `open_channel` raises `TidemarkError`s from all four kinds of calls. The channel is
wrapped instead of using gRPC's client interceptors, which cost a task per unary call, and two tasks
and a queue per frame written to a stream. Calls are never repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator
from typing import Any, Final, Self, TypeVar, cast

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from tidemark.clock import Clock, SystemClock
from tidemark.errors import DeadlineExceeded, TidemarkError, Unavailable
from tidemark.limits import GRPC_RECEIVE_BYTES_MAX
from tidemark.rpc.keepalive import KEEPALIVE
from tidemark.rpc.statuses import from_rpc_error, from_trailers
from tidemark.telemetry.traces import inject

OPTIONS: Final = (
    ("grpc.max_receive_message_length", GRPC_RECEIVE_BYTES_MAX),
    ("grpc.max_send_message_length", GRPC_RECEIVE_BYTES_MAX),
    *KEEPALIVE,
    # gRPC repeats calls that never left the process, at once and without a limit: on a connection
    # that ended as soon as it was ready, this never stops, and takes memory (ADR 39).
    ("grpc.enable_retries", 0),
    # gRPC waits up to two minutes between attempts to reconnect; a restart takes seconds.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # gRPC asks for the address of a name at most every half minute; a pod that was replaced has
    # another address at once.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # Channels to one address share neither connection nor backoff.
    ("grpc.use_local_subchannel_pool", 1),
    # Only settings/ reads the environment, and there is no HTTP proxy between services.
    ("grpc.enable_http_proxy", 0),
)

_WATCH_AGAIN_AFTER_MS: Final = 50
_STATUS_AFTER_MS: Final = 1_000
_SYSTEM_CLOCK: Final = SystemClock()

T = TypeVar("T")


def open_channel(
    address: str, *, credentials: grpc.ChannelCredentials | None = None
) -> grpc.aio.Channel:
    """A channel to `host:port`; plain text without credentials. It connects on first use."""
    if credentials is None:
        return _Channel(grpc.aio.insecure_channel(address, options=OPTIONS))
    return _Channel(grpc.aio.secure_channel(address, credentials, options=OPTIONS))


async def wait_until_serving(
    channel: grpc.aio.Channel, service: str, timeout_ms: int, clock: Clock = _SYSTEM_CLOCK
) -> None:
    """Return once the service reports SERVING; raise Unavailable after the timeout.

    `service` is a full name such as `tidemark.api.broker.v1.BrokerService`, or empty for the whole
    server. The server need not be running yet.
    """
    try:
        await clock.wait_for(_watch_until_serving(channel, service, clock), timeout_ms)
    except TimeoutError:
        what = service or "the server"
        raise Unavailable(f"{what} was not serving within {timeout_ms} ms") from None


async def _watch_until_serving(channel: grpc.aio.Channel, service: str, clock: Clock) -> None:
    health: Any = HealthStub(channel)  # its published types lack Watch
    request = HealthCheckRequest(service=service)
    while True:
        try:
            async for answer in revive(health.Watch(request, wait_for_ready=True)):
                if answer.status == HealthCheckResponse.SERVING:
                    return
        except Unavailable:
            pass
        await clock.sleep_ms(_WATCH_AGAIN_AFTER_MS)


def revive(call: T) -> T:
    """The same call, raising TidemarkErrors. Calls over `open_channel` already do."""
    return call if isinstance(call, _RevivedCall) else cast("T", _RevivedCall(call))


class _RevivedCall:
    """A call of any kind; everything else is delegated to gRPC's call object."""

    __slots__ = ("_call",)

    def __init__(self, call: Any) -> None:
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            return (yield from self._call.__await__())
        except grpc.aio.AioRpcError as error:
            raise self._revived(error) from None

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            async for response in self._call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise self._revived(error) from None

    async def read(self) -> Any:
        try:
            return await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._revived(error) from None

    async def write(self, request: Any) -> None:
        try:
            await self._call.write(request)
        except grpc.aio.AioRpcError as error:
            # A write at the end of the stream fails before the status has arrived.
            ends = await self._end_within(_STATUS_AFTER_MS)
            raise (ends or self._revived(error)) from None
        except asyncio.InvalidStateError:
            if not self._call.done():
                raise  # written after done_writing(): a bug in the caller
            raise await self._end() from None

    def _revived(self, error: grpc.aio.AioRpcError) -> TidemarkError:
        revived = from_rpc_error(error)
        # Without its retries (ADR 39), gRPC reports a deadline that passed at this end in this way.
        if isinstance(revived, Unavailable) and self._call.time_remaining() == 0:
            return DeadlineExceeded("the deadline of the call has passed")
        return revived

    async def _end_within(self, timeout_ms: int) -> TidemarkError | None:
        try:
            return await _SYSTEM_CLOCK.wait_for(self._end(), timeout_ms)
        except TimeoutError:
            return None

    async def _end(self) -> TidemarkError:
        """Why the call ended; gRPC only reports that it did."""
        code = await self._call.code()
        if code is grpc.StatusCode.OK:
            return Unavailable("the server ended the stream")
        return from_trailers(
            code, await self._call.details() or "", await self._call.trailing_metadata() or ()
        )


class _Method:
    """One method of a stub, whatever its kind."""

    __slots__ = ("_method",)

    def __init__(self, method: Any) -> None:
        self._method = method

    def __call__(self, *args: Any, metadata: Any = None, **options: Any) -> Any:
        return _RevivedCall(self._method(*args, metadata=inject(metadata or ()), **options))


class _Channel(grpc.aio.Channel):
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        return _Method(self._channel.unary_unary(*args, **options))

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return _Method(self._channel.unary_stream(*args, **options))

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        return _Method(self._channel.stream_unary(*args, **options))

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return _Method(self._channel.stream_stream(*args, **options))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()
