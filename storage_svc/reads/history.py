"""The retention history for operators: from the newest, by queue, topic or pass (R6).

A page is read from where the last one ended, in the order of the index, so that its cost depends on
the rows that it shows. Rows that only the type or the queue excludes are read and passed over; a
page ends early after a bounded number of them, and the next one continues.
"""

from collections.abc import Iterable, Sequence
from heapq import merge
from typing import NamedTuple

from storage_svc.engines import history_rows
from storage_svc.engines.engine import Table
from storage_svc.engines.history_rows import HistoryRow, history_key, index_prefix, newest_first
from storage_svc.engines.keys import prefix_end, read_u64x2, u64x2
from storage_svc.operations.history import RetentionType
from storage_svc.partition.partition import Partition
from tidemark.errors import InvalidArgument
from tidemark.names import topic_of

EXAMINED_MAX = 1_000
"""Stored rows that one page reads where the index does not decide."""

_U64_MAX = 2**64 - 1


class HistoryFilter(NamedTuple):
    """The rows to list; empty values do not restrict."""

    type: RetentionType | None = None
    lmq_name: str = ""
    topic: str = ""
    pass_id: str = ""

    @property
    def is_partial(self) -> bool:
        """Whether the index has rows that the filter excludes."""
        return bool(self.type or self.lmq_name or (self.topic and self.pass_id))

    def includes(self, row: HistoryRow) -> bool:
        return (
            (self.type is None or row.type == self.type.value)
            and self.topic in ("", row.topic)
            and self.pass_id in ("", row.pass_id)
        )


class Removed(NamedTuple):
    """The removals from one queue, by one commit."""

    partition: int
    lmq_name: str
    messages: int
    body_bytes: int
    row: HistoryRow


class _Place(NamedTuple):
    """A stored row in the order of the list, and how many of its queues were listed already."""

    time_ms: int
    partition: int
    number: int
    queues: int = 0

    @classmethod
    def read(cls, token: str) -> "_Place":
        parts = token.split("-")
        numbers = [int(part) for part in parts if part.isascii() and part.isdigit()]
        if len(parts) != 4 or len(numbers) != 4 or max(numbers) > _U64_MAX:
            raise InvalidArgument("not a page token of this call", field="page_token")
        return cls(*numbers)

    def __str__(self) -> str:
        return "-".join(map(str, self))


async def list_history(
    partitions: Iterable[Partition], wanted: HistoryFilter, token: str, limit: int
) -> tuple[list[Removed], str]:
    """A page, and the token of the next; an empty token after the last page."""
    begin = _Place.read(token) if token else None
    topic = wanted.topic or (topic_of(wanted.lmq_name) if wanted.lmq_name else "")
    prefix = index_prefix(topic=topic, pass_id=wanted.pass_id)
    by_number = {each.number: each for each in partitions}
    examined_max = EXAMINED_MAX if wanted.is_partial else limit + 1
    found = [await _places(each, prefix, begin, examined_max) for each in by_number.values()]
    listed: list[Removed] = []
    ordered = merge(*found, key=lambda each: (-each.time_ms, each.partition, -each.number))
    for examined, place in enumerate(ordered):
        if examined == examined_max:
            return listed, str(place)
        row = await _row(by_number[place.partition], place)
        if row is None or not wanted.includes(row):
            continue
        is_first = begin is not None and place[:3] == begin[:3]
        skipped = begin.queues if begin is not None and is_first else 0
        for at, (lmq_name, messages, body_bytes) in enumerate(row.queues[skipped:], skipped):
            if wanted.lmq_name not in ("", lmq_name):
                continue
            if len(listed) == limit:
                return listed, str(place._replace(queues=at))
            listed.append(Removed(place.partition, lmq_name, messages, body_bytes, row))
    return listed, ""


async def _places(
    partition: Partition, prefix: bytes, begin: _Place | None, examined_max: int
) -> Sequence[_Place]:
    """The next rows of a partition, as many as a page may read."""
    start = prefix
    if begin is not None:
        # Rows of one moment are listed partition by partition.
        if partition.number == begin.partition:
            start += newest_first(begin.time_ms, begin.number)
        elif partition.number > begin.partition:
            start += newest_first(begin.time_ms, _U64_MAX)
        elif begin.time_ms:
            start += newest_first(begin.time_ms - 1, _U64_MAX)
        else:
            return []
    async with partition.reading():
        with partition.reader() as reader:
            keys = await reader.scan(
                Table.HISTORY_INDEX, start, prefix_end(prefix), limit=examined_max + 1
            )
    places = (read_u64x2(history_key(key)) for key, _ in keys)
    return [_Place(time_ms, partition.number, number) for time_ms, number in places]


async def _row(partition: Partition, place: _Place) -> HistoryRow | None:
    key = u64x2(place.time_ms, place.number)
    async with partition.reading():
        with partition.reader() as reader:
            (value,) = await reader.load(Table.HISTORY, [key])
    return None if value is None else history_rows.read_history(key, value)
