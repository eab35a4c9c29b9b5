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
    StringStartsWith,
)

from pyspark_tidemark.filters import ScanFilter, push
from pyspark_tidemark.tables import TABLES

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
        (EqualTo(("lmq_name",), "a/b"), ScanFilter(queues=("a/b",))),
        (In(("lmq_name",), ("a/b", None, "a")), ScanFilter(queues=("a", "a/b"))),
        (StringStartsWith(("lmq_name",), "a/"), ScanFilter(prefix="a/")),
        (EqualTo(("partition",), 5), ScanFilter(partitions=(5,))),
        (In(("partition",), (5, 1)), ScanFilter(partitions=(1, 5))),
        (StringStartsWith(("topic",), "a"), None),
        (EqualTo(("held",), True), None),
        (EqualTo(TIME, NOON), None),
        (LessThan(("first_offset",), 5), None),
    ],
)
def test_a_condition_that_storage_evaluates_is_exact(
    condition: Filter, expected: ScanFilter | None
) -> None:
    assert push(ScanFilter(), RUNS, condition) == expected


def test_conditions_add_up() -> None:
    known = ScanFilter(("a", "b"), after_ms=5, before_ms=9)

    scan_filter = push(known, RUNS, In(("topic",), ("b", "c")))

    assert scan_filter == ScanFilter(("b",), after_ms=5, before_ms=9)
    assert push(scan_filter, RUNS, LessThan(TIME, NOON)) == scan_filter


@pytest.mark.parametrize(
    ("scan_filter", "expected"),
    [
        (ScanFilter(), [("", "")]),
        (ScanFilter(("a", "b")), [("a", ""), ("b", "")]),
        (ScanFilter(queues=("a", "a/x", "b/x")), [("", "a"), ("", "a/x"), ("", "b/x")]),
        (ScanFilter(("a",), ("a/x", "b/x"), "a/"), [("", "a/x")]),
        (ScanFilter((), prefix="a"), []),
        (ScanFilter(after_ms=5, before_ms=5), []),
    ],
)
def test_a_partition_is_asked_for_no_more_than_the_conditions_leave(
    scan_filter: ScanFilter, expected: list[tuple[str, str]]
) -> None:
    """P2."""
    assert list(scan_filter.scans()) == expected


def test_names_cannot_begin_with_two_prefixes_of_which_neither_begins_with_the_other() -> None:
    begins = [StringStartsWith(("lmq_name",), text) for text in ("a/", "a/x", "b")]

    longer = push(push(ScanFilter(), RUNS, begins[1]) or ScanFilter(), RUNS, begins[0])
    neither = push(ScanFilter(prefix="a/x"), RUNS, begins[2])

    assert longer == ScanFilter(prefix="a/x")
    assert neither is not None
    assert list(neither.scans()) == []


def test_tables_without_topics_leave_them_to_spark() -> None:
    assert push(ScanFilter(), TABLES["history"], EqualTo(("topic",), "a")) is None


def test_a_time_without_a_zone_is_the_machines() -> None:
    """As Spark hands them over."""
    local = NOON.astimezone().replace(tzinfo=None)

    assert push(ScanFilter(), RUNS, LessThan(TIME, local)) == ScanFilter(before_ms=NOON_MS)
