"""Engines whose reads beside the writer fail or stall, in the partitions that a test names.

Everything else happens for real, in a real RocksDB.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Self

from storage_svc.engines.engine import Batch, Engine, Engines, Identity, Reader, Row, Table, Usage
from tidemark.errors import DataCorrupt


class FaultyReads:
    """Opens engines whose readers obey `failing` and `stalled`."""

    def __init__(self) -> None:
        self.failing: set[int] = set()
        self.stalled: set[int] = set()
        self.corrupt: set[tuple[Table, bytes]] = set()
        """Rows that fail their checksum, for the writer as well."""
        self.lost: set[tuple[Table, bytes]] = set()
        """Rows that are not there."""
        self._engines: Engines

    def around(self, engines: Engines) -> Self:
        self._engines = engines
        return self

    async def open(self, identity: Identity) -> "_Engine":
        return _Engine(await self._engines.open(identity), self)

    async def check(self, partition: int) -> None:
        if partition in self.failing:
            raise DataCorrupt("the disk cannot be read, as it was told to")
        if partition in self.stalled:
            await asyncio.Event().wait()


class _Engine:
    def __init__(self, engine: Engine, faults: FaultyReads) -> None:
        self._engine = engine
        self._faults = faults

    @property
    def identity(self) -> Identity:
        return self._engine.identity

    async def load(self, table: Table, keys: Sequence[bytes]) -> list[bytes | None]:
        if any((table, key) in self._faults.corrupt for key in keys):
            raise DataCorrupt("a checksum does not match, as it was told to")
        values = await self._engine.load(table, keys)
        lost = self._faults.lost
        return [
            None if (table, key) in lost else value for key, value in zip(keys, values, strict=True)
        ]

    async def scan(self, table: Table, start: bytes, end: bytes | None, *, limit: int) -> list[Row]:
        return await self._engine.scan(table, start, end, limit=limit)

    async def commit(self, batch: Batch) -> None:
        await self._engine.commit(batch)

    async def verify(self) -> None:
        await self._engine.verify()

    async def wait_failed(self) -> None:
        await self._engine.wait_failed()

    def reader(self) -> "_Reader":
        return _Reader(self._engine.reader(), self._faults, self.identity.partition)

    def disk_free_bytes(self) -> int:
        return self._engine.disk_free_bytes()

    def usage(self) -> Usage:
        return self._engine.usage()

    async def close(self) -> None:
        await self._engine.close()


class _Reader:
    def __init__(self, reader: Reader, faults: FaultyReads, partition: int) -> None:
        self._reader = reader
        self._faults = faults
        self._partition = partition

    async def load(self, table: Table, keys: Sequence[bytes]) -> list[bytes | None]:
        await self._faults.check(self._partition)
        return await self._reader.load(table, keys)

    async def scan(self, table: Table, start: bytes, end: bytes | None, *, limit: int) -> list[Row]:
        await self._faults.check(self._partition)
        return await self._reader.scan(table, start, end, limit=limit)

    def scan_chunks(
        self, table: Table, start: bytes, end: bytes | None, *, chunk_rows: int = 512
    ) -> AsyncIterator[list[Row]]:
        return self._reader.scan_chunks(table, start, end, chunk_rows=chunk_rows)

    def close(self) -> None:
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
