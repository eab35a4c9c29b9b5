"""The planner as the scheduler sees it: started for a pass, stopped when idle (P4).

Spark runs in a child process, so that its memory is free again when it stops, and so that a lost
Java, a pass that does not end and a Spark that does not start cost the child and not the service.
"""

import asyncio
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Final

from spark_batch.passes.outcome import JobName, Pass, Phase, Progress, Report
from spark_batch.planner.lines import (
    PassDone,
    PassFailed,
    PassProgress,
    PassRequest,
    Ready,
    SparkFailed,
    decode_reply,
)
from spark_batch.planner.spark_passes import INTERRUPT_MS, lost_spark
from tidemark.clock import Clock
from tidemark.errors import DeadlineExceeded, Unavailable
from tidemark.local import die_with_parent
from tidemark.settings import RetentionSettings

START_MS: Final = 180_000
"""How long Spark may take to start; generous, for busy machines."""

STOP_MS: Final = 5_000
"""How long Spark may take to stop before it is killed."""

BACKOFF_MS: Final = 60_000
BACKOFF_MS_MAX: Final = 900_000

_REPLY_BYTES_MAX: Final = 256 << 20
"""A reply has a finding per topic and rule."""

_log = logging.getLogger(__name__)


class SparkNotStarted(Unavailable):
    """Spark does not start on this machine. `retry_after_ms` is the time until the next attempt."""


class PlannerProcess:
    """Starts and stops the child, and runs passes in it."""

    def __init__(
        self,
        settings: RetentionSettings,
        clock: Clock,
        command: Sequence[str] = ("spark_batch.planner",),
    ) -> None:
        """`command` is the Python module of the child, and its arguments."""
        self._settings = settings
        self._clock = clock
        self._command = command
        self._changing = asyncio.Lock()  # held while the child starts or stops
        self._child: _Child | None = None
        self._running = 0
        self._idle: asyncio.Task[None] | None = None
        self._failures = 0
        self._numbers = count(1)
        self.changed = asyncio.Event()
        """Set whenever the child has started or ended."""

    @property
    def pid(self) -> int | None:
        """The process id of the child, while there is one."""
        return None if self._child is None or self._child.ended else self._child.process.pid

    async def run(self, job: JobName, dry_run: bool, report: Report) -> Pass:
        """Run a pass, and report its progress; starts Spark if it does not run.

        Raises SparkNotStarted, DeadlineExceeded, Unavailable if Spark is lost, or the error of the
        pass.
        """
        self._running += 1
        if self._idle is not None:
            self._idle.cancel()
        try:
            if self.pid is None:
                report(Progress(Phase.STARTING_SPARK))
            async with self._changing:
                child = await self._running_child()
            report(Progress(Phase.RUNNING))
            return await self._run(child, PassRequest(next(self._numbers), job, dry_run), report)
        finally:
            self._running -= 1
            if not self._running and self.pid is not None:
                self._idle = asyncio.create_task(self._stop_when_idle())

    async def close(self) -> None:
        """Stop Spark, or kill it while it starts; running passes fail."""
        if self._idle is not None:
            self._idle.cancel()
        child = self._child
        if child is not None:
            await child.stop(self._clock)

    async def _running_child(self) -> "_Child":
        if self._child is None or self._child.ended:
            child = self._child = await _Child.spawn(self._command)
            try:
                await self._clock.wait_for(child.wait_ready(), START_MS)
            except TimeoutError:
                child.kill()
                raise self._not_started(f"no answer within {START_MS} ms") from None
            except Unavailable as error:
                raise self._not_started(error.detail) from None
            except asyncio.CancelledError:
                child.kill()
                raise
            self._failures = 0
            self.changed.set()
        return self._child

    def _not_started(self, why: str) -> SparkNotStarted:
        self._failures += 1
        retry_ms = min(BACKOFF_MS * 2 ** (self._failures - 1), BACKOFF_MS_MAX)
        return SparkNotStarted(f"Spark does not start: {why}", retry_after_ms=retry_ms)

    async def _run(self, child: "_Child", request: PassRequest, report: Report) -> Pass:
        # The child ends a pass by itself; this is for a child that does not.
        timeout_ms = self._settings.pass_timeout_ms + 2 * INTERRUPT_MS
        try:
            return await self._clock.wait_for(child.run(request, report), timeout_ms)
        except TimeoutError:
            _log.error("the planner does not end a %s pass and is killed", request.job)
            child.kill()
            raise DeadlineExceeded(
                f"the {request.job} pass took longer than {timeout_ms} ms"
            ) from None

    async def _stop_when_idle(self) -> None:
        await self._clock.sleep_ms(self._settings.spark_idle_stop_s * 1000)
        async with self._changing:
            if self._running or self._child is None:
                return
            child, self._child = self._child, None
            await child.stop(self._clock)
        _log.info("Spark stopped: nothing was due for %d s", self._settings.spark_idle_stop_s)
        self.changed.set()


class _Child:
    """One process and the passes that run in it."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._waiting: dict[int, asyncio.Future[Pass]] = {}
        self._reports: dict[int, Report] = {}
        self._ready = asyncio.Event()
        self._why = ""
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def spawn(cls, command: Sequence[str]) -> "_Child":
        """Start the process in a separate session, so that it is killed with its Java."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid()), *command),
            stdin=PIPE,
            stdout=PIPE,
            limit=_REPLY_BYTES_MAX,
            start_new_session=True,
        )
        return cls(process)

    @property
    def ended(self) -> bool:
        """Whether it has stopped running passes."""
        return self._reading.done()

    async def wait_ready(self) -> None:
        """Return once Spark runs. Raises Unavailable if the process ends before."""
        ready = asyncio.ensure_future(self._ready.wait())
        try:
            await asyncio.wait({ready, self._reading}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if not self._ready.is_set():
            raise Unavailable(self._why_ended())

    async def run(self, request: PassRequest, report: Report) -> Pass:
        """Run a pass. Raises its error, or Unavailable if the process ends before."""
        if self.ended:
            raise self._lost()
        assert self.process.stdin is not None
        done: asyncio.Future[Pass] = asyncio.get_running_loop().create_future()
        self._waiting[request.number] = done
        self._reports[request.number] = report
        try:
            self.process.stdin.write(request.encode())
            return await done
        finally:
            del self._waiting[request.number]
            del self._reports[request.number]

    def kill(self) -> None:
        """Kill the process and its Java."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def stop(self, clock: Clock) -> None:
        """Let Spark stop; kill it if it is starting or does not stop in time."""
        assert self.process.stdin is not None
        try:
            if self._ready.is_set():
                self.process.stdin.close()
                with suppress(TimeoutError):
                    await clock.wait_for(asyncio.shield(self._reading), STOP_MS)
        finally:
            self.kill()  # also when a pass comes meanwhile and does not let it wait
        await self._reading

    async def _read(self) -> None:
        """Pass on the replies until the process ends."""
        assert self.process.stdout is not None
        try:
            while line := await self.process.stdout.readline():
                self._receive(line)
        except (ValueError, KeyError):
            _log.exception("the planner sent an unreadable reply and is killed")
            self.kill()
        await self.process.wait()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(self._lost())

    def _receive(self, line: bytes) -> None:
        match decode_reply(line):
            case Ready():
                self._ready.set()
            case SparkFailed(why):
                self._why = why
            case PassProgress(number, tasks, tasks_done, planned, applied):
                if number in self._reports:
                    progress = Progress(Phase.RUNNING, tasks, tasks_done, planned, applied)
                    self._reports[number](progress)
            case PassDone(number, outcome):
                if number in self._waiting:
                    self._waiting[number].set_result(outcome)
            case PassFailed(number, error):
                if number in self._waiting:
                    self._waiting[number].set_exception(error)

    def _lost(self) -> Unavailable:
        return lost_spark(self._why_ended())

    def _why_ended(self) -> str:
        return self._why or f"its process ended with status {self.process.returncode}"
