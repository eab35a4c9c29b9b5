"""The embedded engine: RocksDB through `rocksdict`, one directory per partition.

This module owns the files below the data directory; it and `rocksdb_files.py`, which holds the
options, are the only ones that import rocksdict. There is one copy: losing the disk loses the data.

    <data directory>/partition-00000/
        LOCK                  the fence: held by the one process that has the partition open
        CURRENT, MANIFEST-*   which files make up the database
        *.log                 write-ahead log: what was committed and is not yet in tables
        *.sst                 tables, sorted and checksummed; a column family per `Table`
        LOG, LOG.old.*        RocksDB's own log for people, at most 4 MiB
        IDENTITY, OPTIONS-*, rocksdict-config.json   RocksDB's notes; nothing of ours is in them

META holds one key of the engine's own, `identity`: u32 format version, u32 partition, u32
partitions, text cluster id. The version stays in front in every format to come.

*Durability.* A commit is one WriteBatch written without sync on the event loop (microseconds), and
`flush_wal(True)` in a thread: `write(sync=True)` would hold the interpreter lock for as long as the
disk takes, `flush_wal` gives it up. A busy event loop returns the lock only after the switch
interval, 5 ms by default: a service calls `sys.setswitchinterval(SWITCH_INTERVAL_S)`. All writes go
through the one log, so tables need no atomic flush to agree after a crash. A write that RocksDB
would stall is refused instead (`no_slowdown`) and tried again: stalled, it would hold the
interpreter lock as well, and with it the other partitions.

*Corruption is reported, never skipped.* Recovery accepts a torn end of the log and nothing else
(`wal.py` closes a gap there); a scan asks the iterator for its status, because rocksdict's own row
iterators end in silence at a block that fails its checksum.

*Memory* does not grow with the number of queues: one block cache for the process, which also holds
indexes and filters, and per partition the write buffers and at most `OPEN_FILES_MAX` open files.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import disk_usage
from typing import Any, Final, Self

from rocksdict import Cache, Rdict, ReadOptions, WriteBatch, WriteOptions

from storage_svc.engines.engine import (
    FORMAT_VERSION,
    Batch,
    EngineClosed,
    Identity,
    Row,
    Table,
    Usage,
)
from storage_svc.engines.keys import read_text, read_u32, successor, text, u32
from storage_svc.engines.rocksdb_files import MIB, Memory, open_database, stored_bytes, translated
from tidemark.clock import SystemClock
from tidemark.errors import ClusterMismatch, CommitOutcomeUnknown, DataCorrupt, FormatNotSupported

_log = logging.getLogger(__name__)

BLOCK_CACHE_BYTES: Final = 64 * MIB
WRITE_BUFFER_BYTES: Final = 32 * MIB
CHUNK_BYTES_MAX: Final = 256 * 1024
SWITCH_INTERVAL_S: Final = 0.0001

_STALL_RETRY_MS = 2
_IDENTITY = b"identity"
_CLOCK = SystemClock()  # waits for a real disk, also where a test moves time by hand


class RocksEngines:
    """Opens the partitions below one data directory. They share one block cache."""

    def __init__(
        self,
        data_directory: Path,
        *,
        block_cache_bytes: int = BLOCK_CACHE_BYTES,
        write_buffer_bytes: int = WRITE_BUFFER_BYTES,
    ) -> None:
        self._data_directory = data_directory
        self._memory = Memory(Cache(block_cache_bytes), block_cache_bytes, write_buffer_bytes)

    async def open(self, identity: Identity) -> "RocksEngine":
        directory = self.directory(identity.partition)
        db = await asyncio.to_thread(open_database, directory, self._memory)
        engine = RocksEngine(identity, directory, db, self._memory)
        try:
            await engine.check_identity()
        except BaseException:
            await engine.close()
            raise
        return engine

    def directory(self, partition: int) -> Path:
        return self._data_directory / f"partition-{partition:05}"


class RocksEngine:
    """One open partition. Reads and writes run on the event loop and never suspend; only waiting
    for the disk happens in a thread of its own."""

    def __init__(self, identity: Identity, directory: Path, db: Rdict, memory: Memory) -> None:
        self._identity = identity
        self._directory = directory
        self._memory = memory
        self._db: Rdict | None = db
        self._families = {table: db.get_column_family(table) for table in Table}
        self._handles = {table: db.get_column_family_handle(table) for table in Table}
        self._unstalled = WriteOptions()
        self._unstalled.no_slowdown = True
        self._writing = asyncio.Lock()
        self._disk = ThreadPoolExecutor(1, thread_name_prefix=directory.name)
        self._fault: str | None = None

    @property
    def identity(self) -> Identity:
        return self._identity

    async def check_identity(self) -> None:
        """Refuse data of another format, cluster or partition; mark a new database as ours."""
        mine = self._identity
        name = text(mine.cluster_id.encode())
        expected = u32(FORMAT_VERSION) + u32(mine.partition) + u32(mine.partitions) + name
        (stored,) = await self.load(Table.META, [_IDENTITY])
        if stored is None:
            if self._opened().latest_sequence_number() > 0:
                raise DataCorrupt(f"{self._directory} has lost its identity", file="CURRENT")
            first = Batch()
            first.put(Table.META, _IDENTITY, expected)
            await self.commit(first)
        elif (version := read_u32(stored)) != FORMAT_VERSION:
            raise FormatNotSupported(
                f"{self._directory} is in format {version}, this version reads {FORMAT_VERSION}"
            )
        elif stored != expected:
            cluster_id = read_text(stored, 12)[0].decode(errors="replace")
            raise ClusterMismatch(
                f"{self._directory} holds partition {read_u32(stored, 4)} of {read_u32(stored, 8)} "
                f"of cluster {cluster_id!r}, not partition {mine.partition} of {mine.partitions} "
                f"of cluster {mine.cluster_id!r}"
            )

    async def load(self, table: Table, keys: Sequence[bytes]) -> list[bytes | None]:
        family = self._family(table)
        try:
            values: list[bytes | None] = family.get(list(keys))
        except Exception as error:
            raise translated(error, self._directory) from error
        return values

    async def scan(self, table: Table, start: bytes, end: bytes | None, *, limit: int) -> list[Row]:
        return self.rows(table, start, end, limit)

    def rows(
        self,
        table: Table,
        start: bytes,
        end: bytes | None,
        limit: int,
        *,
        bytes_max: float = math.inf,
        fill_cache: bool = True,
    ) -> list[Row]:
        """At most `limit` rows, and none after the one that reaches `bytes_max`."""
        family = self._family(table)
        options: Any = ReadOptions()
        options.fill_cache(fill_cache)
        if end is not None:
            options.set_iterate_upper_bound(end)
        rows: list[Row] = []
        size = 0
        iterator = family.iter(options)
        try:
            iterator.seek(start)
            while len(rows) < limit and size < bytes_max and (key := iterator.key()) is not None:
                value = iterator.value()
                rows.append((key, value))
                size += len(key) + len(value)
                iterator.next()
            iterator.status()
        except Exception as error:
            raise translated(error, self._directory) from error
        finally:
            del iterator  # a traceback that is kept would keep the directory locked
        return rows

    async def commit(self, batch: Batch) -> None:
        if not batch:
            return
        async with self._writing:  # keeps the order of the calls where one of them waits
            await self._write(batch)
            db = self._opened()
            durable = asyncio.get_running_loop().run_in_executor(self._disk, self._sync, db)
        for table in batch.ranged_tables:
            self._disk.submit(_flush, self._family(table))
        await durable

    def reader(self) -> "RocksReader":
        self._opened()
        return RocksReader(self)

    def disk_free_bytes(self) -> int:
        self._opened()
        return disk_usage(self._directory).free

    def usage(self) -> Usage:
        self._opened()
        disk = disk_usage(self._directory)
        return Usage(
            disk_free_bytes=disk.free,
            disk_total_bytes=disk.total,
            stored_bytes=stored_bytes(self._directory),
            write_buffer_bytes=sum(
                family.property_int_value("rocksdb.cur-size-all-mem-tables") or 0
                for family in self._families.values()
            ),
            write_buffer_bytes_max=self._memory.write_buffer_bytes_max,
            cache_bytes=self._memory.cache.get_usage(),
            cache_bytes_max=self._memory.cache_bytes_max,
        )

    async def close(self) -> None:
        db, self._db = self._db, None
        if db is None:
            return
        # The directory stays locked while anything refers to the database: drop every handle.
        self._handles.clear()
        parts = [*self._families.values(), db]
        self._families.clear()
        released = asyncio.get_running_loop().run_in_executor(self._disk, _release, parts)
        self._disk.shutdown(wait=False)
        await asyncio.shield(released)

    def _opened(self) -> Rdict:
        if self._db is None:
            raise EngineClosed(f"{self._directory} is closed")
        return self._db

    def _family(self, table: Table) -> Any:  # rocksdict's types know nothing of raw mode
        self._opened()
        return self._families[table]

    async def _write(self, batch: Batch) -> None:
        """Put the batch into the log and the write buffers; not yet on disk."""
        while True:
            db = self._opened()
            if self._fault is not None:
                raise self._outcome_unknown()
            encoded = self._encoded(batch)  # rocksdict spends it, also where the write is refused
            try:
                return db.write(encoded, self._unstalled)
            except Exception as error:
                if "Write stall" not in str(error):
                    self._fault = str(error)
                    raise self._outcome_unknown() from error
            await _CLOCK.sleep_ms(_STALL_RETRY_MS)

    def _encoded(self, batch: Batch) -> WriteBatch:
        encoded = WriteBatch(raw_mode=True)
        put, delete, handles = encoded.put, encoded.delete, self._handles
        for table, key, value, end in batch.operations:
            if value is not None:
                put(key, value, handles[table])
            elif end is None:
                delete(key, handles[table])
            else:
                encoded.delete_range(key, end, handles[table])
        return encoded

    def _sync(self, db: Rdict) -> None:
        """Force the log to disk. Runs in the thread, in the order of the commits."""
        if self._fault is not None:
            raise self._outcome_unknown()
        try:
            db.flush_wal(True)
        except Exception as error:
            self._fault = str(error)
            raise self._outcome_unknown() from error

    def _outcome_unknown(self) -> CommitOutcomeUnknown:
        return CommitOutcomeUnknown(f"{self._directory} must be opened again: {self._fault}")


class RocksReader:
    """Reads beside the writer, a slice of the event loop's time at a time."""

    def __init__(self, engine: RocksEngine) -> None:
        self._engine: RocksEngine | None = engine

    async def load(self, table: Table, keys: Sequence[bytes]) -> list[bytes | None]:
        return await self._opened().load(table, keys)

    async def scan(self, table: Table, start: bytes, end: bytes | None, *, limit: int) -> list[Row]:
        return self._opened().rows(table, start, end, limit, fill_cache=False)

    async def scan_chunks(
        self, table: Table, start: bytes, end: bytes | None, *, chunk_rows: int = 512
    ) -> AsyncIterator[list[Row]]:
        # Each chunk seeks again: an iterator kept open would pin old versions, and the directory.
        while chunk := self._opened().rows(
            table, start, end, chunk_rows, bytes_max=CHUNK_BYTES_MAX, fill_cache=False
        ):
            start = successor(chunk[-1][0])
            yield chunk
            await _CLOCK.sleep_ms(0)

    def close(self) -> None:
        self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _opened(self) -> RocksEngine:
        if self._engine is None:
            raise EngineClosed("the reader is closed")
        return self._engine


def _flush(family: Rdict) -> None:
    """Have the write buffer written out: range deletes in it slow down every read."""
    try:
        family.flush(False)
    except Exception as error:
        _log.warning("cannot write out range deletes: %s", error)


def _release(parts: list[Rdict]) -> None:
    for part in parts:
        try:
            part.close()
        except Exception as error:  # after a failed write closing fails as well, and still closes
            _log.warning("closing after a fault: %s", error)
