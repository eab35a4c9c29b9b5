"""The database of a node: one RocksDB that holds the tables of all its partitions.

This module owns the open handles, and the prefix that keeps partitions apart: every key begins
with its partition as u16, so that one write-ahead log, and one sync, serves all of them. A
`NodeDatabase` is one opening. Once a write or a sync has failed it stays failed, because a RocksDB
that has met a full disk only works again after it was reopened; `rocksdb.py` does that.
"""

import asyncio
import logging
import math
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from shutil import disk_usage
from typing import Any

from rocksdict import Rdict, ReadOptions, WriteBatch, WriteOptions

from storage_svc.engines.committer import Commit, Committer
from storage_svc.engines.disk_thread import Disk, WorkEnded
from storage_svc.engines.engine import (
    Batch,
    CommitEnded,
    EngineClosed,
    EngineFailed,
    Row,
    Table,
)
from storage_svc.engines.keys import prefix_end, successor
from storage_svc.engines.rocksdb_files import translated

_SKIPPED_KEYS_MAX = 1_000
"""Deleted keys that an iterator passes over before it gives up a read beside the writer."""

_log = logging.getLogger(__name__)


class NodeDatabase:
    """One opening of the database. Reads and writes run on the event loop and never suspend; only
    waiting for the disk happens in threads."""

    def __init__(self, directory: Path, db: Rdict, disk: Disk) -> None:
        self.directory = directory
        self._db: Rdict | None = db
        self._families = {table: db.get_column_family(table) for table in Table}
        self._log = _RocksLog(db, disk)
        self._committer = Committer(self._log, str(directory))
        # Apart from the syncs: RocksDB may keep a flush waiting.
        self._flusher = ThreadPoolExecutor(1, thread_name_prefix="tidemark-flush")
        self._flushing: set[Table] = set()

    # --- life ----------------------------------------------------------------------------------

    @property
    def has_failed(self) -> bool:
        return self._committer.fault is not None

    async def wait_failed(self) -> None:
        await self._committer.failed.wait()

    def verify(self) -> None:
        """Raises EngineFailed if nothing can be committed any more."""
        self.check_open()
        self._check_fault()

    def damaged_tables(self) -> frozenset[Table]:
        """The tables of the file in which RocksDB has met a bad block while it compacted."""
        file = re.search(r"Corruption.*/0*(\d+)\.sst", self._committer.fault or "")
        if file is None or self._db is None:
            return frozenset()
        entry = re.compile(rf"^ *{file[1]}:", re.MULTILINE)
        return frozenset(
            table
            for table, family in self._families.items()
            if entry.search(family.property_value("rocksdb.sstables") or "")
        )

    async def close(self) -> None:
        """Release the directory. Never raises: what was committed is durable already."""
        db, self._db = self._db, None
        if db is None:
            return
        await self._committer.close()
        # The directory stays locked while anything refers to the database: drop every handle.
        parts = [*self._families.values(), db]
        self._families.clear()
        await self._log.close(partial(_release, self._flusher, parts))

    # --- reads and commits ---------------------------------------------------------------------

    def load(self, prefix: bytes, table: Table, keys: Sequence[bytes]) -> list[bytes | None]:
        family = self._family(table)
        try:
            values: list[bytes | None] = family.get([prefix + key for key in keys])
        except Exception as error:
            raise translated(error, self.directory) from error
        return values

    def rows(
        self,
        prefix: bytes,
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
        options.set_iterate_upper_bound(prefix_end(prefix) if end is None else prefix + end)
        rows: list[Row] = []
        size = 0
        skip = len(prefix)
        iterator = family.iter(options)
        try:
            iterator.seek(prefix + start)
            while len(rows) < limit and size < bytes_max and (key := iterator.key()) is not None:
                value = iterator.value()
                rows.append((key[skip:], value))
                size += len(key) + len(value)
                iterator.next()
            iterator.status()
        except Exception as error:
            raise translated(error, self.directory) from error
        finally:
            del iterator  # a traceback that is kept would keep the directory locked
        return rows

    def load_beside(self, prefix: bytes, table: Table, keys: Sequence[bytes]) -> list[bytes | None]:
        """The same as `load` for many keys in ascending order, without filling the cache.

        An iterator keeps the block that it stands in, so that neighbours are not decoded again, and
        needs no seek for a key that follows the last one. It passes over deleted keys, which may be
        many: it gives up after some, and once a key is missing, or cannot be read, this one and the
        others are loaded one by one.
        """
        if not keys:
            return []
        family = self._family(table)
        options: Any = ReadOptions()
        options.fill_cache(False)
        options.set_iterate_upper_bound(prefix + successor(max(keys)))
        options.set_max_skippable_internal_keys(_SKIPPED_KEYS_MAX)
        values: list[bytes | None] = []
        iterator = family.iter(options)
        neighbours = False
        try:
            for key in keys:
                wanted = prefix + key
                if neighbours:
                    iterator.next()
                    neighbours = iterator.key() == wanted
                if not neighbours:
                    iterator.seek(wanted)
                    if iterator.key() != wanted:
                        break
                    neighbours = not values
                values.append(iterator.value())
        except Exception as error:
            raise translated(error, self.directory) from error
        finally:
            del iterator  # a traceback that is kept would keep the directory locked
        return values + self.load(prefix, table, keys[len(values) :])

    async def commit(self, prefix: bytes, batch: Batch) -> None:
        self.check_open()
        await self._committer.commit(prefix, batch)
        self._flush_ranges(batch)

    def begin_commit(self, prefix: bytes, batch: Batch, ended: CommitEnded) -> None:
        """The same; `ended` gets the outcome."""
        if self._db is None:
            self.check_open()
        if batch.ranged_tables:
            ended = partial(self._end_ranged, batch, ended)
        self._committer.begin(prefix, batch, ended)

    def _end_ranged(self, batch: Batch, ended: CommitEnded, error: Exception | None) -> None:
        if error is None:
            self._flush_ranges(batch)
        ended(error)

    def _flush_ranges(self, batch: Batch) -> None:
        for table in batch.ranged_tables - self._flushing:
            if (family := self._families.get(table)) is not None:
                self._flushing.add(table)
                self._flusher.submit(self._flush, table, family)

    # --- figures -------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever committed."""
        return self.check_open().latest_sequence_number() == 0

    def disk_free_bytes(self) -> int:
        self.check_open()
        return disk_usage(self.directory).free

    def check_open(self) -> Rdict:
        if self._db is None:
            self._check_fault()  # another partition noticed it first, and has opened it again
            raise EngineClosed(f"{self.directory} is closed")
        return self._db

    def _check_fault(self) -> None:
        if self._committer.fault is not None:
            raise EngineFailed(f"{self.directory} must be opened again: {self._committer.fault}")

    def _family(self, table: Table) -> Any:  # rocksdict's types know nothing of raw mode
        self.check_open()
        return self._families[table]

    def _flush(self, table: Table, family: Rdict) -> None:
        """Have the write buffer written out: range deletes in it slow down every read."""
        self._flushing.discard(table)  # first: a range delete from now on needs another flush
        try:
            family.flush(False)
        except Exception as error:
            _log.warning("cannot write out range deletes: %s", error)


class _RocksLog:
    """The write-ahead log of the database, which all tables share."""

    def __init__(self, db: Rdict, disk: Disk) -> None:
        self._db: Rdict | None = db
        self._sync: Callable[[], object] | None = partial(db.flush_wal, True)
        self._handles = {table: db.get_column_family_handle(table) for table in Table}
        self._unstalled = WriteOptions()
        self._unstalled.no_slowdown = True
        self._disk = disk

    def encode(self, commits: Sequence[Commit], onto: WriteBatch | None) -> WriteBatch:
        encoded = WriteBatch(raw_mode=True) if onto is None else onto
        put, delete, handles = encoded.put, encoded.delete, self._handles
        for prefix, batch, _ in commits:
            for table, key, value, end in batch.operations:
                if value is not None:
                    put(prefix + key, value, handles[table])
                elif end is None:
                    delete(prefix + key, handles[table])
                else:
                    encoded.delete_range(prefix + key, prefix + end, handles[table])
        return encoded

    def write(self, encoded: WriteBatch) -> bool:
        assert self._db is not None, "the committer ends before the log is closed"
        try:
            self._db.write(encoded, self._unstalled)
        except Exception as error:
            if "Write stall" not in str(error):
                raise
            return False
        return True

    def begin_sync(self, ended: WorkEnded) -> None:
        assert self._sync is not None, "the committer ends before the log is closed"
        self._disk.begin(self._sync, ended)

    async def close(self, release: Callable[[], None]) -> None:
        """Drop the handles and call `release` after the last sync."""
        self._handles.clear()
        self._db = self._sync = None
        released = asyncio.Event()
        self._disk.begin(release, lambda _: released.set())
        self._disk.close()
        await released.wait()


def _release(flusher: ThreadPoolExecutor, parts: list[Rdict]) -> None:
    flusher.shutdown(wait=True)
    for part in parts:
        try:
            part.close()
        except Exception as error:  # after a failed write closing fails as well, and still closes
            _log.warning("closing after a fault: %s", error)
