"""A pass that finds nothing due: it ends without Spark, and is reported like any other (P3, P4)."""

from uuid import uuid4

from spark_batch.due_work import find_due_work
from spark_batch.passes.outcome import TYPES, Found, JobName, Pass, conclude
from spark_batch.storage_client import find_topics
from tidemark.clock import Clock
from tidemark.settings import RetentionSettings


def pass_without_work(
    settings: RetentionSettings, job: JobName, dry_run: bool, clock: Clock
) -> Pass | None:
    """The outcome of a pass that finds nothing due; None if something is due.

    Partitions that cannot answer are reported as failed, as those that a pass cannot read.
    """
    started_ms = clock.monotonic_ms()
    due = find_due_work(settings, TYPES[job])
    if due.due_in_ms == 0:
        return None
    found = Found(tuple(find_topics(due.cluster)), failed=due.failed)
    duration_ms = clock.monotonic_ms() - started_ms
    return conclude(job, f"{job}-{uuid4().hex}", dry_run, found, duration_ms, settings)
