"""The passes of one Spark session: run in threads, and ended when they take too long.

If Spark's Java ends, or a pass cannot be ended, Spark is lost: PySpark cannot replace its Java, so
the process that has it must end, and another one takes its place.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Final, TypeVar

from spark_batch.passes.outcome import JobName, Pass
from spark_batch.session import start_session
from spark_batch.threads import in_thread
from tidemark.clock import Clock
from tidemark.errors import DeadlineExceeded, TidemarkError, Unavailable
from tidemark.settings import RetentionSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_batch.passes.jobs import Jobs

INTERRUPT_MS: Final = 60_000
"""How long a pass may take to end once its Spark jobs were interrupted."""

REPORT_MS: Final = 1_000

NOTICE_MS: Final = 2_000
"""How long the end of Java may go unnoticed after a pass has failed because of it."""

ReportProgress = Callable[[int, int, int, int], None]
"""Receives the Spark tasks of a pass so far, how many are done, and the same of its rows."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


def lost_spark(why: str) -> Unavailable:
    """The error of passes that were running when Spark was lost."""
    return Unavailable(f"Spark is lost, and the next pass starts it again: {why}")


class SparkPasses:
    """A Spark session that runs passes. `start` it first."""

    def __init__(self, settings: RetentionSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._spark: SparkSession | None = None
        self._jobs: Jobs | None = None
        self._closing = False
        self.lost = asyncio.Event()
        """Set once Spark cannot run passes any more."""
        self.why_lost = ""

    async def start(self) -> None:
        """Start Spark, or use the session that exists; takes some seconds. Raises SparkMissing."""
        self._jobs = await in_thread(self._start)
        self._watch_java()

    def _start(self) -> "Jobs":
        self._spark = start_session(self._settings)
        from spark_batch.passes.jobs import Jobs  # needs PySpark

        _log.info("Spark runs", extra={"master": self._spark.sparkContext.master})
        return Jobs(self._spark, self._settings, self._clock)

    async def run(self, job: JobName, dry_run: bool, report: ReportProgress | None = None) -> Pass:
        """Run a pass, and end it if it takes too long.

        Raises DeadlineExceeded, Unavailable if Spark is lost, or the error of the pass.
        """
        reporting = asyncio.create_task(self._report(job, report)) if report else None
        try:
            return await self._run(job, dry_run)
        except TidemarkError:
            raise
        except Exception as error:
            # Without Java, calls of PySpark fail in many ways, none of which names the cause.
            with suppress(TimeoutError):
                await self._clock.wait_for(self.lost.wait(), NOTICE_MS)
            if self.lost.is_set():
                raise lost_spark(self.why_lost) from error
            raise
        finally:
            if reporting is not None:
                reporting.cancel()

    async def _report(self, job: JobName, report: ReportProgress) -> None:
        """Report how far a pass is once a second, when that has changed."""
        assert self._jobs is not None
        before = (0, 0, 0, 0)
        while True:
            await self._clock.sleep_ms(REPORT_MS)
            with suppress(Exception):  # Spark is lost, or its version has no such call
                found = await in_thread(partial(self._jobs.progress, job))
                if found != before:
                    report(*found)
                    before = found

    async def _run(self, job: JobName, dry_run: bool) -> Pass:
        assert self._jobs is not None
        work = self._jobs.retention if job is JobName.RETENTION else self._jobs.eviction
        running = asyncio.ensure_future(in_thread(partial(work, dry_run)))
        with suppress(TimeoutError):
            return await self._wait(running, self._settings.pass_timeout_ms)
        _log.error("a %s pass takes too long and is interrupted", job)
        interrupting = asyncio.ensure_future(in_thread(partial(self._jobs.interrupt, job)))
        try:
            await self._wait(asyncio.gather(interrupting, running, return_exceptions=True))
        except TimeoutError:
            self._lose(f"a {job} pass did not end when it was interrupted")
        timeout_ms = self._settings.pass_timeout_ms
        raise DeadlineExceeded(f"the {job} pass took longer than {timeout_ms} ms")

    async def _wait(self, running: "asyncio.Future[T]", timeout_ms: int = INTERRUPT_MS) -> T:
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
                loop.call_soon_threadsafe(self._lose, f"its Java ended with status {status}")

        Thread(target=wait, daemon=True).start()

    def _lose(self, why: str) -> None:
        if not self._closing and not self.lost.is_set():
            _log.error("Spark is lost: %s", why)
            self.why_lost = why
            self.lost.set()

    async def stop(self) -> None:
        """Stop Spark; a running pass fails, and the next one does the rest."""
        self._closing = True
        if self._spark is not None and not self.lost.is_set():
            await in_thread(self._spark.stop)
