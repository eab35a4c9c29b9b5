"""The jobs: read, plan by the rules, apply from the executors (R1-R9).

A job is thin: `rules` decides what is due, `calls` forms the requests, and storage checks each row
again. A pass that fails is not resumed: the next one finds what is left.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Final
from uuid import uuid4

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the customary name

from pyspark_tidemark.filters import ScanFilter
from pyspark_tidemark.storage import PartitionAddress
from spark_batch.passes import rules, table_reader
from spark_batch.passes.applier import OUTCOME, applier
from spark_batch.passes.failures import Failures, collect_failures
from spark_batch.passes.findings import Counts
from spark_batch.passes.outcome import Found, JobName, Pass, conclude
from spark_batch.storage_client import find_partitions, find_topics
from tidemark.clock import Clock
from tidemark.settings import RetentionSettings
from tidemark.telemetry import LateSpan, current_traceparent, tracer
from tidemark.topics import Topic, TopicSettings

RECORD_TABLES: Final = ("messages_consumed", "system_metrics", "history")

_RUN_COLUMNS: Final = (
    "partition,topic,lmq_name,queue_id,fairness_key,first_offset,messages,bytes,publish_time,"
    "groups,waiting_groups,held,age_ms"
)
_QUEUE_COLUMNS: Final = (
    "partition,topic,lmq_name,queue_id,messages,bytes,scheduled,last_activity,in_use,age_ms"
)

_log = logging.getLogger(__name__)
_tracer = tracer(__name__)


class Jobs:
    """Retention and eviction over one session and one cluster."""

    def __init__(self, spark: SparkSession, settings: RetentionSettings, clock: Clock) -> None:
        self._spark = spark
        self._settings = settings
        self.storage = settings.storage_address
        self._clock = clock

    def retention(self, dry_run: bool = False) -> Pass:
        """Expired and completed messages, inactive queues, old records (R1-R4)."""
        return self._pass(
            JobName.RETENTION,
            self.plan_retention,
            self._settings.retention_batch_size,
            dry_run,
        )

    def eviction(self, dry_run: bool = False) -> Pass:
        """Messages past the max wait of their topic (R5)."""
        return self._pass(
            JobName.EVICTION,
            self.plan_eviction,
            self._settings.eviction_batch_size,
            dry_run,
        )

    # --- plans ---------------------------------------------------------------------------------

    def plan_retention(self, topics: list[Topic], failures: Failures) -> DataFrame | None:
        """The plan of a retention pass, as rows of `rules.PLAN`; None if every rule is off."""
        settings = self._settings
        parts = []
        kept = [topic for topic in topics if _shortest_s(topic.settings)]
        if kept:
            shortest_s = min(_shortest_s(topic.settings) for topic in kept)
            runs = self._runs(kept, shortest_s, failures)
            parts.append(rules.expired_or_completed(runs, self._limits(kept)))
        days = settings.partition_cleanup_days
        if days:
            idle = ScanFilter(age_ms_min=days * rules.DAY_MS)
            queues = self._read("queues", _QUEUE_COLUMNS, idle, failures)
            parts.append(rules.inactive_queues(queues, days))
        parts = [rules.capped(_union(parts), settings.retention_pass_limit)] if parts else []
        days = settings.metrics_retention_days
        if days:
            records = self._old_records(days, failures)
            if records is not None:
                parts.append(rules.old_records(records, days))
        return _union(parts) if parts else None

    def plan_eviction(self, topics: list[Topic], failures: Failures) -> DataFrame | None:
        """The plan of an eviction pass; None if no topic limits the wait."""
        limited = [topic for topic in topics if topic.settings.max_wait_time_seconds]
        if not limited:
            return None
        shortest_s = min(topic.settings.max_wait_time_seconds for topic in limited)
        runs = self._runs(limited, shortest_s, failures)
        plan = rules.waiting_too_long(runs, self._limits(limited))
        return rules.capped(plan, self._settings.eviction_pass_limit)

    def _runs(self, topics: list[Topic], age_s: int, failures: Failures) -> DataFrame:
        """Runs that may be due: of these topics, and at least this old."""
        names = tuple(sorted(topic.name for topic in topics))
        due = ScanFilter(names, age_ms_min=1000 * age_s)
        return self._read("runs", _RUN_COLUMNS, due, failures)

    def _old_records(self, days: int, failures: Failures) -> DataFrame | None:
        """Partition and table of all records that are at least this old, as one frame.

        The driver first asks storage whether there are any: records are ordered by time, so that is
        cheap, and mostly none is old.
        """
        scan_filter = ScanFilter(age_ms_min=days * rules.DAY_MS)
        frames = [
            self._read(table, "partition", scan_filter, failures).select(
                "partition", F.lit(table).alias("table")
            )
            for table in RECORD_TABLES
            if table_reader.has_rows(self._partitions(), table, scan_filter, failures)
        ]
        return _union(frames) if frames else None

    def _limits(self, topics: list[Topic]) -> DataFrame:
        """The limits as SQL literals: a frame of Python objects would cost a Spark job."""
        rows = [
            (
                topic.name,
                topic.settings.retention_enabled,
                topic.settings.retention_seconds,
                topic.settings.completed_retention_seconds,
                topic.settings.max_wait_time_seconds,
            )
            for topic in topics
        ]
        casts = [f"CAST(? AS {column.dataType.simpleString()})" for column in rules.LIMITS]
        row = f"({', '.join(casts)})"
        names = ", ".join(rules.LIMITS.names)
        values = ", ".join([row] * len(rows))
        return self._spark.sql(
            f"SELECT * FROM VALUES {values} AS limits({names})",
            [each for row in rows for each in row],
        )

    def _read(
        self, table: str, columns: str, scan_filter: ScanFilter, failures: Failures
    ) -> DataFrame:
        partitions = self._partitions()
        return table_reader.read(self._spark, partitions, table, columns, scan_filter, failures)

    def _partitions(self) -> list[PartitionAddress]:
        return find_partitions(self.storage)

    # --- a pass --------------------------------------------------------------------------------

    def _pass(
        self,
        name: JobName,
        make_plan: Callable[[list[Topic], Failures], DataFrame | None],
        batch_size: int,
        dry_run: bool,
    ) -> Pass:
        pass_id = f"{name}-{uuid4().hex}"
        started_ms = self._clock.monotonic_ms()
        counts: Counts = {}
        with LateSpan(_tracer, f"{name} pass", {"tidemark.pass_id": pass_id}) as traced:
            topics = find_topics(self.storage)
            with self.labelled(name, pass_id):
                failures = self.collect_failures()
                plan = make_plan(topics, failures)
                if plan is not None:
                    traced.begin()
                    if dry_run:
                        counts = _count(plan)
                    else:
                        counts = self.apply(plan, pass_id, batch_size, failures)
        found = Found(tuple(topics), counts, dict(failures.value))
        duration_ms = self._clock.monotonic_ms() - started_ms
        return conclude(name, pass_id, dry_run, found, duration_ms, self._settings)

    @contextmanager
    def labelled(self, name: str, pass_id: str) -> Iterator[None]:
        """Label the Spark jobs of this thread, and let them share executors with other passes."""
        context = self._spark.sparkContext
        self._spark.addTag(tag_of(name))
        context.setLocalProperty("spark.scheduler.pool", name)
        context.setJobDescription(f"Tidemark {pass_id}")
        try:
            yield
        finally:
            self._spark.removeTag(tag_of(name))
            context.setLocalProperty("spark.scheduler.pool", None)  # type: ignore[arg-type]
            context.setJobDescription(None)  # type: ignore[arg-type]

    def collect_failures(self) -> Failures:
        """What a plan and its application add the partitions to that fail."""
        return collect_failures(self._spark.sparkContext)

    def interrupt(self, name: str) -> None:
        """End the Spark jobs of the pass under way; that pass fails."""
        self._spark.interruptTag(tag_of(name))

    def apply(self, plan: DataFrame, pass_id: str, batch_size: int, failures: Failures) -> Counts:
        """Have the executors apply a plan; returns what was removed. Safe to repeat."""
        addresses = {each.partition: each.address for each in self._partitions()}
        apply = applier(addresses, pass_id, batch_size, failures, current_traceparent())
        outcomes = plan.mapInArrow(apply, OUTCOME).collect()
        counts: dict[tuple[str, str], int] = {}
        for row in outcomes:
            key = (row["topic"], row["retention_type"])
            counts[key] = counts.get(key, 0) + row["removed"]
        stale = sum(row["stale"] for row in outcomes)
        calls = sum(row["calls"] for row in outcomes)
        _log.debug("a plan was applied", extra={"pass": pass_id, "calls": calls, "stale": stale})
        return counts


def tag_of(name: str) -> str:
    """The tag of the Spark jobs of a retention or eviction pass."""
    return f"tidemark-{name}"


def _count(plan: DataFrame) -> Counts:
    found = plan.groupBy("topic", "retention_type").agg(F.sum("messages").alias("due")).collect()
    return {(row["topic"], row["retention_type"]): row["due"] for row in found}


def _shortest_s(settings: TopicSettings) -> int:
    """The shortest limit of the retention rules that are on; 0 if none is."""
    if not settings.retention_enabled:
        return 0
    limits = (settings.retention_seconds, settings.completed_retention_seconds)
    return min((limit for limit in limits if limit), default=0)


def _union(parts: list[DataFrame]) -> DataFrame:
    return reduce(DataFrame.unionByName, parts)
