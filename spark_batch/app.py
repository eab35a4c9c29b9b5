"""Wires the scheduler together: the only place that constructs its parts.

Spark starts in a child process when a pass has work, and stops when there was none for a while.
"""

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from uuid import uuid4

from spark_batch.api.job_service import JobService
from spark_batch.host import JobHost
from spark_batch.passes.findings import Finding
from spark_batch.passes.outcome import JobName, Report
from spark_batch.planner.process import PlannerProcess
from spark_batch.scheduler import Job, Outcome, Scheduler
from tidemark.api.lifecycle.v1.jobs_pb2_grpc import add_JobServiceServicer_to_server
from tidemark.clock import Clock
from tidemark.rpc.channel_pool import ChannelPool
from tidemark.rpc.server import RpcServer
from tidemark.service.background import BackgroundTasks
from tidemark.service.identity import process_identity
from tidemark.settings import RetentionSettings
from tidemark.system_metrics.sampler import SAMPLE_EVERY_MS, STORE_EVERY_MS, Sampler

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stored:
    """The outcome of one pass of the metrics job."""

    pass_id: str
    counts: Mapping[str, int]
    findings: tuple[Finding, ...] = ()
    failed: Mapping[int, str] = field(default_factory=dict)


@asynccontextmanager
async def retention(settings: RetentionSettings, clock: Clock) -> AsyncIterator[RpcServer]:
    """A scheduler that answers calls at once, and runs its jobs as soon as it can."""
    holder = process_identity()
    # A pass has no time limit.
    server = RpcServer(settings.listen, clock=clock, unary_deadline_ms=None)
    async with ChannelPool() as channels:
        planner = PlannerProcess(settings, clock)
        host = JobHost(settings, channels, holder, planner, clock)
        sampler = Sampler(lambda: _figures(scheduler), host.record)
        scheduler = Scheduler(_jobs(settings, host, sampler), host, clock)
        server.add(add_JobServiceServicer_to_server, JobService(scheduler, clock))
        tasks = BackgroundTasks(server)
        try:
            await server.start()
            _log.info("retention listens", extra={"address": server.address})
            tasks.start(scheduler.run())
            tasks.start(_sample(sampler, clock))
            yield server
        finally:
            await server.stop(0)
            await tasks.cancel()
            await planner.close()
        tasks.raise_failure()


def _jobs(settings: RetentionSettings, host: JobHost, sampler: Sampler) -> list[Job]:
    async def store(dry_run: bool, report: Report) -> Outcome:  # noqa: ARG001 - it takes no time
        return Stored(f"metrics-{uuid4().hex}", {"rows": 0 if dry_run else await sampler.store()})

    return [
        Job(
            JobName.METRICS,
            STORE_EVERY_MS,
            f"MetricsService started sample_interval={SAMPLE_EVERY_MS} interval={STORE_EVERY_MS}",
            store,
        ),
        Job(
            JobName.RETENTION,
            settings.retention_interval_ms,
            f"RetentionService started retention_interval={settings.retention_interval_ms} "
            f"retention_batch_size={settings.retention_batch_size} "
            f"retention_pass_limit={settings.retention_pass_limit} "
            f"partition_cleanup_days={settings.partition_cleanup_days} "
            f"metrics_retention_days={settings.metrics_retention_days}",
            partial(host.run, JobName.RETENTION),
        ),
        Job(
            JobName.EVICTION,
            settings.eviction_interval_ms,
            f"EvictionService started eviction_interval={settings.eviction_interval_ms} "
            f"eviction_batch_size={settings.eviction_batch_size} "
            f"eviction_pass_limit={settings.eviction_pass_limit}",
            partial(host.run, JobName.EVICTION),
        ),
    ]


def _figures(scheduler: Scheduler) -> dict[str, float]:
    return {
        name: value
        for job in scheduler.jobs.values()
        if job.name is not JobName.METRICS and job.last_pass_id
        for name, value in (
            (f"{job.name}.last_duration_ms", job.last_duration_ms),
            (f"{job.name}.last_removed", sum(job.last_counts.values())),
        )
    }


async def _sample(sampler: Sampler, clock: Clock) -> None:
    """Only sample; the metrics job stores."""
    while True:
        await clock.sleep_ms(SAMPLE_EVERY_MS)
        sampler.sample()
