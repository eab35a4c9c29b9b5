"""A store in memory that several storage nodes share, and the engines that open its partitions.

It keeps the promises of a shared engine, storage epochs and marks included, and can be told to
break those of its servers: answers are lost before or after the commit, the last commits vanish as
in a failover to a lagging replica, and a node stands still. Every call takes a trip of its own.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import NamedTuple

from storage_svc.engines.engine import (
    Batch,
    CommitEnded,
    EngineClosed,
    EngineDataLost,
    EngineFailed,
    EngineFenced,
    Identity,
    Row,
    Table,
)
from storage_svc.engines.identity import IDENTITY_KEY, check_identity, identity_value
from storage_svc.engines.keys import read_u64
from storage_svc.engines.marks import Fate, Mark, fate_of
from storage_svc.engines.paged_reader import PagedReader
from tidemark.clock import SystemClock
from tidemark.errors import CommitOutcomeUnknown

ATTEMPTS_MAX = 3
_UNDO_MAX = 1_000
_opened = count(1)
_generations = count(1)


class Confirmed(NamedTuple):
    """A commit or a verification that succeeded."""

    partition: int
    mark: Mark
    """Of the commit, or of the node that asked."""
    newest_epoch: int
    follows: bytes | None = None
    """The id of the commit before it; None for a verification."""
    number: int = 0
    """The number that the partition gave the commit; 0 if it gave none."""


class TailLost(NamedTuple):
    """The last commits have vanished; this is the mark then."""

    partition: int
    mark: Mark


class LostAnswer(Enum):
    """When the connection breaks."""

    BEFORE_WRITING = "nothing is written"
    AFTER_WRITING = "everything is written"


class _ConnectionLost(Exception):
    """An answer did not arrive."""


async def _some_turns() -> None:
    for _ in range(3):
        await SystemClock().sleep_ms(0)


@dataclass(slots=True)
class _Rows:
    """One table; sorted when it is scanned."""

    values: dict[bytes, bytes] = field(default_factory=dict)
    sorted_keys: list[bytes] | None = None

    def change(self, key: bytes, value: bytes | None) -> bytes | None:
        """Returns the value before."""
        before = self.values.get(key)
        if value is None:
            self.values.pop(key, None)
        else:
            self.values[key] = value
        if (before is None) != (value is None):
            self.sorted_keys = None
        return before

    def range(self, start: bytes, end: bytes | None) -> list[bytes]:
        if self.sorted_keys is None:
            self.sorted_keys = sorted(self.values)
        return [key for key in self.sorted_keys if key >= start and (end is None or key < end)]


@dataclass(slots=True)
class _Stored:
    """One partition in the store."""

    mark: Mark = field(default_factory=lambda: Mark(0, b"", 0, b""))
    tables: dict[Table, _Rows] = field(default_factory=lambda: {each: _Rows() for each in Table})
    undo: deque[tuple[Mark, list[tuple[Table, bytes, bytes | None]]]] = field(
        default_factory=lambda: deque(maxlen=_UNDO_MAX)
    )

    def apply(self, on: Mark, commit: Mark, batch: Batch) -> Mark | None:
        """None if it is applied; else the mark that it does not follow."""
        if self.mark != on:
            return self.mark
        before: list[tuple[Table, bytes, bytes | None]] = []
        for table, key, value, end in batch.operations:
            rows = self.tables[table]
            keys = [key] if end is None else rows.range(key, end)
            before += [(table, each, rows.change(each, value)) for each in keys]
        self.undo.append((self.mark, before))
        self.mark = commit
        return None

    def put_all(self, batch: Batch) -> None:
        """Without a commit: the mark stays."""
        for table, key, value, _ in batch.operations:
            self.tables[table].change(key, value)

    def lose_last(self) -> None:
        mark, before = self.undo.pop()
        for table, key, value in reversed(before):
            self.tables[table].change(key, value)
        self.mark = mark


class SharedStore:
    """The servers. `trip` is what every request and every answer takes."""

    def __init__(self, trip: Callable[[], Awaitable[None]] = _some_turns) -> None:
        self.trip = trip
        self.next_answer: LostAnswer | None = None
        """How the next answer to a commit is lost; None after it was, and by default."""
        self.is_down = False
        """While it is, every answer is lost before anything is written."""
        self.log: list[Confirmed | TailLost] = []
        """What was confirmed and what was lost, in order."""
        self.generations: dict[bytes, int] = {}
        """Of the nodes that opened a partition, by their openings."""
        self._stored: dict[int, _Stored] = {}

    def stored(self, partition: int) -> _Stored:
        return self._stored.setdefault(partition, _Stored())

    def lose_tail(self, partition: int, commits: int) -> None:
        """Forget the last commits."""
        for _ in range(commits):
            self.stored(partition).lose_last()
        self.log.append(TailLost(partition, self.stored(partition).mark))

    def lost(self) -> LostAnswer | None:
        if self.is_down:
            return LostAnswer.BEFORE_WRITING
        lost, self.next_answer = self.next_answer, None
        return lost


class SharedEngines:
    """The engines of one node."""

    def __init__(self, store: SharedStore) -> None:
        self.store = store
        self.running = asyncio.Event()
        """While it is clear, the node stands still: nothing of it reaches the store."""
        self.running.set()
        self._epochs: dict[int, int] = {}
        """Under which this node has opened partitions last."""
        self._generations: dict[int, int] = {}

    async def open(self, identity: Identity) -> "SharedEngine":
        await self.store.trip()
        await self.running.wait()
        stored = self.store.stored(identity.partition)
        epoch = self._epochs.get(identity.partition, stored.mark.epoch)
        generation = self.store.generations.get(stored.mark.opening, 0)
        own = self._generations.setdefault(identity.partition, next(_generations))
        if epoch < stored.mark.epoch and own <= generation:
            raise EngineFenced(f"partition {identity.partition} is open elsewhere")
        meta = stored.tables[Table.META]
        written = meta.values.get(IDENTITY_KEY)
        if written is None:
            meta.change(IDENTITY_KEY, identity_value(identity))
        else:
            check_identity(f"partition {identity.partition}", written, identity)
        opening = b"%d" % next(_opened)
        stored.mark = stored.mark._replace(epoch=max(epoch, stored.mark.epoch) + 1, opening=opening)
        self.store.generations[opening] = own
        self._epochs[identity.partition] = stored.mark.epoch
        return SharedEngine(identity, stored, self)

    def is_later(self, stored: Mark, identity: Identity) -> bool:
        """Whether a node made the stored opening that has opened the partition after this one."""
        generation = self.store.generations.get(stored.opening, 0)
        return generation > self._generations[identity.partition]


class SharedEngine:
    """One partition, open under one epoch."""

    def __init__(self, identity: Identity, stored: _Stored, engines: SharedEngines) -> None:
        self._identity = identity
        self._stored = stored
        self._engines = engines
        self._mark = stored.mark
        self._order = asyncio.Lock()
        self._failed = asyncio.Event()
        self._closed = False

    @property
    def identity(self) -> Identity:
        return self._identity

    @property
    def storage_epoch(self) -> int:
        return self._mark.epoch

    async def load(self, table: Table, keys: Sequence[bytes]) -> list[bytes | None]:
        await self._trip()
        return [self._stored.tables[table].values.get(key) for key in keys]

    async def scan(self, table: Table, start: bytes, end: bytes | None, *, limit: int) -> list[Row]:
        return await self.page(table, start, end, limit, 1 << 40)

    async def page(
        self, table: Table, start: bytes, end: bytes | None, rows_max: int, bytes_max: int
    ) -> list[Row]:
        await self._trip()
        rows, page, size = self._stored.tables[table], list[Row](), 0
        for key in rows.range(start, end)[:rows_max]:
            if size >= bytes_max:
                break
            page.append((key, rows.values[key]))
            size += len(key) + len(page[-1][1])
        return page

    async def commit(self, batch: Batch) -> None:
        self._check_open()
        if batch:  # a caller that is cancelled leaves its commit to its fate
            await asyncio.shield(asyncio.ensure_future(self._commit_in_order(batch)))

    def begin_commit(self, batch: Batch, ended: CommitEnded) -> bool:
        return False

    async def _commit_in_order(self, batch: Batch) -> None:
        async with self._order:
            if self._failed.is_set():
                raise CommitOutcomeUnknown("a commit before it failed")
            sequence = self._mark.sequence + 1
            commit_id = b"%b-%d" % (self._mark.opening, sequence)
            commit = self._mark._replace(sequence=sequence, commit_id=commit_id)
            try:
                await self._send(commit, batch)
            except BaseException:
                self._failed.set()
                raise
            self._mark = commit

    async def verify(self) -> None:
        await self._trip()
        if self._failed.is_set():
            raise EngineFailed("a commit before it failed")
        if self._stored.mark.epoch > self._mark.epoch:
            raise EngineFenced(f"partition {self._identity.partition} is open elsewhere")
        if self._stored.mark != self._mark:
            raise EngineDataLost(f"partition {self._identity.partition} lost its last commits")
        partition, newest = self._identity.partition, self._stored.mark.epoch
        self._engines.store.log.append(Confirmed(partition, self._mark, newest))
        await self._engines.store.trip()

    async def store_after_loss(self, batch: Batch) -> None:
        await self._trip()
        if self._engines.store.is_down:
            raise EngineFailed("the store does not answer")
        stored = self._stored.mark
        if stored.opening == self._mark.opening:
            if stored.sequence >= self._mark.sequence:
                return
        elif stored.epoch >= self._mark.epoch or self._engines.is_later(stored, self._identity):
            raise EngineFenced(f"partition {self._identity.partition} is open elsewhere")
        self._stored.put_all(batch)
        await self._engines.store.trip()

    async def wait_failed(self) -> None:
        await self._failed.wait()

    def reader(self) -> PagedReader:
        self._check_open()
        return PagedReader(self)

    async def free_bytes(self) -> int:
        return 1 << 50

    async def close(self) -> None:
        self._closed = True

    # --- inside --------------------------------------------------------------------------------

    async def _send(self, commit: Mark, batch: Batch) -> None:
        for _ in range(ATTEMPTS_MAX):
            try:
                refused = await self._ask(commit, batch)
            except _ConnectionLost:
                continue
            fate = Fate.DONE if refused is None else fate_of(self._mark, commit, refused)
            if fate is Fate.DONE:
                return
            if fate is Fate.FENCED:
                raise EngineFenced(f"partition {self._identity.partition} is open elsewhere")
            if fate is Fate.LOST:
                raise EngineDataLost(f"partition {self._identity.partition} lost its last commits")
            break
        raise CommitOutcomeUnknown(f"no answer for partition {self._identity.partition}")

    async def _ask(self, commit: Mark, batch: Batch) -> Mark | None:
        store = self._engines.store
        await self._trip()
        lost = store.lost()
        if lost is LostAnswer.BEFORE_WRITING:
            raise _ConnectionLost
        follows = self._stored.mark.commit_id
        refused = self._stored.apply(self._mark, commit, batch)
        if refused is None:
            newest, number = self._stored.mark.epoch, _number_of(batch)
            done = Confirmed(self._identity.partition, commit, newest, follows, number)
            store.log.append(done)
        await store.trip()
        if lost is LostAnswer.AFTER_WRITING:
            raise _ConnectionLost
        return refused

    async def _trip(self) -> None:
        self._check_open()
        await self._engines.store.trip()
        await self._engines.running.wait()
        self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed(f"partition {self._identity.partition} is closed")


def _number_of(batch: Batch) -> int:
    """The number of a commit: the first of the counters that it stores."""
    for table, key, value, _ in batch.operations:
        if table is Table.META and key == b"counters" and value is not None:
            return read_u64(value)
    return 0
