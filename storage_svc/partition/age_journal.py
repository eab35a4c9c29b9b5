"""The index of ages in one commit: gathers the entries that change, and writes them together.

Entries of the same kind, topic and time share rows. An entry that leaves is found by its time: rows
of that time are read and written again without it, once per commit however many leave. Publishing
only adds entries, which needs no read.
"""

from collections.abc import Callable, Collection, Iterable

from storage_svc.engines.age_rows import (
    QUEUES_PER_ROW_MAX,
    AgeKind,
    Bounds,
    age_key,
    age_range,
    age_value,
    read_age,
)
from storage_svc.engines.engine import Batch, Engine, Row, Table
from storage_svc.engines.paging import scan_all
from storage_svc.queue.record import QueueRecord
from tidemark.names import topic_of

_WAITING, _, _IDLE, _ = _KINDS = tuple(range(4))
"""The kinds by their places in the bounds of a record: an Enum is slow as a key."""

_OF_NUMBER = tuple(AgeKind)
_NO_BOUNDS: Bounds = (0, 0, 0, 0)

_ROWS_PER_TIME_MAX = 4
"""Rows that a scan over several times may read for each of them, before it reads time by time."""

_Place = tuple[int, str, int]
"""Kind, topic ("" for idle queues) and time. A plain tuple: settlements make many."""


class AgeJournal:
    """The entries that one commit adds and removes."""

    __slots__ = ("_added", "_removed")

    def __init__(self) -> None:
        self._added: dict[_Place, dict[int, None]] = {}
        self._removed: dict[_Place, set[int]] = {}

    def follow(self, records: Iterable[QueueRecord]) -> None:
        """Bring the entries of queues to the bounds in their records.

        Publishing pays for this: one loop without calls for queues with a first message, which
        mostly share a place.
        """
        added_topic, added_ms = "", 0
        added: dict[int, None] = {}
        for record in records:
            before_ms, settled_ms, idle_ms, groups_ms = record.indexed
            waiting_ms = record.waiting_since_ms
            if (
                record.idle_since_ms == idle_ms
                and record.settled_since_ms == settled_ms
                and record.groups_since_ms == groups_ms
                and not before_ms  # its first message
            ):
                topic = topic_of(record.lmq_name)
                if topic != added_topic or waiting_ms != added_ms:
                    added_topic, added_ms = topic, waiting_ms
                    added = self._added.setdefault((_WAITING, topic, waiting_ms), {})
                added[record.queue_id] = None
                record.indexed = (waiting_ms, settled_ms, idle_ms, groups_ms)
                continue
            bounds = record.bounds
            self.move(topic_of(record.lmq_name), record.queue_id, record.indexed, bounds)
            record.indexed = bounds

    def move(self, topic: str, queue_id: int, before: Bounds, after: Bounds) -> None:
        """Replace the entries of a queue by others."""
        for kind in _KINDS:
            before_ms, time_ms = before[kind], after[kind]
            if before_ms == time_ms:
                continue
            of_topic = "" if kind == _IDLE else topic
            if before_ms:
                self._remove((kind, of_topic, before_ms), queue_id)
            if time_ms:
                self._add((kind, of_topic, time_ms), queue_id)

    def move_all(
        self, topic: str, queue_ids: Collection[int], before: Bounds, after: Bounds
    ) -> None:
        """The same for queues of one topic that have the same bounds."""
        for kind in _KINDS:
            before_ms, time_ms = before[kind], after[kind]
            if before_ms == time_ms:
                continue
            of_topic = "" if kind == _IDLE else topic
            if before_ms:
                place = (kind, of_topic, before_ms)
                if place in self._added:
                    for queue_id in queue_ids:
                        self._remove(place, queue_id)
                else:
                    self._removed.setdefault(place, set()).update(queue_ids)
            if time_ms:
                added = self._added.setdefault((kind, of_topic, time_ms), {})
                added.update(dict.fromkeys(queue_ids))

    def remove(self, kind: AgeKind, topic: str, time_ms: int, queue_id: int) -> None:
        """Remove an entry that no queue has."""
        self._remove((_OF_NUMBER.index(kind), topic, time_ms), queue_id)

    def _add(self, place: _Place, queue_id: int) -> None:
        entries = self._added.get(place)
        if entries is None:
            entries = self._added[place] = {}
        entries[queue_id] = None

    def _remove(self, place: _Place, queue_id: int) -> None:
        added = self._added.get(place)
        if added is not None and queue_id in added:
            del added[queue_id]  # it was added by this very commit
        else:
            self._removed.setdefault(place, set()).add(queue_id)

    def forget(self, record: QueueRecord) -> None:
        """Remove the entries of a queue that is removed."""
        self.move(topic_of(record.lmq_name), record.queue_id, record.indexed, _NO_BOUNDS)
        record.indexed = _NO_BOUNDS

    @property
    def added(self) -> Iterable[tuple[AgeKind, str, int]]:
        """Kind, topic and time of the entries that were added."""
        return ((_OF_NUMBER[kind], topic, time_ms) for kind, topic, time_ms in self._added)

    async def write(self, engine: Engine, batch: Batch, next_number: Callable[[], int]) -> None:
        """Write the rows. The numbers must never have been used before."""
        removed = _by_topic(self._removed) if self._removed else {}
        for (number, topic), times in removed.items():
            kind = _OF_NUMBER[number]
            for key, value in await _rows_at(engine, kind, topic, times):
                time_ms, queue_ids = read_age(key, value)
                gone = self._removed.get((number, topic, time_ms), ())
                left = [each for each in queue_ids if each not in gone]
                if len(left) == len(queue_ids):
                    continue
                batch.delete(Table.AGES, key)
                if left:  # under another key: engines may expect that rows here never change
                    key = age_key(kind, topic, time_ms, next_number())
                    batch.put(Table.AGES, key, age_value(left))
        for (number, topic, time_ms), entries in self._added.items():
            queue_ids = tuple(entries)
            for start in range(0, len(queue_ids), QUEUES_PER_ROW_MAX):
                some = queue_ids[start : start + QUEUES_PER_ROW_MAX]
                key = age_key(_OF_NUMBER[number], topic, time_ms, next_number())
                batch.put(Table.AGES, key, age_value(some))


def moved_bounds(records: Iterable[QueueRecord]) -> list[QueueRecord]:
    """Those of the queues that a commit has changed whose entries have to follow. Every commit pays
    for this: the bounds of nearly all stay."""
    moved = []
    for record in records:
        if not (record.messages or record.scheduled or record.idle_since_ms):
            record.idle_since_ms = max(1, record.last_activity_ms)
        waiting_ms, settled_ms, idle_ms, groups_ms = record.indexed
        if (
            record.waiting_since_ms != waiting_ms
            or record.settled_since_ms != settled_ms
            or record.idle_since_ms != idle_ms
            or record.groups_since_ms != groups_ms
        ):
            moved.append(record)
    return moved


def _by_topic(places: Iterable[_Place]) -> dict[tuple[int, str], list[int]]:
    times: dict[tuple[int, str], list[int]] = {}
    for number, topic, time_ms in places:
        times.setdefault((number, topic), []).append(time_ms)
    return times


async def _rows_at(engine: Engine, kind: AgeKind, topic: str, times: Collection[int]) -> list[Row]:
    """The rows of some times. A pass removes neighbours, which one scan reads together."""
    start, end = age_range(kind, topic, min(times), max(times))
    limit = _ROWS_PER_TIME_MAX * len(times) + QUEUES_PER_ROW_MAX
    found = await engine.scan(Table.AGES, start, end, limit=limit)
    if len(found) < limit:
        return found
    return [
        row
        for time_ms in times
        async for row in scan_all(engine, Table.AGES, *age_range(kind, topic, time_ms, time_ms))
    ]
