"""Reads that share trips: what is asked for in one turn of the event loop travels together.

Requests gather while a trip is under way. A trip is cut into scripts of bounded work, so that no
script holds the server for long.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from redis.exceptions import NoScriptError, ResponseError

from storage_svc.engines.engine import EngineFailed, Row, Table
from storage_svc.engines.redis.layout import (
    KINDS,
    Argument,
    Kind,
    declared_keys,
    read_rows,
    read_values,
)
from storage_svc.engines.redis.scripts import READ
from storage_svc.engines.redis.server import AnswerLost, Command, Server, is_not_executed
from tidemark.clock import SystemClock
from tidemark.errors import DataCorrupt

ROWS_PER_SCRIPT_MAX: Final = 1_000
BYTES_PER_PAGE_MAX: Final = 1024 * 1024
_WITHIN_MS: Final = 10_000
_BEHIND_WITHIN_MS: Final = 2_000
"""After which a server that lacks commits is not asked again: opening finds out why."""
_RETRY_MS: Final = 50
_CLOCK = SystemClock()


class _Request(NamedTuple):
    table: Table
    arguments: tuple[Argument, ...]
    rows_max: int
    answer: asyncio.Future[bytes]


class Reads:
    """The reads of one partition."""

    def __init__(
        self, server: Server, mark_key: bytes, base_key: bytes, reached: Callable[[], int]
    ) -> None:
        """`reached` gives the sequence that a server must have to be read."""
        self._server = server
        self._mark_key = mark_key
        self._base = base_key + b":"
        self._reached = reached
        self._gathered: list[_Request] = []
        self._travelling: asyncio.Task[None] | None = None

    async def load(self, table: Table, keys: Sequence[bytes]) -> list[bytes | None]:
        values: list[bytes | None] = []
        for first in range(0, len(keys), ROWS_PER_SCRIPT_MAX):
            some = keys[first : first + ROWS_PER_SCRIPT_MAX]
            arguments = (b"load", KINDS[table].value, table, len(some), *some)
            values += read_values(await self._ask(table, arguments, len(some)))
        return values

    async def page(
        self, table: Table, start: bytes, end: bytes | None, rows_max: int, bytes_max: int
    ) -> list[Row]:
        assert KINDS[table] is not Kind.POINT, f"{table} has no order"
        rows_max = min(rows_max, ROWS_PER_SCRIPT_MAX)
        if rows_max <= 0 or end == b"":
            return []
        bounds = (start, end or b"", rows_max, min(bytes_max, BYTES_PER_PAGE_MAX))
        arguments = (b"scan", KINDS[table].value, table, *bounds)
        return read_rows(await self._ask(table, arguments, rows_max))

    async def close(self) -> None:
        if self._travelling is not None:
            self._travelling.cancel()
            await asyncio.wait({self._travelling})

    async def _ask(self, table: Table, arguments: tuple[Argument, ...], rows_max: int) -> bytes:
        loop = asyncio.get_running_loop()
        request = _Request(table, arguments, rows_max, loop.create_future())
        self._gathered.append(request)
        if self._travelling is None:
            self._travelling = loop.create_task(self._travel())
        return await request.answer

    async def _travel(self) -> None:
        try:
            while self._gathered:
                requests, self._gathered = self._gathered, []
                try:
                    await self._answer(requests)
                except Exception as error:
                    for each in requests:
                        if not each.answer.done():
                            each.answer.set_exception(error)
        finally:
            self._travelling = None
            for each in self._gathered:
                each.answer.cancel()
            self._gathered = []

    async def _answer(self, requests: list[_Request]) -> None:
        scripts = _cut(requests)
        answers = await self._trip(scripts)
        for some, found in zip(scripts, answers, strict=True):
            if isinstance(found, ResponseError):
                raise _translated(found)
            for each, answer in zip(some, found, strict=True):
                if not each.answer.done():  # its caller may have been cancelled
                    each.answer.set_result(answer)

    async def _trip(self, scripts: list[list[_Request]]) -> list[Any]:
        """Reads change nothing: a lost answer is asked for again."""
        began_ms = _CLOCK.monotonic_ms()
        name = (b"EVALSHA", READ.digest)
        while True:
            within_ms = _WITHIN_MS
            try:
                answers = await self._server.ask(
                    *(self._command(name, each) for each in scripts), within_ms=_WITHIN_MS
                )
                if not any(map(is_not_executed, answers)):
                    return answers
                why = "the slot is moving"
            except NoScriptError:
                name = (b"EVAL", READ.text)
                continue
            except ResponseError as error:
                if not str(error).startswith("BEHIND"):
                    raise _translated(error) from error
                why, within_ms = str(error), _BEHIND_WITHIN_MS
                await self._server.reconnect()
            except AnswerLost as error:
                why = str(error)
            if _CLOCK.monotonic_ms() >= began_ms + within_ms:
                raise EngineFailed(f"the server does not answer: {why}")
            await _CLOCK.sleep_ms(_RETRY_MS)

    def _command(self, name: tuple[bytes, bytes], requests: list[_Request]) -> Command:
        tables = dict.fromkeys(each.table for each in requests)
        keys = declared_keys(self._mark_key, self._base, tables)
        asked = [argument for each in requests for argument in each.arguments]
        return (*name, len(keys), *keys, self._base, self._reached(), *asked)


def _translated(error: ResponseError) -> Exception:
    """CORRUPT is the script's own; anything else is a fault of the server."""
    text = str(error)
    return DataCorrupt(text) if text.startswith("CORRUPT") else EngineFailed(text)


def _cut(requests: list[_Request]) -> list[list[_Request]]:
    scripts: list[list[_Request]] = [[]]
    rows = 0
    for each in requests:
        if scripts[-1] and rows + each.rows_max > ROWS_PER_SCRIPT_MAX:
            scripts.append([])
            rows = 0
        scripts[-1].append(each)
        rows += each.rows_max
    return scripts
