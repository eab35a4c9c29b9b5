"""A connection to a Redis server whose client library misbehaves (S9)."""

import asyncio
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from storage_svc.engines.redis.server import Server


class Connection:
    """Never answers, and fails in its clean-up when it is cancelled."""

    def __init__(self) -> None:
        self.reading = asyncio.Event()

    def pack_commands(self, commands: object) -> list[bytes]:
        return []

    async def send_packed_command(self, packed: object) -> None: ...

    async def read_response(self) -> None:
        self.reading.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise RedisConnectionError("the clean-up failed") from None

    async def disconnect(self, nowait: bool) -> None: ...


async def test_a_cancelled_caller_ends_although_the_library_answers_with_an_error() -> None:
    """S9, S5: a process that waited for such a caller to end would never stop."""
    connection = Connection()

    class Finder:
        async def connect(self) -> Connection:
            return connection

    finder: Any = Finder()
    asking = asyncio.create_task(Server(finder).ask((b"PING",), within_ms=60_000))
    await connection.reading.wait()

    asking.cancel()

    with pytest.raises(asyncio.CancelledError):
        await asking
