"""Counts the rows that scans beside the writer read from the engine, by table."""

from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from storage_svc.engines.engine import Row, Table
from storage_svc.engines.paged_reader import PagedReader
from storage_svc.engines.rocksdb import RocksEngine


def count_reads(monkeypatch: pytest.MonkeyPatch) -> Counter[Table]:
    """Rows read since this call; the engine of this process is the real one."""
    rows: Counter[Table] = Counter()
    scan_beside, scan, scan_chunks = (
        RocksEngine.scan_beside,
        PagedReader.scan,
        PagedReader.scan_chunks,
    )

    def add(table: Table, found: list[Row]) -> list[Row]:
        if found:
            rows[table] += len(found)
        return found

    def counted(self: RocksEngine, table: Table, *where: Any) -> list[Row]:
        return add(table, scan_beside(self, table, *where))

    async def counted_scan(self: PagedReader, table: Table, *where: Any, **how: Any) -> list[Row]:
        return add(table, await scan(self, table, *where, **how))

    async def counted_chunks(
        self: PagedReader, table: Table, *where: Any, **how: Any
    ) -> AsyncIterator[list[Row]]:
        async for chunk in scan_chunks(self, table, *where, **how):
            yield add(table, chunk)

    monkeypatch.setattr(RocksEngine, "scan_beside", counted)
    monkeypatch.setattr(PagedReader, "scan", counted_scan)
    monkeypatch.setattr(PagedReader, "scan_chunks", counted_chunks)
    return rows
