"""Reads that share trips: those of one turn of the event loop travel together.

Requests gather while a trip is under way. A script answers as many as its time allows, and the next
one the others. One script is a trip: a server executes what one connection has sent before it turns
to the next.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

from redis.exceptions import ResponseError

from storage_svc.engines.engine import EngineClosed, EngineFailed, Row, Table
from storage_svc.engines.redis.layout import (
    KINDS,
    SCRIPT_US_MAX,
    Argument,
    Kind,
    declared_keys,
    read_answers,
    read_rows,
    read_values,
)
from storage_svc.engines.redis.scripts import READ
from storage_svc.engines.redis.server import AnswerLost, Server
from tidemark.clock import SystemClock
from tidemark.errors import DataCorrupt

ROWS_PER_SCRIPT_MAX: Final = 1_000
LOAD_US: Final = {Kind.POINT: 2, Kind.ORDERED: 2, Kind.PACKED: 8}
"""Time of the server to load a row; a scan takes 3 microseconds per row (docs/ENGINES.md)."""
_REQUESTS_PER_SCRIPT_MAX: Final = 500
BYTES_PER_PAGE_MAX: Final = 1024 * 1024
_WITHIN_MS: Final = 10_000
_BEHIND_WITHIN_MS: Final = 2_000
"""After which a server that lacks commits is not asked again: opening finds out why."""
_RETRY_MS: Final = 50
_CLOCK = SystemClock()


class _Request(NamedTuple):
    table: Table
    arguments: tuple[Argument, ...]
    answer: asyncio.Future[bytes]


class Reads:
    """The reads of one partition."""

    def __init__(
        self,
        server: Server,
        mark_key: bytes,
        base_key: bytes,
        reached: Callable[[], int],
        is_committing: Callable[[], bool],
        apply_rest: Callable[[], Awaitable[None]],
    ) -> None:
        """`reached` gives the sequence that a server must have to be read; `apply_rest` applies
        what is left of the last commit, of which nothing is left unless `is_committing`, or unless
        a failover has lost it."""
        self._server = server
        self._is_committing = is_committing
        self._apply_rest = apply_rest
        self._mark_key = mark_key
        self._base = base_key + b":"
        self._reached = reached
        self._gathered: list[_Request] = []
        self._travelling: asyncio.Task[None] | None = None

    async def load(self, table: Table, keys: Sequence[bytes]) -> list[bytes | None]:
        values: list[bytes | None] = []
        kind = KINDS[table]
        keys_max = min(ROWS_PER_SCRIPT_MAX, SCRIPT_US_MAX // LOAD_US[kind])
        for first in range(0, len(keys), keys_max):
            some = keys[first : first + keys_max]
            arguments = (b"load", kind.value, table, len(some) * LOAD_US[kind], len(some), *some)
            values += read_values(table, await self._ask(table, arguments))
        return values

    async def page(
        self, table: Table, start: bytes, end: bytes | None, rows_max: int, bytes_max: int
    ) -> tuple[list[Row], bool]:
        """The first rows of a range, and whether there are no others."""
        assert KINDS[table] is not Kind.POINT, f"{table} has no order"
        rows_max = min(rows_max, ROWS_PER_SCRIPT_MAX)
        if rows_max <= 0 or end == b"":
            return [], True
        bytes_max = min(bytes_max, BYTES_PER_PAGE_MAX)
        arguments = (b"scan", KINDS[table].value, table, start, end or b"", rows_max, bytes_max)
        answer = await self._ask(table, arguments)
        rows = read_rows(table, answer)
        return rows, len(rows) < rows_max and len(answer) < bytes_max

    async def close(self) -> None:
        if self._travelling is not None:
            self._travelling.cancel()
            await asyncio.wait({self._travelling})

    async def _ask(self, table: Table, arguments: tuple[Argument, ...]) -> bytes:
        loop = asyncio.get_running_loop()
        request = _Request(table, arguments, loop.create_future())
        self._gathered.append(request)
        if self._travelling is None:
            self._travelling = loop.create_task(self._travel())
        return await request.answer

    async def _travel(self) -> None:
        requests: list[_Request] = []
        try:
            while self._gathered:
                requests, self._gathered = self._gathered, []
                try:
                    left = requests
                    while left:
                        left = left[await self._answer(left[:_REQUESTS_PER_SCRIPT_MAX]) :]
                except Exception as error:
                    _fail(requests, error)
        finally:
            self._travelling = None
            left, self._gathered = [*requests, *self._gathered], []
            _fail(left, EngineClosed("the partition was closed while it was read"))

    async def _answer(self, requests: list[_Request]) -> int:
        """Returns how many of them, from the first on, are answered."""
        answers = list(read_answers(await self._trip(requests)))
        for each, answer in zip(requests, answers, strict=False):
            if not each.answer.done():  # its caller may have been cancelled
                each.answer.set_result(answer)
        return len(answers)

    async def _trip(self, requests: list[_Request]) -> bytes:
        """Reads change nothing: one whose answer was lost is repeated."""
        began_ms = _CLOCK.monotonic_ms()
        tables = dict.fromkeys(each.table for each in requests)
        keys = declared_keys(self._mark_key, self._base, tables)
        asked = [argument for each in requests for argument in each.arguments]
        while True:
            within_ms = _WITHIN_MS
            try:
                is_whole = 0 if self._is_committing() else 1
                (answer,) = await self._server.run(
                    READ,
                    keys,
                    *(self._base, self._reached(), SCRIPT_US_MAX, is_whole, *asked),
                    within_ms=_WITHIN_MS,
                )
                found: bytes = answer
                return found
            except ResponseError as error:
                why = str(error)
                if why.startswith("UNAPPLIED"):
                    await self._apply_rest()
                elif why.startswith("BEHIND"):
                    within_ms = _BEHIND_WITHIN_MS
                    await self._server.reconnect()
                else:
                    raise translated(error) from error
            except AnswerLost as error:
                why = str(error)
            if _CLOCK.monotonic_ms() >= began_ms + within_ms:
                raise EngineFailed(f"the server does not answer: {why}")
            await _CLOCK.sleep_ms(_RETRY_MS)


def _fail(requests: Sequence[_Request], error: Exception) -> None:
    """Fail those that are not answered."""
    for each in requests:
        if not each.answer.done():
            each.answer.set_exception(error)


def translated(error: ResponseError) -> Exception:
    """CORRUPT is the script's own; anything else is a fault of the server."""
    text = str(error)
    return DataCorrupt(text) if text.startswith("CORRUPT") else EngineFailed(text)
