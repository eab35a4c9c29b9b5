"""A TCP proxy in front of a gRPC server, whose connections end as soon as they begin.

The client gets the settings of HTTP/2, which make its connection ready, together with a GOAWAY,
which ends it. So does a client that stood still while a server accepted its connection and gave it
up again, because no ping was answered.
"""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from tidemark.local.ports import join_address

HOST = "127.0.0.1"
_SETTINGS = 4
_GOAWAY = 7
_ENHANCE_YOUR_CALM = 11


def _frame(kind: int, payload: bytes = b"") -> bytes:
    """A frame of HTTP/2 that belongs to no stream."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, 0, 0) + payload


_ENDED_AT_ONCE = _frame(_SETTINGS) + _frame(
    _GOAWAY, struct.pack(">II", 0, _ENHANCE_YOUR_CALM) + b"ping_timeout"
)


class EndingConnections:
    """The proxy: until `mend`, no connection survives its first bytes."""

    def __init__(self, upstream: str) -> None:
        self.address = ""
        self.ended = 0
        """Connections that were ended as they began."""
        self._upstream = upstream
        self._mended = False
        self._open: set[asyncio.StreamWriter] = set()

    def mend(self) -> None:
        """Further connections reach the server."""
        self._mended = True
        for writer in list(self._open):
            writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection; the proxy leaves it open after its end, as a server that stands still."""
        self._open.add(writer)
        try:
            if self._mended:
                await self._pass_on(reader, writer)
            else:
                self.ended += 1
                writer.write(_ENDED_AT_ONCE)
                await reader.read()
        except OSError:
            pass  # the other side has closed it
        finally:
            self._open.discard(writer)
            writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._upstream.rpartition(":")
        server_reader, server_writer = await asyncio.open_connection(host, int(port))
        try:
            await asyncio.gather(_copy(reader, server_writer), _copy(server_reader, writer))
        finally:
            server_writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def ending_connections(upstream: str) -> AsyncIterator[EndingConnections]:
    """A proxy that listens, in front of the server at `upstream`."""
    proxy = EndingConnections(upstream)
    server = await asyncio.start_server(proxy.serve, HOST, 0)
    proxy.address = join_address(HOST, server.sockets[0].getsockname()[1])
    try:
        yield proxy
    finally:
        server.close()
        proxy.mend()
        await server.wait_closed()
