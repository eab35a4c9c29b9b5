"""The cap of a pass: which planned rows are the oldest, found without moving any of them (R7).

Rows stay in the tasks that have read them. The driver asks for totals of ranges of values, narrows
the range in which the limit is reached, and so finds the last row that is within it.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the customary name

from spark_batch.passes.retention_types import OLD_RECORDS

ORDER: Final = ("before_ms", "partition", "queue_id", "first_offset")
"""The columns of a plan that order its rows, oldest first. Whole numbers."""

RANGES_MAX: Final = 16_384
"""Totals that the driver gets at a time."""


def find_cap(plan: DataFrame, limit: int) -> Column | None:
    """The condition for the oldest rows of a plan, up to the limit of messages or queues.

    None if the limit is not exceeded. The row that crosses it is included, so that a large run is
    not postponed indefinitely. Old records do not count. The plan is read several times: persist
    it.
    """
    counted = plan.where(F.col("retention_type") != OLD_RECORDS)
    ends = [each(name) for name in ORDER for each in (F.min, F.max)]
    total, *bounds = counted.agg(F.sum("messages"), *ends).collect()[0]
    if (total or 0) <= limit:
        return None
    last: list[int] = []
    for at, name in enumerate(ORDER):
        value, before = _narrow(counted, name, bounds[2 * at], bounds[2 * at + 1], limit)
        last.append(value)
        limit -= before
        counted = counted.where(F.col(name) == value)
    return _until(zip(ORDER, last, strict=True))


def _narrow(rows: DataFrame, name: str, low: int, high: int, limit: int) -> tuple[int, int]:
    """The value of a column at which the total reaches the limit, and the total before it."""
    before = 0
    while low < high:
        width = -(-(high + 1 - low) // RANGES_MAX)
        within = rows.where(F.col(name).between(low, high))
        number = F.expr(f"({name} - {low}) div {width}")
        totals = within.groupBy(number).agg(F.sum("messages"))
        reached = low, before
        for at, total in sorted(totals.collect()):
            reached = low + at * width, before
            if before + total >= limit:
                break
            before += total
        low, before = reached
        high = min(high, low + width - 1)
    return low, before


def _until(last: Iterable[tuple[str, int]]) -> Column:
    """Whether a row comes not after these values of the columns, in their order."""
    *heads, (name, value) = last
    return reduce(
        lambda later, head: (F.col(head[0]) < head[1]) | ((F.col(head[0]) == head[1]) & later),
        reversed(heads),
        F.col(name) <= value,
    )


@contextmanager
def persisted(plan: DataFrame) -> Iterator[DataFrame]:
    """A plan that is read from storage once, however often it is used."""
    try:
        yield plan.persist()
    finally:
        plan.unpersist()
