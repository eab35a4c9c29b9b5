"""A storage service in which the reads of one partition fail, or take long, when a file says so.

`python -m bench.stalling_storage` is the real service over real engines, but for what sweeps read
from one partition: that is held up while the file named by the variable contains a fault's word.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from enum import Enum
from pathlib import Path
from typing import Final, Self

from storage_svc.app import storage
from storage_svc.engines.engine import Batch, Engine, Engines, Identity, Reader, Row, Table, Usage
from tidemark.clock import Clock
from tidemark.errors import DataCorrupt
from tidemark.rpc.serve import main
from tidemark.rpc.server import RpcServer
from tidemark.settings import StorageSettings

FAULT_FILE: Final = "BENCH_FAULT_FILE"
PARTITION: Final = 0
"""The one that is broken."""

STALL_S: Final = 10
_POLL_S = 0.02


class Fault(Enum):
    """What is wrong with the reads of the partition."""

    NONE = ""
    FAIL = "fail"
    STALL = "stall"


class Faults:
    """The fault that there is now."""

    def __init__(self, file: Path) -> None:
        self._file = file

    async def pass_through(self) -> None:
        """Let a read pass, or not."""
        if self._now() is Fault.FAIL:
            raise DataCorrupt("the disk cannot be read, as it was told")
        for _ in range(round(STALL_S / _POLL_S)):
            if self._now() is not Fault.STALL:
                return
            await asyncio.sleep(_POLL_S)

    def _now(self) -> Fault:
        return Fault(self._file.read_text()) if self._file.exists() else Fault.NONE


class StallingEngines:
    """Opens engines; that of the partition with a reader that obeys the faults."""

    def __init__(self, engines: Engines, faults: Faults) -> None:
        self._engines = engines
        self._faults = faults

    async def open(self, identity: Identity) -> Engine:
        engine = await self._engines.open(identity)
        return StallingEngine(engine, self._faults) if identity.partition == PARTITION else engine


class StallingEngine:
    """An engine whose writer goes on while its readers wait."""

    def __init__(self, engine: Engine, faults: Faults) -> None:
        self._engine = engine
        self._faults = faults

    @property
    def identity(self) -> Identity:
        return self._engine.identity

    async def load(self, table: Table, keys: Sequence[bytes]) -> list[bytes | None]:
        return await self._engine.load(table, keys)

    async def scan(self, table: Table, start: bytes, end: bytes | None, *, limit: int) -> list[Row]:
        return await self._engine.scan(table, start, end, limit=limit)

    async def commit(self, batch: Batch) -> None:
        await self._engine.commit(batch)

    def reader(self) -> Reader:
        return StallingReader(self._engine.reader(), self._faults)

    def usage(self) -> Usage:
        return self._engine.usage()

    async def close(self) -> None:
        await self._engine.close()


class StallingReader:
    """What a sweep reads through."""

    def __init__(self, reader: Reader, faults: Faults) -> None:
        self._reader = reader
        self._faults = faults

    async def load(self, table: Table, keys: Sequence[bytes]) -> list[bytes | None]:
        await self._faults.pass_through()
        return await self._reader.load(table, keys)

    async def scan(self, table: Table, start: bytes, end: bytes | None, *, limit: int) -> list[Row]:
        await self._faults.pass_through()
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


def stalling_storage(
    settings: StorageSettings, clock: Clock
) -> AbstractAsyncContextManager[RpcServer]:
    faults = Faults(Path(os.environ[FAULT_FILE]))
    return storage(settings, clock, lambda engines: StallingEngines(engines, faults))


if __name__ == "__main__":
    main("tidemark-storage", StorageSettings, stalling_storage)
