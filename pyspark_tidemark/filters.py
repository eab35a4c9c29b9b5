"""The conditions on rows that storage evaluates, from options and from pushed filters.

Pure. Every condition is exact: Spark does not evaluate it a second time.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final, TypeVar

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

from pyspark_tidemark.tables import TableShape


@dataclass(frozen=True, slots=True)
class ScanFilter:
    """Rows that meet all conditions; None and empty values do not restrict."""

    topics: tuple[str, ...] | None = None
    queues: tuple[str, ...] | None = None
    prefix: str = ""
    partitions: tuple[int, ...] | None = None
    after_ms: int = 0  # inclusive
    before_ms: int | None = None  # exclusive
    age_ms_min: int = 0  # by the time of each partition
    due_types: tuple[int, ...] = ()  # rules of retention, as values of the enum RetentionType

    def scans(self) -> Iterator[tuple[str, str]]:
        """The topic and the queue of each scan that a partition needs; "" is all."""
        if self.before_ms is not None and self.before_ms <= self.after_ms:
            return
        if self.queues is not None:
            yield from (("", queue) for queue in self.queues if self._may_have(queue))
        elif self.topics is not None:
            yield from ((topic, "") for topic in self.topics)
        else:
            yield "", ""

    def has_partition(self, partition: int) -> bool:
        return self.partitions is None or partition in self.partitions

    def _may_have(self, queue: str) -> bool:
        of_topic = self.topics is None or queue.partition("/")[0] in self.topics
        return of_topic and queue.startswith(self.prefix)


NO_FILTER: Final = ScanFilter()

T = TypeVar("T")


def push(scan_filter: ScanFilter, table: TableShape, condition: Filter) -> ScanFilter | None:
    """Add a condition to a filter; None if storage cannot evaluate it."""
    match condition:
        case EqualTo((column,), value):
            return _among(scan_filter, table, column, [value])
        case In((column,), values):
            return _among(scan_filter, table, column, values)
        case StringStartsWith((column,), str(prefix)) if column == "lmq_name" and table.has_queues:
            return _beginning(scan_filter, prefix)
        # Stored times are whole milliseconds, so that each bound has an exact equivalent.
        case LessThan((column,), datetime() as time) if column == table.time:
            return before(scan_filter, -(-_us(time) // 1000))
        case LessThanOrEqual((column,), datetime() as time) if column == table.time:
            return before(scan_filter, _us(time) // 1000 + 1)
        case GreaterThan((column,), datetime() as time) if column == table.time:
            return after(scan_filter, _us(time) // 1000 + 1)
        case GreaterThanOrEqual((column,), datetime() as time) if column == table.time:
            return after(scan_filter, -(-_us(time) // 1000))
    return None


def before(scan_filter: ScanFilter, before_ms: int) -> ScanFilter:
    known = scan_filter.before_ms
    return replace(scan_filter, before_ms=before_ms if known is None else min(known, before_ms))


def after(scan_filter: ScanFilter, after_ms: int) -> ScanFilter:
    return replace(scan_filter, after_ms=max(scan_filter.after_ms, after_ms))


def _among(
    scan_filter: ScanFilter, table: TableShape, column: str, values: Iterable[object]
) -> ScanFilter | None:
    if column not in table.schema.names:
        return None
    texts = tuple(sorted({each for each in values if isinstance(each, str)}))
    match column:
        case "topic":
            topics = _common(scan_filter.topics, texts)
            return replace(scan_filter, topics=topics)
        case "lmq_name":
            return replace(scan_filter, queues=_common(scan_filter.queues, texts))
        case "partition":
            numbers = tuple(sorted({each for each in values if isinstance(each, int)}))
            return replace(scan_filter, partitions=_common(scan_filter.partitions, numbers))
    return None


def _common(known: tuple[T, ...] | None, wanted: tuple[T, ...]) -> tuple[T, ...]:
    return wanted if known is None else tuple(each for each in wanted if each in known)


def _beginning(scan_filter: ScanFilter, prefix: str) -> ScanFilter:
    known = scan_filter.prefix
    if known.startswith(prefix):
        return scan_filter
    if prefix.startswith(known):
        return replace(scan_filter, prefix=prefix)
    return replace(scan_filter, queues=())  # no name begins with both


def _us(time: datetime) -> int:
    """Unix microseconds; Spark passes times without a zone in the zone of the machine."""
    aware = time.astimezone()
    return int(aware.replace(microsecond=0).timestamp()) * 1_000_000 + time.microsecond
