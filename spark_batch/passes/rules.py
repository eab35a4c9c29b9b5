"""The rules of retention, one function each: tables in, planned deletions out (R1-R5, R14).

Pure: a rule reads no clock, no settings and no storage, so a test can run it on three rows. Ages
are those that storage read by the time of each partition: the clock of the driver decides nothing.
A planned deletion is one row of `PLAN`; storage checks it again before it deletes anything.
"""

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the customary name
from pyspark.sql.types import BooleanType, LongType, StringType, StructField, StructType

from spark_batch.passes.retention_types import (
    ABANDONED_GROUP,
    COMPLETED,
    EXPIRED,
    INACTIVE_QUEUE,
    MAX_WAIT_TIME_EVICTION,
    OLD_RECORDS,
)

PLAN: Final = (
    "partition",
    "topic",  # for old records: their table
    "retention_type",
    "lmq_name",
    "queue_id",
    "group",
    "fairness_key",
    "first_offset",
    "messages",  # for queues and groups 1, for old records their number in a dry run, else 0
    "bytes",
    "before_ms",  # of a run its publish time, of a queue its last activity, of a group its last use
    "age_ms",  # of a queue or old records: the age from which they are removed
)
"""The columns of a plan: one row per run, per queue, per group, or per table of old records."""

LIMITS: Final = StructType(
    [
        StructField("topic", StringType()),
        StructField("retention_enabled", BooleanType()),
        StructField("retention_seconds", LongType()),
        StructField("completed_retention_seconds", LongType()),
        StructField("max_wait_time_seconds", LongType()),
        StructField("group_expiry_seconds", LongType()),
    ]
)
"""The limits of a topic, which the rules for runs and groups expect as columns of each of them."""

DAY_MS: Final = 86_400_000


def expired_or_completed(runs: DataFrame) -> DataFrame:
    """R1 and R2 over one read; runs that match both count as expired.

    R1: older than `retention_seconds`, settled or not. R2: settled by every group, at least one,
    and older than `completed_retention_seconds`.
    """
    kind = F.when(_is_expired(), EXPIRED).when(_is_completed(), COMPLETED)
    return _planned_runs(runs, kind)


def waiting_too_long(runs: DataFrame) -> DataFrame:
    """R5: unsettled in some group, or without any group, after `max_wait_time_seconds`."""
    due = _is_older(F.col("max_wait_time_seconds")) & ~F.col("settled") & ~F.col("held")
    return _planned_runs(runs, F.when(due, MAX_WAIT_TIME_EVICTION))


def inactive_queues(queues: DataFrame, days: int) -> DataFrame:
    """R3: no messages, none scheduled, no client, and no activity for `days` days.

    A queue in use is left out and not only refused by storage: a cap would fill with such queues.
    """
    due = (
        (F.col("messages") == 0)
        & (F.col("scheduled") == 0)
        & ~F.col("in_use")
        & (F.col("age_ms") >= days * DAY_MS)
    )
    return queues.where(due).select(
        "partition",
        "topic",
        F.lit(INACTIVE_QUEUE).alias("retention_type"),
        "lmq_name",
        "queue_id",
        F.lit("").alias("group"),
        F.lit("").alias("fairness_key"),
        F.lit(0).cast("bigint").alias("first_offset"),
        F.lit(1).cast("bigint").alias("messages"),
        "bytes",
        F.unix_millis("last_activity").alias("before_ms"),
        F.lit(days * DAY_MS).cast("bigint").alias("age_ms"),
    )


def abandoned_groups(groups: DataFrame) -> DataFrame:
    """R14: without a consumer or an owner, and unused for `group_expiry_seconds`."""
    due = groups.where(_is_older(F.col("group_expiry_seconds")) & ~F.col("in_use"))
    return due.select(
        "partition",
        "topic",
        F.lit(ABANDONED_GROUP).alias("retention_type"),
        "lmq_name",
        "queue_id",
        "group",
        F.lit("").alias("fairness_key"),
        F.lit(0).cast("bigint").alias("first_offset"),
        F.lit(1).cast("bigint").alias("messages"),
        F.lit(0).cast("bigint").alias("bytes"),
        F.unix_millis("last_used").alias("before_ms"),
        F.lit(0).cast("bigint").alias("age_ms"),
    )


def old_records(records: DataFrame, days: int) -> DataFrame:
    """R4: tables of records (partition, table, messages) with rows that are `days` days old."""
    return records.select(
        "partition",
        F.col("table").alias("topic"),
        F.lit(OLD_RECORDS).alias("retention_type"),
        F.lit("").alias("lmq_name"),
        F.lit(0).cast("bigint").alias("queue_id"),
        F.lit("").alias("group"),
        F.lit("").alias("fairness_key"),
        F.lit(0).cast("bigint").alias("first_offset"),
        "messages",
        F.lit(0).cast("bigint").alias("bytes"),
        F.lit(0).cast("bigint").alias("before_ms"),
        F.lit(days * DAY_MS).cast("bigint").alias("age_ms"),
    )


def _is_expired() -> Column:
    older = _is_older(F.col("retention_seconds"))
    return F.col("retention_enabled") & older & ~F.col("held")


def _is_completed() -> Column:
    older = _is_older(F.col("completed_retention_seconds"))
    return F.col("retention_enabled") & older & F.col("settled") & ~F.col("held")


def _is_older(limit_s: Column) -> Column:
    """Whether a run or group has reached the limit; 0 is no limit."""
    return (limit_s > 0) & (F.col("age_ms") >= limit_s * 1000)


def _planned_runs(runs: DataFrame, kind: Column) -> DataFrame:
    marked = runs.withColumn("retention_type", kind).where(F.col("retention_type").isNotNull())
    marked = marked.withColumn("group", F.lit(""))
    timed = marked.withColumn("before_ms", F.unix_millis("publish_time"))
    return timed.withColumn("age_ms", F.lit(0).cast("bigint")).select(*PLAN)
