"""The jobs: read, plan by the rules, apply from the executors (R1-R9).

A job is thin: `rules` selects due rows, `calls` forms the requests, and storage checks each row
again. A pass that fails is not resumed: the next one finds the rest.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, reduce
from typing import Final, NamedTuple, Protocol
from uuid import uuid4

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the customary name

from pyspark_tidemark.filters import ScanFilter
from pyspark_tidemark.storage import PartitionAddress
from spark_batch.due_work import DueWork, find_due_work
from spark_batch.passes import cap, rules, table_reader
from spark_batch.passes.applier import OUTCOME, applier
from spark_batch.passes.calls import COLUMNS
from spark_batch.passes.failures import Failures, collect_failures
from spark_batch.passes.findings import Counts
from spark_batch.passes.outcome import TYPES, Found, JobName, Pass, conclude
from spark_batch.passes.retention_types import (
    ABANDONED_GROUP,
    COMPLETED,
    EXPIRED,
    INACTIVE_QUEUE,
    MAX_WAIT_TIME_EVICTION,
    OLD_RECORDS,
)
from spark_batch.storage_client import StorageClient, find_topics
from tidemark.api.storage.v1.retention_pb2 import RetentionType
from tidemark.clock import Clock
from tidemark.errors import TidemarkError
from tidemark.settings import RetentionSettings
from tidemark.telemetry import LateSpan, current_traceparent, tracer
from tidemark.topics import Topic

_RUN_COLUMNS: Final = (
    "partition,topic,lmq_name,queue_id,fairness_key,first_offset,messages,bytes,publish_time,"
    "settled,held,age_ms"
)
_QUEUE_COLUMNS: Final = (
    "partition,topic,lmq_name,queue_id,messages,bytes,scheduled,last_activity,in_use,age_ms"
)
_GROUP_COLUMNS: Final = "partition,topic,lmq_name,queue_id,group,last_used,in_use,age_ms"

_log = logging.getLogger(__name__)
_tracer = tracer(__name__)


class Bounds(NamedTuple):
    """How much a pass may do."""

    batch_size: int
    """Planned runs of one call."""
    limit: int
    """Messages and queues that one pass removes; 0: all that are due."""


class _MakePlan(Protocol):
    def __call__(
        self, due: DueWork, topics: list[Topic], failures: Failures, *, dry_run: bool
    ) -> DataFrame | None: ...


class Jobs:
    """Retention and eviction over one session and one cluster."""

    def __init__(self, spark: SparkSession, settings: RetentionSettings, clock: Clock) -> None:
        self._spark = spark
        self._settings = settings
        self.storage = ",".join(settings.storage_addresses)
        self._clock = clock
        self._running: dict[str, str] = {}
        """The id of the last pass of each job that is running."""

    def retention(self, dry_run: bool = False) -> Pass:
        """Expired and completed messages, inactive queues and groups, old records (R1-R4, R14)."""
        return self._pass(
            JobName.RETENTION,
            self.plan_retention,
            Bounds(self._settings.retention_batch_size, self._settings.retention_pass_limit),
            dry_run,
        )

    def eviction(self, dry_run: bool = False) -> Pass:
        """Messages past the max wait of their topic (R5)."""
        return self._pass(
            JobName.EVICTION,
            self.plan_eviction,
            Bounds(self._settings.eviction_batch_size, self._settings.eviction_pass_limit),
            dry_run,
        )

    # --- plans ---------------------------------------------------------------------------------

    def find_due(self, name: JobName) -> DueWork:
        """Ask storage for due work of a job; needs no Spark."""
        return find_due_work(self._settings, TYPES[name])

    def plan_retention(
        self, due: DueWork, topics: list[Topic], failures: Failures, *, dry_run: bool = False
    ) -> DataFrame | None:
        """The plan of a retention pass, as rows of `rules.PLAN`; None if nothing is due."""
        settings = self._settings
        parts = []
        kinds = (EXPIRED, COMPLETED)
        if due.of(*kinds):
            runs = self._runs(due, kinds, topics, failures)
            parts.append(rules.expired_or_completed(runs))
        if due.of(INACTIVE_QUEUE):
            days = settings.partition_cleanup_days
            idle = ScanFilter(age_ms_min=days * rules.DAY_MS, due_types=_numbers(INACTIVE_QUEUE))
            targets = due.of(INACTIVE_QUEUE)
            queues = table_reader.read(
                self._spark, targets, "queues", _QUEUE_COLUMNS, idle, failures
            )
            parts.append(rules.inactive_queues(queues, days))
        if due.of(ABANDONED_GROUP):
            unused = ScanFilter(due_types=_numbers(ABANDONED_GROUP))
            groups = table_reader.read(
                self._spark,
                due.of(ABANDONED_GROUP),
                "groups",
                _GROUP_COLUMNS,
                unused,
                failures,
                _limits(topics),
            )
            parts.append(rules.abandoned_groups(groups))
        if due.by_table:
            days = settings.metrics_retention_days
            old = ScanFilter(age_ms_min=days * rules.DAY_MS)
            tables = [(name, each) for name, found in due.by_table.items() for each in found]
            records = table_reader.old_records(self._spark, tables, old, failures, counted=dry_run)
            parts.append(rules.old_records(records, days))
        return _union(parts) if parts else None

    def plan_eviction(
        self, due: DueWork, topics: list[Topic], failures: Failures, *, dry_run: bool = False
    ) -> DataFrame | None:
        """The plan of an eviction pass; None if nothing is due."""
        kinds = (MAX_WAIT_TIME_EVICTION,)
        if not due.of(*kinds):
            return None
        runs = self._runs(due, kinds, topics, failures)
        return rules.waiting_too_long(runs)

    def _runs(
        self, due: DueWork, kinds: tuple[str, ...], topics: list[Topic], failures: Failures
    ) -> DataFrame:
        """Runs that rules may apply to, with the limits of their topics."""
        old_enough = ScanFilter(due_types=_numbers(*kinds))
        return table_reader.read(
            self._spark, due.of(*kinds), "runs", _RUN_COLUMNS, old_enough, failures, _limits(topics)
        )

    # --- a pass --------------------------------------------------------------------------------

    def _pass(
        self,
        name: JobName,
        make_plan: _MakePlan,
        bounds: Bounds,
        dry_run: bool,
    ) -> Pass:
        pass_id = f"{name}-{uuid4().hex}"
        started_ms = self._clock.monotonic_ms()
        counts: Counts = {}
        with LateSpan(_tracer, f"{name} pass", {"tidemark.pass_id": pass_id}) as traced:
            due = self.find_due(name)
            topics = find_topics(due.cluster)
            failed = dict(due.failed)
            if due.by_type:
                traced.begin()
                with self.labelled(name, pass_id):
                    failures = self.collect_failures()
                    plan = make_plan(due, topics, failures, dry_run=dry_run)
                    if plan is not None and dry_run:
                        counts = _count_oldest(plan, bounds.limit)
                    elif plan is not None:
                        apply = partial(
                            self.apply,
                            cluster=due.cluster,
                            pass_id=pass_id,
                            batch_size=bounds.batch_size,
                            failures=failures,
                        )
                        counts = _apply_oldest(plan, bounds.limit, apply, failures)
                    failed |= failures.value
        found = Found(tuple(topics), counts, failed)
        duration_ms = self._clock.monotonic_ms() - started_ms
        return conclude(name, pass_id, dry_run, found, duration_ms, self._settings)

    @contextmanager
    def labelled(self, name: str, pass_id: str) -> Iterator[None]:
        """Label the Spark jobs of this thread, and let them share executors with other passes."""
        context = self._spark.sparkContext
        context.addJobTag(tag_of(name))
        context.setLocalProperty("spark.scheduler.pool", name)
        context.setJobGroup(pass_id, f"Tidemark {pass_id}")
        self._running[name] = pass_id
        try:
            yield
        finally:
            self._running.pop(name, None)
            context.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]
            context.removeJobTag(tag_of(name))
            context.setLocalProperty("spark.scheduler.pool", None)  # type: ignore[arg-type]
            context.setJobDescription(None)  # type: ignore[arg-type]

    def collect_failures(self) -> Failures:
        """A collector of partitions that fail, for a plan and its application."""
        return collect_failures(self._spark.sparkContext)

    def progress(self, name: str) -> tuple[int, int, int, int]:
        """The tasks of the pass under way, how many are done, and the same of its planned rows."""
        return (*self._tasks(name), *self._rows(name))

    def _rows(self, name: str) -> tuple[int, int]:
        """Rows planned so far and those that storage has applied, as far as it answers."""
        pass_id = self._running.get(name, "")
        planned = applied = 0
        for address in self._settings.storage_addresses if pass_id else ():
            with suppress(TidemarkError), StorageClient(address) as client:
                rows = client.pass_rows(pass_id)
                planned, applied = planned + rows[0], applied + rows[1]
        return planned, min(planned, applied)

    def _tasks(self, name: str) -> tuple[int, int]:
        """The Spark tasks of the pass under way so far, and how many of them are done."""
        tracker = self._spark.sparkContext.statusTracker()
        tasks = done = 0
        for job_id in tracker.getJobIdsForGroup(self._running.get(name, "")):
            job = tracker.getJobInfo(job_id)
            for stage_id in job.stageIds if job is not None else ():
                stage = tracker.getStageInfo(stage_id)
                if stage is not None:
                    tasks += stage.numTasks
                    done += stage.numCompletedTasks
        return tasks, done

    def interrupt(self, name: str) -> None:
        """End the Spark jobs of the pass under way; that pass fails."""
        # Of the context: a tag of the session is known only to the thread that has added it.
        self._spark.sparkContext.cancelJobsWithTag(tag_of(name))

    def apply(
        self,
        plan: DataFrame,
        cluster: Iterable[PartitionAddress],
        pass_id: str,
        batch_size: int,
        failures: Failures,
    ) -> Counts:
        """Have the executors apply a plan; returns the counts of removals. Safe to repeat."""
        addresses = {each.partition: each.address for each in cluster}
        apply = applier(addresses, pass_id, batch_size, failures, current_traceparent())
        outcomes = plan.select(*COLUMNS).mapInArrow(apply, OUTCOME).collect()
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


def _apply_oldest(
    plan: DataFrame,
    limit: int,
    apply: Callable[[DataFrame], Counts],
    failures: Failures,
) -> Counts:
    """Apply the oldest rows of a plan up to a limit of removals; 0 is none.

    Without a limit, the plan is applied while it is being made, and Spark keeps none of it.

    Rows of which nothing could be removed do not count, and neither do those of partitions that
    fail: they are the oldest in every pass, and would keep younger ones from leaving.
    """
    if not limit:
        return apply(plan)
    counts: dict[tuple[str, str], int] = {}
    with cap.persisted(plan) as left:
        while True:
            oldest = cap.find_cap(left, limit)
            for key, removed in apply(left if oldest is None else left.where(oldest)).items():
                counts[key] = counts.get(key, 0) + removed
                limit -= removed if key[1] != OLD_RECORDS else 0
            if oldest is None or limit <= 0:
                return counts
            left = left.where(~oldest & ~F.col("partition").isin(list(failures.value)))


def _count_oldest(plan: DataFrame, limit: int) -> Counts:
    """The counts that a pass would remove, from its plan."""
    if not limit:
        return _count(plan)
    with cap.persisted(plan) as left:
        oldest = cap.find_cap(left, limit)
        return _count(left if oldest is None else left.where(oldest))


def _count(plan: DataFrame) -> Counts:
    found = plan.groupBy("topic", "retention_type").agg(F.sum("messages").alias("due")).collect()
    return {(row["topic"], row["retention_type"]): row["due"] for row in found}


def _limits(topics: list[Topic]) -> pa.RecordBatch:
    """The limits of topics, as columns of `rules.LIMITS`."""
    rows = [
        (
            topic.name,
            topic.settings.retention_enabled,
            topic.settings.retention_seconds,
            topic.settings.completed_retention_seconds,
            topic.settings.max_wait_time_seconds,
            topic.settings.group_expiry_seconds,
        )
        for topic in topics
    ]
    # With their types: there may be no topic any more, where the last one was deleted meanwhile.
    types = [pa.string(), pa.bool_(), *[pa.int64()] * 4]
    columns = list(zip(*rows, strict=True)) or [()] * len(types)
    arrays = [pa.array(column, kind) for column, kind in zip(columns, types, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, names=rules.LIMITS.names)


def _numbers(*types: str) -> tuple[int, ...]:
    """Retention types as values of their enum."""
    return tuple(RetentionType.Value(f"RETENTION_TYPE_{each.upper()}") for each in types)


def _union(parts: list[DataFrame]) -> DataFrame:
    return reduce(DataFrame.unionByName, parts)
