"""The first row of each topic in the index of ages, remembered, so that asking costs no seek.

A mark is a lower bound: rows leave the index without changing it. Scans start at the mark, so that
rows deleted before it cost nothing. A row that is added while a mark is being read may be missing
in the result: where the store is another process, commits end in the meantime.
"""

from dataclasses import dataclass

from storage_svc.engines.age_rows import (
    AgeKind,
    AgeRow,
    age_prefix,
    age_range,
    read_age,
    read_age_ms,
)
from storage_svc.engines.engine import Reader, Table
from storage_svc.engines.keys import prefix_end, read_u64, successor, u64

FAR_MS = 2**62
"""The time of the first row where there is none."""


@dataclass(slots=True, eq=False)
class _MarkRead:
    """A mark that is being read, and the earliest row that was added meanwhile."""

    place: tuple[AgeKind, str]
    added_ms: int = FAR_MS


class AgeMarks:
    """The marks of one partition. They are read when they are first asked for."""

    __slots__ = ("_firsts", "_reads", "_records")

    def __init__(self) -> None:
        self._firsts: dict[tuple[AgeKind, str], int] = {}
        self._reads: list[_MarkRead] = []
        self._records: dict[Table, int] = {}

    def added(self, kind: AgeKind, topic: str, time_ms: int) -> None:
        """A row was added."""
        for read in self._reads:
            if read.place == (kind, topic):
                read.added_ms = min(read.added_ms, time_ms)
        first_ms = self._firsts.get((kind, topic))
        if first_ms is not None and time_ms < first_ms:
            self._firsts[kind, topic] = time_ms

    def known_ms(self, kind: AgeKind, topic: str) -> int | None:
        """The time before which there is no row; None if that was not read yet."""
        return self._firsts.get((kind, topic))

    async def read(self, reader: Reader, kind: AgeKind, topic: str) -> int:
        """Read the time of the first row; far in the future if there is none."""
        start, _ = age_range(kind, topic, self._firsts.get((kind, topic), 0), 0)
        end = prefix_end(age_prefix(kind, topic))
        read = _MarkRead((kind, topic))
        self._reads.append(read)
        try:
            found = await reader.scan(Table.AGES, start, end, limit=1)
        finally:
            self._reads.remove(read)
        first_ms = min(read.added_ms, read_age_ms(found[0][0]) if found else FAR_MS)
        self._firsts[kind, topic] = first_ms
        return first_ms

    async def due_rows(
        self, reader: Reader, kind: AgeKind, topic: str, last_ms: int, after: bytes, limit: int
    ) -> tuple[list[AgeRow], bytes]:
        """Rows up to a time, oldest first, behind the key `after`; and the key of the last one."""
        start, end = age_range(kind, topic, self._firsts.get((kind, topic), 0), last_ms)
        start = max(start, successor(after)) if after else start
        if start >= end:
            return [], after
        found = await reader.scan(Table.AGES, start, end, limit=limit)
        return [read_age(*row) for row in found], found[-1][0] if found else after

    async def first_record_ms(self, reader: Reader, table: Table) -> int | None:
        """The time of the oldest row of a table of records; None if it is empty."""
        start = u64(self._records.get(table, 0))
        found = await reader.scan(table, start, None, limit=1)
        if not found:
            return None
        self._records[table] = first_ms = read_u64(found[0][0])
        return first_ms
