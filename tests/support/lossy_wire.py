"""A wire to a server that loses answers, and holds requests back until their sender is gone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

_CHUNK: Final = 1 << 20


class LossyWire:
    """Passes everything on, except where a test sets a fault for one request."""

    def __init__(self, port: int) -> None:
        self.url = ""
        self.lost = asyncio.Event()
        """Set once the answer is lost."""
        self.held = asyncio.Event()
        """Set once the request is held back."""
        self.arrived = asyncio.Event()
        """Set once the server has answered the request that was held back."""
        self._port = port
        self._lose = b""
        self._hold = b""
        self._released = asyncio.Event()
        self._connections: dict[asyncio.StreamWriter, asyncio.Event] = {}
        """Each with what is set once it has ended."""

    def lose_answer(self, request: bytes) -> None:
        """Cut the connection instead of answering the next request that contains these bytes."""
        self._lose = request
        self.lost.clear()

    def hold_request(self, request: bytes) -> None:
        """Keep the next such request until `release`, whatever becomes of its connection."""
        self._hold = request

    def release(self) -> None:
        self._released.set()

    async def serve(self, sender: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        ended = self._connections[answers] = asyncio.Event()
        with suppress(OSError):  # either side is gone
            await self._serve(sender, answers)
        answers.close()
        ended.set()

    async def close(self) -> None:
        """End all connections."""
        self.release()
        for answers, ended in self._connections.items():
            answers.close()
            await ended.wait()

    async def _serve(self, sender: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._port)
        answering = asyncio.create_task(_pass_on(from_server, answers))
        try:
            while request := await sender.read(_CHUNK):
                if self._lose and self._lose in request:
                    self._lose = b""
                    await _stop(answering)
                    to_server.write(request)
                    await from_server.read(_CHUNK)
                    self.lost.set()
                    return
                if self._hold and self._hold in request:
                    self._hold = b""
                    await _stop(answering)
                    self.held.set()
                    await self._released.wait()
                    to_server.write(request)
                    await from_server.read(_CHUNK)
                    self.arrived.set()
                    return
                to_server.write(request)
        finally:
            await _stop(answering)
            to_server.close()


async def _pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(_CHUNK):
            target.write(data)
        target.close()


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


@asynccontextmanager
async def lossy_wire(port: int) -> AsyncIterator[LossyWire]:
    """To a server on this machine."""
    wire = LossyWire(port)
    server = await asyncio.start_server(wire.serve, "127.0.0.1", 0)
    wire.url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield wire
    finally:
        server.close()
        await wire.close()
