"""Erasures: queues and runs that are removed from view, and still have rows in the engine.

Owns the marks of a partition in memory, and their rows. `operations/erase.py` erases the rows that
they cover, a bounded number per commit. Only large queues have marks: rows of a small one are
erased in the commit that removes them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from storage_svc.engines import erasure_rows
from storage_svc.engines.engine import Batch, Engine, Table
from storage_svc.engines.erasure_rows import ErasureKind
from storage_svc.engines.paging import scan_all
from storage_svc.queue.purge import PurgeMark

ERASED_AT_ONCE_MAX = 250
"""Runs, or reservations, or scheduled runs, up to which a queue is erased in the commit that
removes them, without a mark."""

NOTHING_PURGED = PurgeMark(0)


@dataclass(slots=True)
class Erasure:
    """Rows of one queue that are to be erased, and how far that is."""

    queue_id: int
    kind: ErasureKind
    purge: PurgeMark
    """The extent of a purge; empty for other kinds."""
    stage: int = 0
    """The table that is being erased, by its number among those of the kind."""
    cursor: bytes = b""
    """Where that continues; empty at the beginning of a table."""
    began_commit: int = -1
    """The number of the commit before the one that began it, in this opening."""
    unreadable: bool = False
    """Whether its rows cannot be read: it waits for the next opening, and the others go on."""

    def put(self, batch: Batch) -> None:
        """Write how far it is."""
        value = erasure_rows.erasure_value(
            self.purge.below, self.purge.schedules_to, self.stage, self.cursor
        )
        batch.put(Table.ERASURES, erasure_rows.erasure_key(self.queue_id, self.kind), value)


class Erasures:
    """The marks of a partition, oldest first."""

    def __init__(self) -> None:
        self.marks: dict[tuple[int, ErasureKind], Erasure] = {}
        """By queue and kind."""

    def __len__(self) -> int:
        return len(self.marks)

    def __iter__(self) -> Iterator[Erasure]:
        return iter(self.marks.values())

    def first(self) -> Erasure | None:
        """The oldest that can be continued."""
        return next((each for each in self if not each.unreadable), None)

    def concerns(self, queue_id: int) -> bool:
        """Whether rows of the queue are left that no longer count."""
        return bool(self.marks) and any((queue_id, kind) in self.marks for kind in ErasureKind)

    def has(self, queue_id: int, kind: ErasureKind) -> bool:
        return (queue_id, kind) in self.marks

    def purge_of(self, queue_id: int) -> PurgeMark | None:
        """The purge of a queue whose rows are still stored; None almost always."""
        if not self.marks:
            return None
        found = self.marks.get((queue_id, ErasureKind.PURGE))
        return None if found is None else found.purge

    def begin(self, erasure: Erasure, batch: Batch) -> None:
        """Add a mark, which takes the place of one of the same kind."""
        self.marks[erasure.queue_id, erasure.kind] = erasure
        erasure.put(batch)

    async def begin_purge(self, erasure: Erasure, engine: Engine, batch: Batch) -> None:
        """The same for a purge, with the spans that it spares."""
        start, end = erasure_rows.erasure_range(erasure.queue_id, ErasureKind.PURGE)
        async for key, _ in scan_all(engine, Table.ERASURES, start, end):
            batch.delete(Table.ERASURES, key)
        for key, value in erasure_rows.span_rows(erasure.queue_id, erasure.purge.spared):
            batch.put(Table.ERASURES, key, value)
        self.begin(erasure, batch)

    async def end(self, erasure: Erasure, engine: Engine, batch: Batch) -> None:
        """Everything is erased."""
        start, end = erasure_rows.erasure_range(erasure.queue_id, erasure.kind)
        async for key, _ in scan_all(engine, Table.ERASURES, start, end):
            batch.delete(Table.ERASURES, key)
        del self.marks[erasure.queue_id, erasure.kind]

    async def load(self, engine: Engine) -> None:
        """Read the marks that an earlier opening has left."""
        parts: list[tuple[int, int]] = []
        # The row of an erasure comes before its parts.
        head: tuple[int, ErasureKind, bytes] | None = None
        async for key, value in scan_all(engine, Table.ERASURES, b"", None):
            queue_id, kind, part = erasure_rows.read_erasure_key(key)
            if part:
                parts += erasure_rows.read_spans(value)
                continue
            self._add(head, parts)
            head, parts = (queue_id, kind, value), []
        self._add(head, parts)

    def _add(
        self, head: tuple[int, ErasureKind, bytes] | None, spared: list[tuple[int, int]]
    ) -> None:
        if head is None:
            return
        queue_id, kind, value = head
        below, schedules_to, stage, cursor = erasure_rows.read_erasure(value)
        mark = PurgeMark(below, schedules_to, spared)
        self.marks[queue_id, kind] = Erasure(queue_id, kind, mark, stage, cursor)
