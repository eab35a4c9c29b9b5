"""Next due: when a rule of retention can next apply, without scanning (P3).

The index of ages gives the oldest messages of each topic and the oldest inactive queue; limits turn
them into times. Rows whose time has come may be out of date: they are reviewed in commits, which
move them, until one is found of which something is due.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from storage_svc.engines.age_rows import AgeKind, AgeRow
from storage_svc.engines.engine import Reader
from storage_svc.operations.abandoned_groups import expiry_ms
from storage_svc.operations.ages import AgeEntry, ReviewAges
from storage_svc.operations.history import RetentionType
from storage_svc.operations.retention import RECORD_TABLES
from storage_svc.operations.retention_rules import OF_MESSAGES
from storage_svc.partition.age_marks import FAR_MS
from storage_svc.partition.partition import Partition
from storage_svc.reads.due_tables import limit_ms
from tidemark.clock import Clock

REVIEWED_PER_COMMIT_MAX = 128
REVIEW_MS_MAX = 10_000
"""How long one call reviews. Then it answers, and the next call continues."""

BLOCKED_MS = 60_000
"""When to ask again about messages that are old enough, but reserved."""

_ROWS_PER_PAGE = 16
"""Rows of the index that are read at once. Most calls need the first one alone."""

_SEEKS_PER_SLICE = 100
"""Marks that are read before other work on the event loop gets its turn."""


class DueRules(NamedTuple):
    """The rules of a pass, and the ages that are settings of the pass."""

    types: frozenset[RetentionType]
    inactive_queue_age_ms: int = 0
    old_records_age_ms: int = 0


class NextDue(NamedTuple):
    """When a rule can apply; None if nothing that is stored will be due."""

    due_in_ms: int | None
    types: tuple[RetentionType, ...] = ()
    tables: tuple[str, ...] = ()


async def next_due(partition: Partition, rules: DueRules, clock: Clock) -> NextDue:
    """When the rules can next apply in a partition, and which of them can now."""
    asked = _Asked(partition, clock)
    types: list[RetentionType] = []
    tables: list[str] = []
    with partition.reader() as reader:
        of_messages = [kind for kind in OF_MESSAGES if kind in rules.types]
        if of_messages and await asked.messages(reader, rules.types):
            types += of_messages
        kind, age_ms = RetentionType.INACTIVE_QUEUE, rules.inactive_queue_age_ms
        if kind in rules.types and age_ms and await asked.inactive_queues(reader, age_ms):
            types.append(kind)
        kind = RetentionType.ABANDONED_GROUP
        if kind in rules.types and await asked.abandoned_groups(reader):
            types.append(kind)
        kind, age_ms = RetentionType.OLD_RECORDS, rules.old_records_age_ms
        if kind in rules.types and age_ms:
            tables = await asked.old_records(reader, age_ms)
            types += [kind] if tables else []
    if types:
        return NextDue(0, tuple(types), tuple(tables))
    if asked.next_ms is None:
        return NextDue(None)
    return NextDue(max(1, asked.next_ms - asked.now_ms))


class _Asked:
    """One call, with the earliest time that it has found so far."""

    def __init__(self, partition: Partition, clock: Clock) -> None:
        self.now_ms = partition.now_ms()
        self.next_ms: int | None = None
        self._partition = partition
        self._clock = clock
        self._seeks = 0
        self._until_ms = clock.monotonic_ms() + REVIEW_MS_MAX

    async def messages(self, reader: Reader, types: frozenset[RetentionType]) -> bool:
        """Whether messages of any topic are due."""
        for topic in self._partition.state.topics.limited():
            for kind in (AgeKind.WAITING, AgeKind.SETTLED):
                age_ms = limit_ms(topic.settings, kind, types)
                if age_ms and await self._is_topic_due(reader, kind, topic.name, age_ms):
                    return True
        return False

    async def abandoned_groups(self, reader: Reader) -> bool:
        """Whether groups of any topic are abandoned; none before storage knows the clients."""
        state = self._partition.state
        if not state.hold.knows_clients(self.now_ms):
            if state.topics.expiring():
                self._note(self.now_ms + BLOCKED_MS)
            return False
        for topic in state.topics.expiring():
            if await self._is_topic_due(reader, AgeKind.GROUPS, topic.name, expiry_ms(topic)):
                return True
        return False

    async def _is_topic_due(self, reader: Reader, kind: AgeKind, topic: str, age_ms: int) -> bool:
        """Whether anything of a kind is due in a topic; reads nothing if the mark shows that."""
        ages = self._partition.state.ages
        first_ms = ages.known_ms(kind, topic)
        if first_ms is None or first_ms + age_ms <= self.now_ms:
            first_ms = await ages.read(reader, kind, topic)
            self._seeks += 1
            if self._seeks % _SEEKS_PER_SLICE == 0:
                await self._clock.sleep_ms(0)
        return await self._is_due(reader, kind, topic, first_ms, age_ms)

    async def inactive_queues(self, reader: Reader, age_ms: int) -> bool:
        """Whether queues are inactive. None can be removed before storage knows the clients."""
        state = self._partition.state
        first_ms = await state.ages.read(reader, AgeKind.IDLE, "")
        if not state.hold.knows_clients(self.now_ms) and first_ms + age_ms <= self.now_ms:
            self._note(self.now_ms + BLOCKED_MS)
            return False
        return await self._is_due(reader, AgeKind.IDLE, "", first_ms, age_ms)

    async def old_records(self, reader: Reader, age_ms: int) -> list[str]:
        """The tables with old records."""
        due = []
        for name, table in RECORD_TABLES.items():
            first_ms = await self._partition.state.ages.first_record_ms(reader, table)
            if first_ms is None:
                continue
            if first_ms + age_ms <= self.now_ms:
                due.append(name)
            else:
                self._note(first_ms + age_ms)
        return due

    async def _is_due(
        self, reader: Reader, kind: AgeKind, topic: str, first_ms: int, age_ms: int
    ) -> bool:
        """Whether anything is due of the queues whose rows are old enough."""
        if first_ms + age_ms > self.now_ms:
            self._note(first_ms + age_ms)
            return False
        last_ms, after = self.now_ms - age_ms, b""
        ages, blocked = self._partition.state.ages, False
        while True:
            rows, after = await ages.due_rows(reader, kind, topic, last_ms, after, _ROWS_PER_PAGE)
            if not rows:
                break
            for some in _commits_of(rows):
                reviewed = await self._partition.call(ReviewAges(kind, topic, some, last_ms))
                if reviewed.due:
                    return True
                blocked |= reviewed.blocked
                if self._clock.monotonic_ms() > self._until_ms:
                    self._note(self.now_ms)
                    return False
        first_ms = await ages.read(reader, kind, topic)
        self._note(self.now_ms + BLOCKED_MS if blocked else first_ms + age_ms)
        return False

    def _note(self, at_ms: int) -> None:
        if at_ms < FAR_MS and (self.next_ms is None or at_ms < self.next_ms):
            self.next_ms = at_ms


def _commits_of(rows: Sequence[AgeRow]) -> Iterator[tuple[AgeEntry, ...]]:
    """The entries of rows, as many at a time as one commit reviews."""
    entries = [AgeEntry(row.time_ms, each) for row in rows for each in row.queue_ids]
    for start in range(0, len(entries), REVIEWED_PER_COMMIT_MAX):
        yield tuple(entries[start : start + REVIEWED_PER_COMMIT_MAX])
