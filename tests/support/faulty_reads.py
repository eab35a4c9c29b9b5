"""Engines whose reads fail or stall, or whose commits hang, in the partitions that a test names.

Everything else happens for real, in a real RocksDB.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Self

from storage_svc.engines.engine import (
    Batch,
    CommitEnded,
    Engine,
    Engines,
    Identity,
    Reader,
    Row,
    Table,
)
from storage_svc.engines.rocksdb import RocksEngines
from tests.support.wrapped_engine import WrappedEngine
from tidemark.errors import DataCorrupt


class FaultyReads:
    """Opens engines that obey what is set here."""

    def __init__(self) -> None:
        self.failing: set[int] = set()
        """Partitions that cannot be read beside the writer."""
        self.error: Exception = DataCorrupt("the disk cannot be read, as the test asked")
        """How those reads fail."""
        self.stalled: set[int] = set()
        """Partitions whose reads beside the writer never end."""
        self.hung: dict[int, asyncio.Event] = {}
        """Partitions whose commits wait for an event."""
        self.corrupt: set[tuple[Table, bytes]] = set()
        """Rows that fail their checksum, for the writer as well."""
        self.lost: set[tuple[Table, bytes]] = set()
        """Rows that are not there."""
        self._engines: Engines

    def around(self, engines: Engines) -> Self:
        self._engines = engines
        return self

    async def release_node(self) -> None:
        if isinstance(self._engines, RocksEngines):
            await self._engines.release_node()

    async def open(self, identity: Identity) -> "_Engine":
        return _Engine(await self._engines.open(identity), self)

    async def check(self, partition: int) -> None:
        if partition in self.failing:
            raise self.error
        if partition in self.stalled:
            await asyncio.Event().wait()

    async def load(
        self, source: Engine | Reader, table: Table, keys: Sequence[bytes]
    ) -> list[bytes | None]:
        if any((table, key) in self.corrupt for key in keys):
            raise DataCorrupt("a checksum does not match, as the test asked")
        values = await source.load(table, keys)
        return [
            None if (table, key) in self.lost else value
            for key, value in zip(keys, values, strict=True)
        ]


class _Engine(WrappedEngine):
    def __init__(self, engine: Engine, faults: FaultyReads) -> None:
        super().__init__(engine)
        self._faults = faults

    async def load(self, table: Table, keys: Sequence[bytes]) -> list[bytes | None]:
        return await self._faults.load(self._engine, table, keys)

    async def commit(self, batch: Batch) -> None:
        if self.identity.partition in self._faults.hung:
            await self._faults.hung[self.identity.partition].wait()
        await self._engine.commit(batch)

    def begin_commit(self, batch: Batch, ended: CommitEnded) -> bool:
        hung = self.identity.partition in self._faults.hung
        return not hung and self._engine.begin_commit(batch, ended)

    def reader(self) -> "_Reader":
        return _Reader(self._engine.reader(), self._faults, self.identity.partition)


class _Reader:
    def __init__(self, reader: Reader, faults: FaultyReads, partition: int) -> None:
        self._reader = reader
        self._faults = faults
        self._partition = partition

    async def load(self, table: Table, keys: Sequence[bytes]) -> list[bytes | None]:
        await self._faults.check(self._partition)
        return await self._faults.load(self._reader, table, keys)

    async def scan(self, table: Table, start: bytes, end: bytes | None, *, limit: int) -> list[Row]:
        await self._faults.check(self._partition)
        return await self._reader.scan(table, start, end, limit=limit)

    async def scan_chunks(
        self, table: Table, start: bytes, end: bytes | None, *, chunk_rows: int = 512
    ) -> AsyncIterator[list[Row]]:
        await self._faults.check(self._partition)
        async for chunk in self._reader.scan_chunks(table, start, end, chunk_rows=chunk_rows):
            yield chunk

    def close(self) -> None:
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
