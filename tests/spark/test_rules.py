"""The rules on small frames: limits at their boundary, groups, reservations (R1-R5)."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from pyspark_tidemark.tables import TABLES
from spark_batch.passes import rules
from spark_batch.passes.table_reader import RECORDS

NOW_MS = 1_800_000_000_000
DAY_MS = 86_400_000
RUNS = TABLES["runs"].schema
QUEUES = TABLES["queues"].schema

Rule = Callable[[DataFrame], DataFrame]


def at(time_ms: int) -> datetime:
    return datetime.fromtimestamp(time_ms / 1000, UTC)


def run(offset: int, age_ms: int, *, topic: str = "t", **fields: Any) -> tuple[Any, ...]:
    """A run of ten messages that one group has not settled."""
    facts = {"groups": 1, "waiting_groups": 1, "held": False, **fields}
    published = at(NOW_MS - age_ms)
    head = (0, topic, f"{topic}/q", 7, "", offset, 10, 100, published)
    groups, waiting = facts["groups"], facts["waiting_groups"]
    return (*head, groups, waiting, groups > 0 and not waiting, facts["held"], age_ms)


@pytest.fixture
def due(spark: SparkSession) -> Callable[..., list[int]]:
    """Offsets of the runs that a rule takes, for a topic `t` with these limits."""

    def find(rule: Rule, runs: list[tuple[Any, ...]], **limits: Any) -> list[int]:
        known = {
            "enabled": True,
            "retention_s": 0,
            "completed_s": 0,
            "wait_s": 0,
            "expiry_s": 0,
            **limits,
        }
        topics = spark.createDataFrame([("t", *known.values())], rules.LIMITS)
        plan = rule(spark.createDataFrame(runs, RUNS).join(topics, "topic"))
        assert tuple(plan.columns) == rules.PLAN
        return sorted(row["first_offset"] for row in plan.collect())

    return find


def test_expired_runs_are_at_least_as_old_as_the_limit(due: Callable[..., list[int]]) -> None:
    """R1: settled or not; not those under a live reservation, nor of a topic without limits."""
    runs = [
        run(0, 10_001),
        run(1, 10_000),
        run(2, 9_999),
        run(3, 20_000, waiting_groups=0),
        run(4, 20_000, groups=0, waiting_groups=0),
        run(5, 20_000, held=True),
        run(6, 20_000, topic="u"),
    ]

    assert due(rules.expired_or_completed, runs, retention_s=10) == [0, 1, 3, 4]
    assert due(rules.expired_or_completed, runs, retention_s=0) == []
    assert due(rules.expired_or_completed, runs, retention_s=10, enabled=False) == []


def test_completed_runs_are_settled_by_every_group(due: Callable[..., list[int]]) -> None:
    """R2: at least one group; a group that never consumed has settled nothing."""
    runs = [
        run(0, 10_000, groups=1, waiting_groups=0),
        run(1, 9_999, groups=1, waiting_groups=0),
        run(2, 20_000, groups=3, waiting_groups=0),
        run(3, 20_000, groups=3, waiting_groups=1),
        run(4, 20_000, groups=0, waiting_groups=0),
    ]

    assert due(rules.expired_or_completed, runs, completed_s=10) == [0, 2]
    assert due(rules.expired_or_completed, runs, completed_s=0) == []
    assert due(rules.expired_or_completed, runs, completed_s=10, enabled=False) == []


def test_what_is_expired_and_completed_counts_once_as_expired(
    spark: SparkSession,
) -> None:
    """R6: one reading, one row."""
    runs = [run(0, 20_000, waiting_groups=0), run(1, 6_000, waiting_groups=0), run(2, 6_000)]
    topics = spark.createDataFrame([("t", True, 10, 5, 0, 0)], rules.LIMITS)

    plan = rules.expired_or_completed(spark.createDataFrame(runs, RUNS).join(topics, "topic"))

    found = {row["first_offset"]: row["retention_type"] for row in plan.collect()}
    assert found == {0: "expired", 1: "completed"}


def test_waiting_runs_are_unsettled_somewhere_or_without_a_group(
    due: Callable[..., list[int]],
) -> None:
    """R5: needs no `retention_enabled`."""
    runs = [
        run(0, 10_000),
        run(1, 9_999),
        run(2, 20_000, groups=0, waiting_groups=0),
        run(3, 20_000, groups=2, waiting_groups=1),
        run(4, 20_000, groups=2, waiting_groups=0),
        run(5, 20_000, held=True),
    ]

    assert due(rules.waiting_too_long, runs, wait_s=10, enabled=False) == [0, 2, 3]
    assert due(rules.waiting_too_long, runs, wait_s=0) == []


def test_inactive_queues_are_empty_and_long_unused(spark: SparkSession) -> None:
    """R3."""

    def queue(
        name: str, idle_ms: int, messages: int = 0, scheduled: int = 0, in_use: bool = False
    ) -> tuple[Any, ...]:
        used = at(NOW_MS - idle_ms)
        return (0, "t", name, 7, messages, 0, scheduled, 5, used, used, False, in_use, idle_ms)

    week = 7 * DAY_MS
    queues = [
        queue("at the limit", week),
        queue("used since", week - 1),
        queue("full", week, messages=1),
        queue("waiting", week, scheduled=1),
        queue("with a client", week, in_use=True),
    ]

    plan = rules.inactive_queues(spark.createDataFrame(queues, QUEUES), 7)

    (row,) = plan.collect()
    assert tuple(plan.columns) == rules.PLAN
    assert (row["lmq_name"], row["before_ms"]) == ("at the limit", NOW_MS - week)
    assert row["age_ms"] == week


def test_old_records_are_planned_per_partition_and_table(spark: SparkSession) -> None:
    """R4."""
    records = [(0, "history", 2), (1, "history", 0)]
    frame = spark.createDataFrame(records, RECORDS)

    plan = rules.old_records(frame, 1)

    assert tuple(plan.columns) == rules.PLAN
    found = {(row["partition"], row["topic"], row["messages"]) for row in plan.collect()}
    assert found == {(0, "history", 2), (1, "history", 0)}
    assert {row["age_ms"] for row in plan.collect()} == {DAY_MS}


def test_abandoned_groups_are_unused_for_the_time_of_their_topic(spark: SparkSession) -> None:
    """R14: not those with a consumer, nor of a topic whose groups never expire."""

    def group(name: str, age_ms: int, *, topic: str = "t", in_use: bool = False) -> tuple[Any, ...]:
        head = (0, topic, f"{topic}/q", 7, name, 0, 0, 0, "", 0)
        return (*head, at(NOW_MS - age_ms), in_use, age_ms)

    groups = [
        group("old", 10_000),
        group("young", 9_999),
        group("connected", 20_000, in_use=True),
        group("other", 20_000, topic="never"),
    ]
    limits = [("t", False, 0, 0, 0, 10), ("never", False, 0, 0, 0, 0)]
    topics = spark.createDataFrame(limits, rules.LIMITS)

    plan = rules.abandoned_groups(
        spark.createDataFrame(groups, TABLES["groups"].schema).join(topics, "topic")
    )

    assert tuple(plan.columns) == rules.PLAN
    (row,) = plan.collect()
    assert (row["group"], row["messages"], row["before_ms"]) == ("old", 1, NOW_MS - 10_000)
