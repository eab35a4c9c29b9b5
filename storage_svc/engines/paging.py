"""Scans of any length, read page by page so that no page holds the event loop for long."""

from collections.abc import AsyncIterator

from storage_svc.engines.engine import Engine, Reader, Row, Table
from storage_svc.engines.keys import successor
from storage_svc.turns import give_way

PAGE_ROWS = 256
"""Rows that are read, and worked on, in one turn of the event loop."""


async def scan_all(
    source: Engine | Reader, table: Table, start: bytes, end: bytes | None
) -> AsyncIterator[Row]:
    """Every row from `start` up to, not including, `end` (None: to the end of the table)."""
    async for page in scan_pages(source, table, start, end):
        for row in page:
            yield row


async def scan_pages(
    source: Engine | Reader, table: Table, start: bytes, end: bytes | None
) -> AsyncIterator[list[Row]]:
    """The same page by page, each in a separate turn."""
    while page := await source.scan(table, start, end, limit=PAGE_ROWS):
        yield page
        if len(page) < PAGE_ROWS:
            return
        start = successor(page[-1][0])
        await give_way()
