"""Counts the rows that scans beside the writer read from the engine, by table."""

from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from storage_svc.engines.engine import Row, Table
from storage_svc.engines.rocksdb import RocksReader


def count_reads(monkeypatch: pytest.MonkeyPatch) -> Counter[Table]:
    """Rows read since this call; the engine of this process is the real one."""
    rows: Counter[Table] = Counter()
    scan_chunks = RocksReader.scan_chunks

    async def counted(
        self: RocksReader, table: Table, *where: Any, **how: Any
    ) -> AsyncIterator[list[Row]]:
        async for chunk in scan_chunks(self, table, *where, **how):
            rows[table] += len(chunk)
            yield chunk

    monkeypatch.setattr(RocksReader, "scan_chunks", counted)
    return rows
