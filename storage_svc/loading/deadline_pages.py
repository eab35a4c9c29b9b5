"""Pages of stored deadlines: opening a partition costs the same however many are running.

The first page is read when the partition opens, the next when every deadline of the last one is
gone. Only the writer reads them, before it applies anything: all of its rows are stored then.
"""

from collections import Counter

from storage_svc.engines.engine import Engine, Table
from storage_svc.engines.keys import read_u64, successor, u64
from storage_svc.partition.deadlines import Deadlines
from storage_svc.turns import give_way

PAGE_ROWS = 1000


async def read_deadlines(engine: Engine, deadlines: Deadlines) -> None:
    """Read the next page of reservation deadlines and of nack delays."""
    start_ms = deadlines.horizon_ms or 0
    found: Counter[int] = Counter()
    ends: list[int] = []
    for table in (Table.DEADLINES, Table.DELAYS):
        times_ms, complete = await _read_times(engine, table, start_ms)
        found += times_ms
        if not complete:
            ends.append(max(times_ms))  # more of the same time may follow
    horizon_ms = min(ends, default=None)
    if horizon_ms is not None:
        found = Counter({each: count for each, count in found.items() if each < horizon_ms})
    deadlines.add_page(found, horizon_ms)


async def _read_times(engine: Engine, table: Table, start_ms: int) -> tuple[Counter[int], bool]:
    """The times of a page, at least two unless it is the last; whether it is that."""
    times_ms: Counter[int] = Counter()
    start = u64(start_ms)
    while len(times_ms) < 2:
        page = await engine.scan(table, start, None, limit=PAGE_ROWS)
        times_ms.update(read_u64(key) for key, _ in page)
        if len(page) < PAGE_ROWS:
            return times_ms, True
        start = successor(page[-1][0])
        await give_way()
    return times_ms, False
