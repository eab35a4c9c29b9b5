"""A service without protos: one method per kind of call, whose behaviour each test supplies."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from tidemark.clock import Clock
from tidemark.rpc import RpcServer, open_channel

SERVICE = "test.Echo"

HANDLER_OF_KIND: Mapping[str, Callable[..., Any]] = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}


def unary_method(channel: grpc.aio.Channel, path: str = f"/{SERVICE}/unary_unary") -> Any:
    """A unary method that sends and receives bytes."""
    untyped: Any = channel
    return untyped.unary_unary(path)


@dataclass(frozen=True)
class Echo:
    """A running server and its client. Methods are named after their kind of call."""

    server: RpcServer
    channel: grpc.aio.Channel

    def method(self, kind: str) -> Any:
        return getattr(self.channel, kind)(f"/{SERVICE}/{kind}")

    async def unary(self, request: bytes = b"", **options: Any) -> bytes:
        response: bytes = await self.method("unary_unary")(request, **options)
        return response

    async def call(self, kind: str, requests: list[bytes]) -> list[bytes]:
        """Make one call of any kind to its end."""
        method = self.method(kind)
        if kind == "unary_unary":
            return [await method(requests[0])]
        if kind == "unary_stream":
            return [response async for response in method(requests[0])]
        if kind == "stream_unary":
            return [await method(_each(requests))]
        return [response async for response in method(_each(requests))]


async def _each(requests: list[bytes]) -> AsyncIterator[bytes]:
    for request in requests:
        yield request


@asynccontextmanager
async def serving(
    behaviors: Mapping[str, Any],
    *,
    clock: Clock | None = None,
    unary_deadline_ms: int | None = 60_000,
    deserializer: Callable[[bytes], Any] | None = None,
    serializer: Callable[[Any], bytes] | None = None,
    address: str = "127.0.0.1:0",
) -> AsyncIterator[Echo]:
    """A real server on a free port, with a behaviour for each kind of call that is needed.

    A test that uses its address after the end passes one that is free all the while.
    """
    server = RpcServer(address, clock=clock, unary_deadline_ms=unary_deadline_ms)
    server.add_service(
        SERVICE,
        {
            kind: HANDLER_OF_KIND[kind](behavior, deserializer, serializer)
            for kind, behavior in behaviors.items()
        },
    )
    await server.start()
    try:
        async with open_channel(server.address) as channel:
            yield Echo(server, channel)
    finally:
        await server.stop(0)
