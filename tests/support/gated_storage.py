"""A storage service behind gates: a real gRPC proxy that holds frames back until a test lets go.

Everything passes unchanged and in its order. Frames of an exchange wait at the gate of their
partition while it is closed, in either direction; and a link can be broken in the middle.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc

from tidemark.api.storage.v1.exchange_pb2 import ExchangeRequest
from tidemark.limits import GRPC_RECEIVE_BYTES_MAX

_EXCHANGE: Final = "/tidemark.api.storage.v1.StorageService/Exchange"
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", GRPC_RECEIVE_BYTES_MAX),
    ("grpc.max_send_message_length", GRPC_RECEIVE_BYTES_MAX),
)


class Gate:
    """Frames that go one way. Open until it is closed."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._waiting = False
        self._changed = asyncio.Event()

    def close(self) -> None:
        self._open.clear()

    def let_go(self) -> None:
        self._open.set()

    async def until_held(self) -> None:
        """Return once a frame waits here."""
        while not self._waiting:
            self._changed.clear()
            await self._changed.wait()

    async def passed(self) -> None:
        if not self._open.is_set():
            self._waiting = True
            self._changed.set()
            try:
                await self._open.wait()
            finally:
                self._waiting = False


class GatedLink:
    """The way between a broker and one partition."""

    def __init__(self) -> None:
        self.requests = Gate()
        self.answers = Gate()
        self._forwarding: asyncio.Task[None] | None = None

    def carry(self, forwarding: asyncio.Task[None]) -> None:
        self._forwarding = forwarding

    async def break_now(self) -> None:
        """End the exchange; what is held at the gates is lost. The gates stay as they are."""
        assert self._forwarding is not None, "there is no exchange to break"
        self._forwarding.cancel()
        await asyncio.wait({self._forwarding})


class _Proxy(grpc.GenericRpcHandler):
    """Takes every call for a stream of bytes: that is what all kinds of calls look like inside."""

    def __init__(self, upstream: Any, links: dict[int, GatedLink]) -> None:
        self._upstream = upstream
        self._links = links

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        path = handler_call_details.method

        async def forward(requests: AsyncIterator[bytes], context: Any) -> None:
            link = GatedLink()
            if path == _EXCHANGE:
                first = await anext(requests)
                link = self._links[ExchangeRequest.FromString(first).bind.partition]
                requests = _after(first, requests)
            carrying = asyncio.create_task(self._carry(path, requests, context, link))
            link.carry(carrying)
            try:
                await asyncio.wait({carrying})
            finally:
                carrying.cancel()
            if carrying.cancelled():
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the link was broken")
            error = carrying.exception()
            if isinstance(error, grpc.aio.AioRpcError):
                context.set_trailing_metadata(tuple(error.trailing_metadata()))
                await context.abort(error.code(), error.details())
            carrying.result()

        return grpc.stream_stream_rpc_method_handler(forward)

    async def _carry(
        self, path: str, requests: AsyncIterator[bytes], context: Any, link: GatedLink
    ) -> None:
        call = self._upstream.stream_stream(path)(
            _through(link.requests, requests), metadata=context.invocation_metadata()
        )
        try:
            async for answer in _through(link.answers, call):
                await context.write(answer)
        finally:
            call.cancel()


async def _after(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for frame in rest:
        yield frame


async def _through(gate: Gate, frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for frame in frames:
        await gate.passed()
        yield frame


class GatedStorage:
    """Where brokers connect to, and the gates of each partition."""

    def __init__(self, address: str, links: dict[int, GatedLink]) -> None:
        self.address = address
        self.links = links


@asynccontextmanager
async def gated_storage(upstream_address: str, partitions: int) -> AsyncIterator[GatedStorage]:
    """A proxy in front of a storage service, until the block ends."""
    links = {number: GatedLink() for number in range(partitions)}
    async with grpc.aio.insecure_channel(upstream_address, options=_OPTIONS) as upstream:
        server = grpc.aio.server(handlers=(_Proxy(upstream, links),), options=_OPTIONS)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield GatedStorage(f"127.0.0.1:{port}", links)
        finally:
            await server.stop(None)
