"""The servers of the `rpc` benchmark: `python -m bench.rpc.server LISTEN [NEXT]`.

Without NEXT it echoes; with NEXT it forwards everything to that server. It uses Tidemark's server
and channel, so that their overhead is part of the measurement.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc

from tidemark.rpc import RpcServer, open_channel
from tidemark.service.signals import run_until_stopped

SERVICE: Final = "tidemark.bench.Echo"
UNARY: Final = f"/{SERVICE}/Unary"
STREAM: Final = f"/{SERVICE}/Stream"

Context = grpc.aio.ServicerContext[bytes, bytes]


class Echo:
    async def unary(self, request: bytes, context: Context) -> bytes:
        return request

    async def stream(self, frames: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        async for frame in frames:
            yield frame


class Forwarder:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._unary: Any = channel.unary_unary(UNARY)
        self._stream: Any = channel.stream_stream(STREAM)

    async def unary(self, request: bytes, context: Context) -> bytes:
        response: bytes = await self._unary(request)
        return response

    async def stream(self, frames: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        onward = self._stream()
        async for frame in frames:
            await onward.write(frame)
            yield await onward.read()
        await onward.done_writing()


async def serve(listen: str, behavior: Echo | Forwarder) -> None:
    server = RpcServer(listen)
    handlers: dict[str, Any] = {
        "Unary": grpc.unary_unary_rpc_method_handler(behavior.unary),
        "Stream": grpc.stream_stream_rpc_method_handler(behavior.stream),
    }
    server.add_service(SERVICE, handlers)
    await server.start()
    await run_until_stopped(server, grace_ms=1000)


async def main(listen: str, next_address: str | None = None) -> None:
    if next_address is None:
        await serve(listen, Echo())
        return
    async with open_channel(next_address) as channel:
        await serve(listen, Forwarder(channel))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
