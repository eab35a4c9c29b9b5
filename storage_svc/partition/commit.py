"""A unit of work: everything that operations of one commit share.

Gives operations what they may use: the time of the commit, handles, counters, topics, the journal.
It decides nothing itself; each subject has a module of its own that works on a unit.
"""

from dataclasses import dataclass, field

from storage_svc.engines import rows
from storage_svc.engines.engine import Engine, Table
from storage_svc.loading.handles import Handles
from storage_svc.operations.producers import Producers
from storage_svc.partition.counters import Claim, Counters
from storage_svc.partition.journal import BatchJournal
from storage_svc.partition.topics import Topics
from storage_svc.queue.bodies import BodyCache
from storage_svc.queue.lane import Run
from tidemark.errors import TidemarkError


@dataclass(slots=True)
class Memory:
    """What a partition knows while it is open; dropped whole when a commit fails."""

    engine: Engine
    counters: Counters
    claim: Claim
    topics: Topics
    handles: Handles
    producers: Producers
    bodies: BodyCache = field(default_factory=BodyCache)
    marks: dict[Table, int] = field(default_factory=dict)
    """Where reading an index by time begins: everything before it is gone (V5)."""

    def lower_mark(self, table: Table, time_ms: int) -> None:
        """Reading an index may not begin later than an entry that was added."""
        if time_ms < self.marks.get(table, 0):
            self.marks[table] = time_ms


@dataclass(slots=True)
class Unit:
    """One commit in the making."""

    memory: Memory
    journal: BatchJournal
    partition: int
    partitions: int
    now_ms: int
    disk_full: bool = False
    publishes_refused: TidemarkError | None = None
    deletions_refused: TidemarkError | None = None
    handed_out_bytes: int = 0
    """Bodies that the answers of this commit carry."""

    def indexed(self, table: Table, time_ms: int) -> None:
        """An entry is added to an index by time."""
        self.memory.lower_mark(table, time_ms)
        # Once more after the commit: a scan in between may raise the mark past what it cannot see.
        self.journal.indexed.append((table, time_ms))

    def count(self) -> None:
        """Bring the counters to what they are once this commit is durable."""
        counters = self.memory.counters
        counters.commit += 1
        counters.time_ms = self.now_ms
        counters.record = self.journal.next_record
        counters.messages += self.journal.messages
        counters.body_bytes += self.journal.body_bytes
        counters.published += self.journal.published

    async def body(self, queue_id: int, run: Run) -> bytes:
        """The body of a run, wherever it is."""
        key = rows.body_key(queue_id, run)
        body = self.journal.bodies.get(key) or self.memory.bodies.get(key)
        if body is None:
            (body,) = await self.memory.engine.load(Table.RUN_BODIES, [key])
            assert body is not None, "a header is written and deleted together with its body"
            self.memory.bodies.add(key, body)
        return body
