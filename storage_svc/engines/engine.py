"""The engine protocol: an ordered key-value store with atomic, durable commits.

This module owns the protocol, the catalogue of tables and the batch; the engines beside it
implement it. It never touches a disk or a network and does not depend on messages.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, Self

from tidemark.errors import ClusterMismatch, DataDirectoryInUse, FormatNotSupported, StoreNotFit

FORMAT_VERSION = 9
"""Version of the key and value layouts. An engine refuses data written in any other."""

Row = tuple[bytes, bytes]
"""Key and value."""


class Table(StrEnum):
    """The tables of a partition.

    Keys are built with `keys.py`. Every integer is u64 unless a width is given, times are partition
    time in milliseconds, `text` is escape-terminated, and a `queue` is the queue_id, which is never
    used again; a `run` is named by the offset of its first message.

    | table           | key                             | value                                    |
    | --------------- | ------------------------------- | ---------------------------------------- |
    | META            | name                            | identity, claim, counters, time, spans   |
    |                 |                                 | of commit numbers, loss                  |
    | TOPICS          | text topic                      | settings and their version               |
    | CATALOG         | text topic, text lite           | queue_id, counts, activity; of a small   |
    |                 |                                 | queue also groups and reservations       |
    | QUEUES          | queue                           | lmq_name                                 |
    | RUN_HEADERS     | queue, text fairness key, run   | count, bytes, times, body if it is small |
    | RUN_BODIES      | queue, run                      | messages as published, unless small      |
    | GROUPS          | queue, text group               | base, counts, owner, mark of lane "", of |
    |                 |                                 | a queue with many groups                 |
    | LANES           | queue, text group, text key     | mark: run and offset to hand out next    |
    | RETURNED        | queue, text group, first offset | slices given back: history, delay, turn  |
    | BURIED          | queue, text group, first offset | empty: returned, not handed out again    |
    | DELAYS          | time, queue, text group, offset | empty: returned slices by not-before     |
    | RESERVATIONS    | queue, reservation id           | slice, deadline, epochs, what is open,   |
    |                 |                                 | unless it is part of the CATALOG row     |
    | SETTLED         | queue, last reservation id      | settled reservations, several in a row   |
    | DEADLINES       | time, queue, reservation id     | incarnation of the broker that holds it  |
    | SCHEDULE        | time, schedule id               | a scheduled run, no offset until due     |
    | SCHEDULED       | queue, schedule id              | when the run is due                      |
    | SCHEDULE_BODIES | schedule id                     | the messages of a scheduled run          |
    | TTL             | time, queue, run                | fairness key: runs by dead deadline      |
    | AGES            | kind, text topic, time, number  | queues by age (`age_rows.py`)            |
    | OUTBOX          | text destination, sequence      | a slice on its way to another queue      |
    | OUTBOX_BODIES   | sequence                        | the messages of that slice               |
    | HIGH_WATER      | u32 source, text destination    | highest outbox sequence appended         |
    | PRODUCERS       | text producer_id, last sequence | first answers that one commit gave       |
    | PRODUCER_INDEX  | time, text producer_id          | empty: producers by last use, to forget  |
    | ERASURES        | queue, u8 kind, u32 part        | what is left to erase: mark, then spans  |
    | HISTORY         | time, number                    | a row of retention_history               |
    | HISTORY_INDEX   | by all, topic or pass           | empty: rows of HISTORY, newest first     |
    | CONSUMED        | time, number                    | rows of messages_consumed of one commit  |
    | METRICS         | time, number                    | a row of system_metrics                  |
    """

    META = "meta"
    TOPICS = "topics"
    CATALOG = "catalog"
    QUEUES = "queues"
    RUN_HEADERS = "run_headers"
    RUN_BODIES = "run_bodies"
    GROUPS = "groups"
    LANES = "lanes"
    RETURNED = "returned"
    BURIED = "buried"
    DELAYS = "delays"
    RESERVATIONS = "reservations"
    SETTLED = "settled"
    DEADLINES = "deadlines"
    SCHEDULE = "schedule"
    SCHEDULED = "scheduled"
    SCHEDULE_BODIES = "schedule_bodies"
    TTL = "ttl"
    AGES = "ages"
    OUTBOX = "outbox"
    OUTBOX_BODIES = "outbox_bodies"
    HIGH_WATER = "high_water"
    PRODUCERS = "producers"
    PRODUCER_INDEX = "producer_index"
    ERASURES = "erasures"
    HISTORY = "history"
    HISTORY_INDEX = "history_index"
    CONSUMED = "consumed"
    METRICS = "metrics"


@dataclass(frozen=True, slots=True)
class Identity:
    """Which partition of which cluster the data belongs to. Written once, then only compared."""

    cluster_id: str
    partition: int
    partitions: int


class EngineClosed(RuntimeError):
    """The engine or the reader was used after it was closed, or closed while it was read."""


class EngineFailed(RuntimeError):
    """A write or a sync of the engine has failed: nothing can be committed until it is opened
    again. A call that raises this has written nothing."""


class EngineFenced(RuntimeError):
    """Another node has opened the partition since: nothing was written, and nothing will be. To
    open the engine again would take the partition back."""


class EngineDataLost(RuntimeError):
    """The store no longer has commits that it had confirmed, or has others in their place: nothing
    was written. A server that failed over to a lagging replica does that."""


READ_FAULTS = (EngineClosed, EngineFailed, EngineFenced, EngineDataLost)
"""Errors of reads, beside DataCorrupt: the partition is being closed, or its store does not have
what it had confirmed."""

REFUSALS = (
    ClusterMismatch,
    FormatNotSupported,
    DataDirectoryInUse,
    StoreNotFit,
    FileExistsError,
    NotADirectoryError,
    PermissionError,
)
"""Errors of `Engines.open` that come from a wrong setting. A process does not start with them; any
other error is a fault of the data or the disk, which the process reports while it serves."""

Operation = tuple[Table, bytes, bytes | None, bytes | None]
"""Table, key, value, range end. A put has a value, a range delete an end, a delete neither."""


class Batch:
    """Changes that become durable together. They apply in order: the last one to a key wins."""

    __slots__ = ("bytes_approx", "operations", "ranged_tables")

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.ranged_tables: set[Table] = set()
        self.bytes_approx = 0

    def __len__(self) -> int:
        return len(self.operations)

    def put(self, table: Table, key: bytes, value: bytes) -> None:
        self.operations.append((table, key, value, None))
        self.bytes_approx += len(key) + len(value)

    def delete(self, table: Table, key: bytes) -> None:
        self.operations.append((table, key, None, None))
        self.bytes_approx += len(key)

    def delete_all(self, table: Table, keys: Sequence[bytes]) -> None:
        """Delete many keys of one table; keys of one length, as those of neighbours are."""
        self.operations += [(table, key, None, None) for key in keys]
        self.bytes_approx += len(keys) * len(keys[0]) if keys else 0

    def delete_range(self, table: Table, start: bytes, end: bytes) -> None:
        """Delete from `start` up to, not including, `end`. For bulk only: see `Engine.commit`."""
        if start < end:
            self.operations.append((table, start, None, end))
            self.ranged_tables.add(table)
            self.bytes_approx += len(start) + len(end)

    def clear(self) -> None:
        self.operations.clear()
        self.ranged_tables.clear()
        self.bytes_approx = 0


CommitEnded = Callable[[Exception | None], None]
"""Gets the outcome of a commit: None once it is on disk, or why it is not, or may not be."""


class Reader(Protocol):
    """A live view beside the writer, for long reads; not a snapshot.

    It shows every key that does not change during the scan, and each call or chunk shows one
    moment. It pins no old versions, so a scan of minutes costs the writer nothing. Rows may not be
    durable yet: act on them through the writer, which checks again.
    """

    async def load(self, table: Table, keys: Sequence[bytes]) -> list[bytes | None]: ...

    async def scan(
        self, table: Table, start: bytes, end: bytes | None, *, limit: int
    ) -> list[Row]: ...

    def scan_chunks(
        self, table: Table, start: bytes, end: bytes | None, *, chunk_rows: int = 512
    ) -> AsyncIterator[list[Row]]:
        """The rows in chunks, bounded in rows and bytes so as to hold the event loop for under
        2 ms; a seek over many deleted keys takes longer. No chunk is empty."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class Engine(Protocol):
    """One partition's store. One process has it open; used from one event loop.

    Reads raise DataCorrupt rather than leave something out, and EngineClosed after `close`.
    """

    @property
    def identity(self) -> Identity: ...

    @property
    def storage_epoch(self) -> int:
        """Under which the partition is open; 0 where the data is in this process and locked.

        Otherwise it is on servers that nodes share: opening takes the partition over and raises
        the epoch. A read is a trip to them, which all reads that are called in one turn of the
        event loop share: a commit reads ahead the rows that its operations name."""
        ...

    async def load(self, table: Table, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values in the order of the keys, None where there is none."""
        ...

    async def scan(self, table: Table, start: bytes, end: bytes | None, *, limit: int) -> list[Row]:
        """At most `limit` rows, ascending, from `start` up to, not including, `end` (None: all).

        Deleted keys still cost the seek that passes over them. Where keys are deleted at the front,
        as in an index by time, remember the lowest live key and start there.
        """
        ...

    async def commit(self, batch: Batch) -> None:
        """Apply all of it or nothing; on disk when this returns.

        Commits take effect in the order of their calls and may overlap. The fence is checked: a
        node that has lost the partition gets EngineFenced, and nothing was written; EngineDataLost
        if commits are gone that were confirmed before. After
        CommitOutcomeUnknown every later commit fails too: close the engine and open it again.
        Range deletes slow reads down until the engine has written them out, which it does by
        itself: keep them for bulk.
        """
        ...

    def begin_commit(self, batch: Batch, ended: CommitEnded) -> bool:
        """The same without a coroutine, for partitions whose commits share a sync: all of them end
        in one turn of the event loop. `ended` gets the error of `commit`, and must not raise
        itself.

        False if the engine cannot, or has to wait first: then call `commit`.
        """
        ...

    async def verify(self) -> None:
        """Confirm that a commit made now would be accepted, before an answer that wrote nothing;
        raises EngineFailed, EngineFenced or EngineDataLost if not."""
        ...

    async def store_after_loss(self, batch: Batch) -> None:
        """After EngineDataLost, store a few rows that must be known where the partition is opened
        next. Raises EngineFenced, and writes nothing, if another node has opened it; writes nothing
        as well where the store has the lost commits again."""
        ...

    async def wait_failed(self) -> None:
        """Return once nothing can be committed any more, also if another partition's commit was
        the cause: close the engine and open it again."""
        ...

    def reader(self) -> Reader: ...

    async def free_bytes(self) -> int:
        """Free room where it stores; read every second, so it must be cheap. Raises what `verify`
        does if that was noticed on the way: the engine has failed then."""
        ...

    async def close(self) -> None:
        """Release the partition. Never raises: all commits are durable already."""
        ...


class Engines(Protocol):
    """Opens the engines of partitions."""

    async def open(self, identity: Identity) -> Engine:
        """Take the fence of this partition and open it; created if it does not exist.

        Where the fence is a lock, a partition that is open elsewhere is refused with
        DataDirectoryInUse. An engine that nodes share takes it over instead: the node that had it
        open gets EngineFenced from then on, also from this method. So two nodes never take a
        partition from each other in turns. If the store loses an opening, the node before is not
        deposed any more; the node that made it may open the partition again, and deposes it.

        Raises ClusterMismatch, FormatNotSupported, DataCorrupt, DiskFull.
        """
        ...
