"""Wires the scheduler together: the only place that constructs its parts.

Spark starts when this scheduler first gets the lease, and runs until the process ends. Spark starts
and passes run in threads, so that the service keeps answering calls and can stop without waiting.
If Spark's Java ends, or a pass cannot be ended, the process gives up the lease and exits with
status 1: PySpark cannot replace its Java, and a standby or a restart continues.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast
from uuid import uuid4

from pyspark_tidemark.storage import addresses
from spark_batch.api.job_service import JobService
from spark_batch.passes.findings import Finding
from spark_batch.passes.outcome import JobName
from spark_batch.scheduler import Job, Outcome, Scheduler
from spark_batch.session import start_session
from spark_batch.storage_client import find_partitions
from tidemark.api.lifecycle.v1.jobs_pb2_grpc import add_JobServiceServicer_to_server
from tidemark.api.storage.v1.retention_pb2 import HoldScheduleRequest
from tidemark.api.storage.v1.retention_pb2_grpc import RetentionServiceStub
from tidemark.clock import Clock
from tidemark.errors import DeadlineExceeded, Unavailable
from tidemark.rpc.channel import open_channel
from tidemark.rpc.server import RpcServer
from tidemark.service.identity import process_identity
from tidemark.settings import RetentionSettings
from tidemark.system_metrics.sampler import SAMPLE_EVERY_MS, STORE_EVERY_MS, Sampler, recorder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_batch.passes.jobs import Jobs

_STOP_SPARK_MS: Final = 5_000
_INTERRUPT_MS: Final = 60_000
"""How long a pass may take to end once its Spark jobs were interrupted."""
SPARK_LOST: Final = 1
"""Exit status of a scheduler that lost Spark: a restart helps."""
_HOLD_TIMEOUT_S: Final = 5.0
"""Bounded, so that the scheduler can stop while storage does not answer."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


class SparkHost:
    """Storage and Spark, as the scheduler uses them."""

    def __init__(
        self, settings: RetentionSettings, retention: Any, holder: str, clock: Clock
    ) -> None:
        self._settings = settings
        self._retention = retention
        self._holder = holder
        self._clock = clock
        self._starting = asyncio.Lock()
        self._spark: SparkSession | None = None
        self._jobs: Jobs | None = None
        self._closing = False
        self.lost = asyncio.Event()
        """Set once Spark cannot run passes any more."""

    async def check(self) -> None:
        await _in_thread(partial(find_partitions, self._settings.storage_address))

    async def hold(self, hold_ms: int) -> tuple[bool, str]:
        request = HoldScheduleRequest(holder=self._holder, hold_ms=hold_ms)
        answer = await self._retention.HoldSchedule(request, timeout=_HOLD_TIMEOUT_S)
        return answer.held, answer.holder

    async def prepare(self) -> None:
        async with self._starting:
            if self._jobs is None:
                self._jobs = await _in_thread(self._start)
                self._watch_java()

    def _start(self) -> "Jobs":
        from spark_batch.passes.jobs import Jobs  # needs PySpark

        self._spark = start_session(self._settings)
        _log.info("Spark runs", extra={"master": self._settings.spark_master})
        return Jobs(self._spark, self._settings, self._clock)

    async def retention(self, dry_run: bool) -> Outcome:
        return await self._run(JobName.RETENTION, partial(self._ready().retention, dry_run))

    async def eviction(self, dry_run: bool) -> Outcome:
        return await self._run(JobName.EVICTION, partial(self._ready().eviction, dry_run))

    async def _run(self, name: JobName, work: "Callable[[], Outcome]") -> Outcome:
        """Run a pass in a thread, and end it if it takes too long. Raises DeadlineExceeded."""
        running = asyncio.ensure_future(_in_thread(work))
        with suppress(TimeoutError):
            return await self._wait(running, self._settings.pass_timeout_ms)
        _log.error("a %s pass takes too long and is interrupted", name)
        interrupting = asyncio.ensure_future(_in_thread(partial(self._ready().interrupt, name)))
        try:
            await self._wait(asyncio.gather(interrupting, running, return_exceptions=True))
        except TimeoutError:
            self._lose_spark(f"a {name} pass did not end when it was interrupted")
        timeout_ms = self._settings.pass_timeout_ms
        raise DeadlineExceeded(f"the {name} pass took longer than {timeout_ms} ms")

    async def _wait(self, running: "asyncio.Future[T]", timeout_ms: int = _INTERRUPT_MS) -> T:
        return await self._clock.wait_for(asyncio.shield(running), timeout_ms)

    def _watch_java(self) -> None:
        """Notice the end of the Java that was started for this session."""
        assert self._spark is not None
        java = getattr(self._spark.sparkContext._gateway, "proc", None)
        if java is None:
            return  # not started by this process
        loop = asyncio.get_running_loop()

        def wait() -> None:
            status = java.wait()
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._lose_spark, f"its Java ended with status {status}")

        Thread(target=wait, daemon=True).start()

    def _lose_spark(self, why: str) -> None:
        if not self._closing and not self.lost.is_set():
            _log.error("Spark is lost, and this scheduler gives up: %s", why)
            self.lost.set()

    def _ready(self) -> "Jobs":
        if self._jobs is None:
            raise Unavailable("Spark has not been started yet")
        return self._jobs

    async def close(self) -> None:
        """Stop Spark; a running pass fails, and the next scheduler does the rest."""
        self._closing = True
        if self._spark is not None and not self.lost.is_set():
            with suppress(TimeoutError):  # it dies with this process anyway
                await self._clock.wait_for(_in_thread(self._spark.stop), _STOP_SPARK_MS)


async def _in_thread(work: Callable[[], T]) -> T:
    """Run blocking work in a thread that does not delay the end of the process.

    asyncio joins its own threads on exit, and starting Spark takes longer than a stop may take.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def set_outcome(value: T | None, error: Exception | None) -> None:
        if result.cancelled():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(cast("T", value))

    def run() -> None:
        value, failure = None, None
        try:
            value = work()
        except Exception as error:
            failure = error
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(set_outcome, value, failure)

    Thread(target=run, daemon=True).start()
    return await result


@dataclass(frozen=True, slots=True)
class Stored:
    """The outcome of one pass of the metrics job."""

    pass_id: str
    counts: Mapping[str, int]
    findings: tuple[Finding, ...] = ()
    failed: Mapping[int, str] = field(default_factory=dict)


@asynccontextmanager
async def retention(settings: RetentionSettings, clock: Clock) -> AsyncIterator[RpcServer]:
    """A scheduler that answers calls at once, and runs its jobs as soon as it can.

    Leaving it raises SystemExit if Spark was lost.
    """
    holder = process_identity()
    # A pass has no time limit.
    server = RpcServer(settings.listen, clock=clock, unary_deadline_ms=None)
    async with open_channel(addresses(settings.storage_address)[0]) as channel:
        stub: Any = RetentionServiceStub(channel)
        host = SparkHost(settings, stub, holder, clock)
        sampler = Sampler(lambda: _figures(scheduler), recorder(stub, holder))
        scheduler = Scheduler(_jobs(settings, host, sampler), host, clock)
        server.add(add_JobServiceServicer_to_server, JobService(scheduler, clock))
        tasks = []
        try:
            await server.start()
            _log.info("retention listens", extra={"address": server.address})
            tasks = [
                asyncio.create_task(scheduler.run()),
                asyncio.create_task(_sample(sampler, clock)),
                asyncio.create_task(_stop_when_lost(host, server)),
            ]
            yield server
        finally:
            await server.stop(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await host.close()
        if host.lost.is_set():
            raise SystemExit(SPARK_LOST)


def _jobs(settings: RetentionSettings, host: SparkHost, sampler: Sampler) -> list[Job]:
    async def store(dry_run: bool) -> Outcome:
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
            host.retention,
        ),
        Job(
            JobName.EVICTION,
            settings.eviction_interval_ms,
            f"EvictionService started eviction_interval={settings.eviction_interval_ms} "
            f"eviction_batch_size={settings.eviction_batch_size} "
            f"eviction_pass_limit={settings.eviction_pass_limit}",
            host.eviction,
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


async def _stop_when_lost(host: SparkHost, server: RpcServer) -> None:
    await host.lost.wait()
    await server.stop(0)


async def _sample(sampler: Sampler, clock: Clock) -> None:
    """Only sample; the metrics job stores."""
    while True:
        await clock.sleep_ms(SAMPLE_EVERY_MS)
        sampler.sample()
