"""The embedded engine: RocksDB through `rocksdict`, one database for all partitions of a node.

This module owns the layout of the data directory, and when the database is opened and closed.
`node_database.py` reads and writes it, `rocksdb_files.py` holds the options; no other module
imports rocksdict. There is one copy: losing the disk loses the data.

    <data directory>/node/
        LOCK                  the fence: held by the one process that has the directory open
        CURRENT, MANIFEST-*   which files make up the database
        *.log                 write-ahead log: what was committed and is not yet in tables
        *.sst                 tables, sorted and checksummed; a column family per `Table`
        LOG, LOG.old.*        RocksDB's own log for people, at most 4 MiB
        IDENTITY, OPTIONS-*, rocksdict-config.json   RocksDB's notes; nothing of ours is in them
    <data directory>/partitions   their number, for a lone node whose database cannot be opened

Every key begins with its partition as u16. META holds one key of the engine's own per partition,
`identity`: u32 format version, u32 partition, u32 partitions, text cluster id. It is written when
the partition is created. Under the prefix 0xFFFF, which no partition has, META holds the `identity`
of the node: the same without a partition. The version stays in front in every format to come. A
node of several adds its `node_id`, and `placed` + u16 partition for each partition that some node
has created: text id of that node (`node_record.py`).

*Durability.* A gather of commits is one WriteBatch written without sync on the event loop
(microseconds), and `flush_wal(True)` in a thread (`disk_thread.py`): `write(sync=True)` would hold
the interpreter lock for as long as the disk takes, `flush_wal` gives it up. A busy event loop
returns the lock only after the switch interval, 5 ms by default: a service calls
`sys.setswitchinterval(SWITCH_INTERVAL_S)`. All writes go through the one log, so tables need no
atomic flush to agree after a crash. A write that RocksDB would stall is refused instead
(`no_slowdown`) and tried again: stalled, it would hold the interpreter lock as well.

*Faults.* A failed write or sync ends the opening of the database for all partitions, which open
their engines again: the first that does so reopens the database, the others wait for the same
attempt. A bad block is a fault of the partitions that read it. A compaction that meets one ends the
opening as well; the table is then reopened without compaction, so that the others continue.

*Corruption is reported, never skipped.* Recovery accepts a torn end of the log and nothing else
(`wal.py` closes a gap there); a scan asks the iterator for its status, because rocksdict's own row
iterators end in silence at a block that fails its checksum.

*Memory* grows neither with queues nor with partitions: a node has one block cache, which also holds
indexes and filters, one set of write buffers, and at most `OPEN_FILES_MAX` open files.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from contextvars import Context
from pathlib import Path
from typing import Final, Self

from rocksdict import Cache

from storage_svc.engines.disk_thread import Disk, DiskThread
from storage_svc.engines.engine import (
    FORMAT_VERSION,
    Batch,
    CommitEnded,
    EngineClosed,
    Identity,
    Row,
    Table,
)
from storage_svc.engines.identity import IDENTITY_KEY, check_foreign, identity_value
from storage_svc.engines.keys import successor, text, u16, u32
from storage_svc.engines.node_database import NodeDatabase
from storage_svc.engines.rocksdb_files import MIB, Memory, open_database
from tidemark.clock import SystemClock
from tidemark.errors import ClusterMismatch, DataCorrupt, DataDirectoryInUse, FormatNotSupported

_log = logging.getLogger(__name__)

BLOCK_CACHE_BYTES: Final = 64 * MIB
WRITE_BUFFER_BYTES: Final = 64 * MIB
CHUNK_BYTES_MAX: Final = 256 * 1024
SWITCH_INTERVAL_S: Final = 0.0001

NODE_PREFIX: Final = u16(0xFFFF)
NODE_ID_KEY: Final = b"node_id"
PLACED_KEY: Final = b"placed"
"""Followed by a partition: the id of the node that has created it."""
_NODE_HOLD: Final = 0xFFFF
"""Holds the database open like a partition does."""
_CLOCK = SystemClock()


class RocksEngines:
    """Opens the partitions of one data directory. The database is open while one of them is."""

    def __init__(
        self,
        data_directory: Path,
        *,
        block_cache_bytes: int = BLOCK_CACHE_BYTES,
        write_buffer_bytes: int = WRITE_BUFFER_BYTES,
        disk: Callable[[], Disk] = DiskThread,
    ) -> None:
        self.directory = data_directory / "node"
        self._data_directory = data_directory
        self._memory = Memory(Cache(block_cache_bytes), write_buffer_bytes)
        self._disk = disk
        self._held: set[int] = set()
        """The partitions that are open or being opened."""
        self._database: NodeDatabase | None = None
        self._change: asyncio.Task[None] | None = None
        """An opening or closing of the database that is under way."""
        self._uncompacted: frozenset[Table] = frozenset()

    async def open(self, identity: Identity) -> "RocksEngine":
        partition = identity.partition
        if partition in self._held:
            raise DataDirectoryInUse(f"{self.directory}: partition {partition} is open already")
        self._held.add(partition)
        try:
            engine = RocksEngine(identity, await self._open_database(), self)
            await engine.check_identity()
        except BaseException:
            await self.release(partition)
            raise
        return engine

    async def hold(self) -> NodeDatabase:
        """The open database, which stays open until `release_node`."""
        self._held.add(_NODE_HOLD)
        return await self._open_database()

    async def release_node(self) -> None:
        await self.release(_NODE_HOLD)

    async def release(self, partition: int) -> None:
        """Give up a partition; the database is closed with the last one."""
        self._held.discard(partition)
        while not self._held and (self._database is not None or self._change is not None):
            if self._change is None:
                self._begin(self._close())
            with suppress(Exception):  # of an opening; those who asked for it get the error
                await self._changed()

    async def _open_database(self) -> NodeDatabase:
        """The open database. All who ask while it is being opened share the attempt."""
        while self._database is None or self._database.has_failed or self._change is not None:
            if self._change is None:
                self._begin(self._reopen())
            await self._changed()
        return self._database

    def _begin(self, change: Coroutine[object, object, None]) -> None:
        # In a context of its own: it works for all partitions, not for the one that came first.
        self._change = asyncio.get_running_loop().create_task(change, context=Context())

    async def _changed(self) -> None:
        assert self._change is not None, "a change is under way"
        await asyncio.shield(self._change)

    async def _reopen(self) -> None:
        try:
            await self._close_database()
            await asyncio.to_thread(_refuse_older_layout, self._data_directory)
            db = await asyncio.to_thread(
                open_database, self.directory, self._memory, uncompacted=self._uncompacted
            )
            self._database = NodeDatabase(self.directory, db, self._disk())
        finally:
            self._change = None

    async def _close(self) -> None:
        try:
            await self._close_database()
        finally:
            self._change = None

    async def _close_database(self) -> None:
        database, self._database = self._database, None
        if database is None:
            return
        if damaged := database.damaged_tables() - self._uncompacted:
            self._uncompacted |= damaged
            _log.error(
                "a bad block: its table is no longer compacted until the process restarts",
                extra={"tables": sorted(damaged), "directory": str(self.directory)},
            )
        await database.close()


class RocksEngine:
    """One partition of the database. Reads run on the event loop and never suspend."""

    def __init__(self, identity: Identity, database: NodeDatabase, engines: RocksEngines) -> None:
        self._identity = identity
        self._prefix = u16(identity.partition)
        self._opened_database: NodeDatabase | None = database
        self._engines = engines

    @property
    def identity(self) -> Identity:
        return self._identity

    @property
    def storage_epoch(self) -> int:
        return 0

    async def check_identity(self) -> None:
        """Refuse data of another format, cluster or partition; mark new data as ours."""
        mine, database = self._identity, self._database
        await check_node(database, mine.cluster_id, mine.partitions)
        expected = identity_value(mine)
        (stored,) = database.load(self._prefix, Table.META, [IDENTITY_KEY])
        if stored is None:
            if database.rows(self._prefix, Table.META, b"", None, 1):
                raise DataCorrupt(
                    f"{database.directory}: partition {mine.partition} has lost its identity",
                    file="CURRENT",
                )
            _refuse_to_create(database, mine.partition)
            await database.commit(self._prefix, _identity_row(expected))
        else:
            check_foreign(database.directory, stored, 8, mine.cluster_id, mine.partitions)
            if stored != expected:
                raise DataCorrupt(
                    f"{database.directory}: partition {mine.partition} has the identity of another",
                    file="CURRENT",
                )

    async def load(self, table: Table, keys: Sequence[bytes]) -> list[bytes | None]:
        return self._database.load(self._prefix, table, keys)

    async def scan(self, table: Table, start: bytes, end: bytes | None, *, limit: int) -> list[Row]:
        return self._database.rows(self._prefix, table, start, end, limit)

    def load_beside(self, table: Table, keys: Sequence[bytes]) -> list[bytes | None]:
        """Values for a reader: they do not displace what the writer has in the cache."""
        return self._database.load_beside(self._prefix, table, keys)

    def scan_beside(
        self, table: Table, start: bytes, end: bytes | None, limit: int, bytes_max: float
    ) -> list[Row]:
        """Rows for a reader: they do not displace what the writer has in the cache."""
        return self._database.rows(
            self._prefix, table, start, end, limit, bytes_max=bytes_max, fill_cache=False
        )

    async def commit(self, batch: Batch) -> None:
        database = self._database
        if batch:
            await database.commit(self._prefix, batch)

    def begin_commit(self, batch: Batch, ended: CommitEnded) -> bool:
        (self._opened_database or self._database).begin_commit(self._prefix, batch, ended)
        return True

    async def verify(self) -> None:
        self._database.verify()

    async def store_after_loss(self, batch: Batch) -> None:
        await self.commit(batch)  # no other process writes here

    async def wait_failed(self) -> None:
        await self._database.wait_failed()

    def reader(self) -> "RocksReader":
        self._database.check_open()
        return RocksReader(self)

    async def free_bytes(self) -> int:
        return self._database.disk_free_bytes()

    async def close(self) -> None:
        if self._opened_database is not None:
            self._opened_database = None
            await self._engines.release(self._identity.partition)

    @property
    def _database(self) -> NodeDatabase:
        if self._opened_database is None:
            raise EngineClosed(f"partition {self._identity.partition} is closed")
        return self._opened_database


class RocksReader:
    """Reads beside the writer, a slice of the event loop's time at a time."""

    def __init__(self, engine: RocksEngine) -> None:
        self._engine: RocksEngine | None = engine

    async def load(self, table: Table, keys: Sequence[bytes]) -> list[bytes | None]:
        return self._opened().load_beside(table, keys)

    async def scan(self, table: Table, start: bytes, end: bytes | None, *, limit: int) -> list[Row]:
        return self._opened().scan_beside(table, start, end, limit, math.inf)

    async def scan_chunks(
        self, table: Table, start: bytes, end: bytes | None, *, chunk_rows: int = 512
    ) -> AsyncIterator[list[Row]]:
        # Each chunk seeks again: an iterator kept open would pin old versions, and the directory.
        while chunk := self._opened().scan_beside(table, start, end, chunk_rows, CHUNK_BYTES_MAX):
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


async def check_node(database: NodeDatabase, cluster_id: str, partitions: int) -> int:
    """Refuse data of another format or cluster; mark a new database as ours.

    Returns the number of partitions. `partitions` is 0 where the data decides; then a new database
    stays unmarked, and the number is 0.
    """
    (stored,) = database.load(NODE_PREFIX, Table.META, [IDENTITY_KEY])
    if stored is not None:
        return check_foreign(database.directory, stored, 4, cluster_id, partitions)
    if not database.is_empty:
        raise DataCorrupt(f"{database.directory} has lost its identity", file="CURRENT")
    if partitions:
        identity = u32(FORMAT_VERSION) + u32(partitions) + text(cluster_id.encode())
        await database.commit(NODE_PREFIX, _identity_row(identity))
    return partitions


def _refuse_to_create(database: NodeDatabase, partition: int) -> None:
    """Refuse what another node has created: a node of several that is set up as the only one."""
    keys = [NODE_ID_KEY, PLACED_KEY + u16(partition)]
    node_id, creator = database.load(NODE_PREFIX, Table.META, keys)
    if creator not in (None, node_id):
        raise ClusterMismatch(
            f"{database.directory} belongs to one of several storage nodes, and another node has "
            f"created partition {partition}: TIDEMARK_STORAGE_ADDRESSES must name all of them"
        )


def _identity_row(value: bytes) -> Batch:
    batch = Batch()
    batch.put(Table.META, IDENTITY_KEY, value)
    return batch


def _refuse_older_layout(data_directory: Path) -> None:
    """Formats before 5 had a database per partition."""
    older = sorted(data_directory.glob("partition-[0-9]*"))
    if older:
        raise FormatNotSupported(
            f"{older[0]} is in a format before 5, with a database per partition; "
            f"this version reads {FORMAT_VERSION}. Start the version that wrote it to consume the "
            f"messages, then move these directories out of {data_directory}"
        )
