"""Scans of any length, read page by page so that no page holds the event loop for long."""

from collections.abc import AsyncIterator

from storage_svc.engines.engine import Engine, Reader, Row, Table
from storage_svc.engines.keys import successor

PAGE_ROWS = 1000


async def scan_all(
    source: Engine | Reader, table: Table, start: bytes, end: bytes | None
) -> AsyncIterator[Row]:
    """Every row from `start` up to, not including, `end` (None: to the end of the table)."""
    while page := await source.scan(table, start, end, limit=PAGE_ROWS):
        for row in page:
            yield row
        if len(page) < PAGE_ROWS:
            return
        start = successor(page[-1][0])
