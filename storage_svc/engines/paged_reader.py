"""Reads beside the writer for engines on servers: page by page, each page one moment."""

from collections.abc import AsyncIterator, Sequence
from typing import Final, Protocol, Self

from storage_svc.engines.engine import EngineClosed, Row, Table
from storage_svc.engines.keys import successor

CHUNK_BYTES_MAX: Final = 256 * 1024


class PagedEngine(Protocol):
    """The reads of an engine that a reader uses."""

    async def load(self, table: Table, keys: Sequence[bytes]) -> list[bytes | None]: ...

    async def scan(
        self, table: Table, start: bytes, end: bytes | None, *, limit: int
    ) -> list[Row]: ...

    async def page(
        self, table: Table, start: bytes, end: bytes | None, rows_max: int, bytes_max: int
    ) -> list[Row]:
        """The first rows of a range; fewer than there are only where one bound is reached."""
        ...


class PagedReader:
    """A reader of one engine; it ends with it."""

    def __init__(self, engine: PagedEngine) -> None:
        self._engine: PagedEngine | None = engine

    async def load(self, table: Table, keys: Sequence[bytes]) -> list[bytes | None]:
        return await self._opened().load(table, keys)

    async def scan(self, table: Table, start: bytes, end: bytes | None, *, limit: int) -> list[Row]:
        return await self._opened().scan(table, start, end, limit=limit)

    async def scan_chunks(
        self, table: Table, start: bytes, end: bytes | None, *, chunk_rows: int = 512
    ) -> AsyncIterator[list[Row]]:
        while chunk := await self._opened().page(table, start, end, chunk_rows, CHUNK_BYTES_MAX):
            yield chunk
            start = successor(chunk[-1][0])

    def close(self) -> None:
        self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _opened(self) -> PagedEngine:
        if self._engine is None:
            raise EngineClosed("the reader is closed")
        return self._engine
