"""Reads of run headers that leave out purged runs that are not erased yet."""

from collections.abc import AsyncIterator

from storage_svc.engines import queue_rows
from storage_svc.engines.engine import Engine, Reader, Row, Table
from storage_svc.engines.keys import read_u64, successor, u64
from storage_svc.engines.paging import PAGE_ROWS
from storage_svc.queue.purge import PurgeMark
from storage_svc.turns import give_way


async def scan_runs(
    source: Engine | Reader, purge: PurgeMark | None, start: bytes, end: bytes, *, limit: int
) -> list[Row]:
    """At most `limit` headers of one queue; fewer only if there are no more before `end`."""
    if purge is None:
        return await source.scan(Table.RUN_HEADERS, start, end, limit=limit)
    found: list[Row] = []
    while len(found) < limit and start < end:
        wanted = limit - len(found)
        page = await source.scan(Table.RUN_HEADERS, start, end, limit=wanted)
        for row in page:
            key = row[0]
            offset = read_u64(key, len(key) - 8)
            live = purge.next_live(offset)
            if live != offset:
                start = key[:-8] + u64(live)  # in the same lane
                break
            found.append(row)
        else:
            if len(page) < wanted:
                break
            start = successor(page[-1][0])
        await give_way()
    return found


async def scan_run_pages(
    source: Engine | Reader, purge: PurgeMark | None, queue_id: int
) -> AsyncIterator[list[Row]]:
    """All headers of one queue, each page in a separate turn."""
    start, end = queue_rows.queue_range(queue_id)
    while page := await scan_runs(source, purge, start, end, limit=PAGE_ROWS):
        yield page
        if len(page) < PAGE_ROWS:
            return
        start = successor(page[-1][0])
        await give_way()
