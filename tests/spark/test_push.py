"""Conditions that storage answers itself; the others stay with Spark."""

from datetime import UTC, datetime, timedelta

import pytest
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from spark_batch.source import TABLES, ScanFilter, push

RUNS = TABLES["runs"]
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
NOON_MS = int(NOON.timestamp() * 1000)
HALF_MS = timedelta(microseconds=500)
TIME = ("publish_time",)


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (EqualTo(("topic",), "a"), ScanFilter(topics=("a",))),
        (In(("topic",), ("b", "a")), ScanFilter(topics=("a", "b"))),
        (LessThan(TIME, NOON), ScanFilter(before_ms=NOON_MS)),
        (LessThan(TIME, NOON + HALF_MS), ScanFilter(before_ms=NOON_MS + 1)),
        (LessThanOrEqual(TIME, NOON), ScanFilter(before_ms=NOON_MS + 1)),
        (LessThanOrEqual(TIME, NOON + HALF_MS), ScanFilter(before_ms=NOON_MS + 1)),
        (GreaterThan(TIME, NOON), ScanFilter(after_ms=NOON_MS + 1)),
        (GreaterThan(TIME, NOON + HALF_MS), ScanFilter(after_ms=NOON_MS + 1)),
        (GreaterThanOrEqual(TIME, NOON), ScanFilter(after_ms=NOON_MS)),
        (GreaterThanOrEqual(TIME, NOON + HALF_MS), ScanFilter(after_ms=NOON_MS + 1)),
        (EqualTo(("lmq_name",), "a"), None),
        (EqualTo(TIME, NOON), None),
        (LessThan(("first_offset",), 5), None),
    ],
)
def test_a_condition_on_topic_or_time_is_exact(
    condition: Filter, expected: ScanFilter | None
) -> None:
    assert push(ScanFilter(), RUNS, condition) == expected


def test_conditions_add_up() -> None:
    scan_filter = push(ScanFilter(("a", "b"), 5, 9), RUNS, In(("topic",), ("b", "c")))

    assert scan_filter == ScanFilter(("b",), 5, 9)
    assert push(scan_filter, RUNS, LessThan(TIME, NOON)) == ScanFilter(("b",), 5, 9)


def test_tables_without_topics_leave_them_to_spark() -> None:
    assert push(ScanFilter(), TABLES["history"], EqualTo(("topic",), "a")) is None


def test_a_time_without_a_zone_is_the_machines() -> None:
    """As Spark hands them over."""
    local = NOON.astimezone().replace(tzinfo=None)

    assert push(ScanFilter(), RUNS, LessThan(TIME, local)) == ScanFilter(before_ms=NOON_MS)
