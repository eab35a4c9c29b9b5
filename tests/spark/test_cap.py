"""The cap of a pass: the oldest rows of a plan, which stay where they were read."""

import random
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from spark_batch.passes import cap
from spark_batch.passes.cap import ORDER, find_cap, persisted

COLUMNS = "partition long, queue_id long, first_offset long, messages long, before_ms long"


def planned(spark: SparkSession, rows: list[tuple[Any, ...]], tasks: int = 3) -> DataFrame:
    frame = spark.createDataFrame(rows, f"{COLUMNS}, retention_type string")
    return frame.repartition(tasks)


def taken(plan: DataFrame, limit: int) -> list[tuple[int, ...]]:
    """What is within the limit, as the values that order it."""
    oldest = find_cap(plan, limit)
    found = plan if oldest is None else plan.where(oldest)
    return sorted(tuple(row) for row in found.select(*ORDER).collect())


def expected(rows: list[tuple[Any, ...]], limit: int) -> list[tuple[int, ...]]:
    """The same, by walking over the rows in their order."""
    found: list[tuple[int, ...]] = []
    total = 0
    for partition, queue_id, first_offset, messages, before_ms, _ in sorted(
        rows, key=lambda row: (row[4], *row[:3])
    ):
        if total < limit:
            found.append((before_ms, partition, queue_id, first_offset))
        total += messages
    return found


@pytest.mark.parametrize("ranges", [1024, cap.RANGES_MAX])
def test_a_capped_plan_takes_the_oldest_until_the_limit_is_reached(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, ranges: int
) -> None:
    """R7: the run that reaches it is the last one; none of them is put off without end."""
    monkeypatch.setattr(cap, "RANGES_MAX", ranges)
    chance = random.Random(14)
    rows: list[tuple[Any, ...]] = [
        (chance.randrange(2), chance.randrange(3), offset, chance.randrange(1, 20), time, "expired")
        for offset in range(12)
        for time in (1_700_000_000_000, 1_700_000_000_000 + chance.randrange(10**9))
    ]
    total = sum(row[3] for row in rows)

    with persisted(planned(spark, rows)) as plan:
        found = {limit: taken(plan, limit) for limit in (total // 3, total)}

    assert found == {limit: expected(rows, limit) for limit in found}


def test_no_row_of_a_capped_plan_leaves_its_task(spark: SparkSession) -> None:
    """R7, P3: a window over all rows brought them together in one task."""
    rows: list[tuple[Any, ...]] = [(0, 1, offset, 1, 10 + offset, "expired") for offset in range(6)]
    plan = spark.createDataFrame(rows, f"{COLUMNS}, retention_type string")

    oldest = find_cap(plan, 3)
    assert oldest is not None
    physical = plan.where(oldest)._jdf.queryExecution().executedPlan().toString()

    assert "Filter" in physical
    assert "Exchange" not in physical


def test_old_records_are_no_part_of_the_cap(spark: SparkSession) -> None:
    """R4, R7: they are removed by their time, however many they are."""
    rows: list[tuple[Any, ...]] = [
        (0, 0, 0, 1_000, 0, "old_records"),
        (0, 1, 0, 1, 10, "expired"),
        (0, 1, 1, 1, 11, "expired"),
    ]
    plan = planned(spark, rows)

    assert taken(plan, 1) == [(0, 0, 0, 0), (10, 0, 1, 0)]
    assert find_cap(plan, 2) is None
    assert find_cap(plan.where("retention_type = 'old_records'"), 1) is None
