"""A service as a child process: start it, wait until it is healthy, stop it.

`tidemark up`, the tests and the benchmarks run their clusters through this module. It starts a
service as `python -m <module>` and controls it by signals and gRPC health only; it never imports
one. Children die with the process that started them, even if that is killed.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO, Final

from tidemark.clock import Clock, SystemClock
from tidemark.errors import TidemarkError
from tidemark.local import die_with_parent
from tidemark.rpc import open_channel, wait_until_serving

HEALTHY_TIMEOUT_MS: Final = 60_000
"""How long a service may take to become healthy; generous, for busy machines."""

STOP_TIMEOUT_MS: Final = 12_000
"""How long a service may take to stop: its default grace period for open calls, plus slack."""

_STDERR: Final = 2
_LOG_TAIL_BYTES: Final = 65_536
_REASON_CHARACTERS_MAX: Final = 500
_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


class ServiceFailed(Exception):
    """A service did not become healthy, or ended unexpectedly. One line, for operators."""

    def __init__(self, text: str, exit_code: int | None = None) -> None:
        super().__init__(text)
        self.exit_code = exit_code
        """None while the process is running."""


class ServiceProcess:
    """One service in its own process. It can be started again after it has ended.

    The process has its own session, so that Ctrl-C in a terminal reaches only the parent, which
    then stops its children in order.
    """

    def __init__(
        self,
        name: str,
        module: str,
        *,
        address: str,
        health_service: str = "",
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] = _NOTHING,
        log_file: Path | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`health_service` at `address` is checked for health; "" is the whole server.

        `environment` is added to that of this process. Output is appended to `log_file`, or goes to
        stderr of this process.
        """
        self.name = name
        self.address = address
        self.log_file = log_file
        self._health_service = health_service
        self._command = (module, *arguments)
        self._environment = environment
        self._clock = clock or SystemClock()
        self._process: asyncio.subprocess.Process | None = None
        self._log_offset = 0

    @property
    def pid(self) -> int:
        """The process id, also after the process has ended."""
        return self._started().pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the process. It dies with the calling thread, so that thread must stay alive."""
        assert not self.running, f"{self.name} is already running"
        output = self._open_log()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid())),
                *self._command,
                stdin=subprocess.DEVNULL,
                stdout=output or _STDERR,
                stderr=output or _STDERR,
                env={**os.environ, **self._environment},  # noqa: TID251 - handed on, not read
                start_new_session=True,
            )
        finally:
            if output is not None:
                output.close()

    async def wait_healthy(self, timeout_ms: int = HEALTHY_TIMEOUT_MS) -> None:
        """Return once it reports SERVING; raises ServiceFailed if it ends or takes too long."""
        async with open_channel(self.address) as channel:
            serving = asyncio.ensure_future(
                wait_until_serving(channel, self._health_service, timeout_ms, self._clock)
            )
            ended = asyncio.ensure_future(self.wait())
            try:
                await asyncio.wait({serving, ended}, return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    raise self.failure()
                await serving
            except TidemarkError as error:
                raise ServiceFailed(f"{self.name} is not healthy: {error.detail}") from None
            finally:
                serving.cancel()
                ended.cancel()
                await asyncio.wait({serving, ended})

    async def wait(self) -> int:
        """Wait for the end and return the exit code; negative is the signal that killed it."""
        return await self._started().wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; no effect if the process has ended."""
        with suppress(ProcessLookupError):
            self._started().send_signal(number)

    async def kill(self) -> int:
        """Kill it, as a crash would, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        return await self.wait()

    async def stop(self, timeout_ms: int = STOP_TIMEOUT_MS) -> int:
        """Stop it gracefully, or kill it after the timeout; returns the exit code, 0 if clean."""
        self.signal(signal.SIGTERM)
        try:
            return await self._clock.wait_for(self.wait(), timeout_ms)
        except TimeoutError:
            return await self.kill()

    def failure(self) -> ServiceFailed:
        """Why it ended; it must have ended."""
        exit_code = self._started().returncode
        assert exit_code is not None, f"{self.name} is still running"
        if exit_code < 0:
            return ServiceFailed(
                f"{self.name} was killed by {signal.Signals(-exit_code).name}", exit_code
            )
        reason = self._last_log_line()
        text = f"{self.name} ended with exit code {exit_code}" + (f": {reason}" if reason else "")
        return ServiceFailed(text, exit_code)

    def last_error(self) -> str:
        """The last line of its log, if that is an error or a warning; else empty."""
        line = self._last_line()
        is_error = _level(line) in ("error", "warning")
        return _message(line)[:_REASON_CHARACTERS_MAX] if is_error else ""

    def _started(self) -> asyncio.subprocess.Process:
        assert self._process is not None, f"{self.name} was never started"
        return self._process

    def _open_log(self) -> IO[bytes] | None:
        if self.log_file is None:
            return None
        log = self.log_file.open("ab")
        self._log_offset = log.tell()
        return log

    def _last_log_line(self) -> str:
        return _message(self._last_line())[:_REASON_CHARACTERS_MAX]

    def _last_line(self) -> str:
        """The last line of its log; empty if the log went to stderr, where the user sees it, or was
        not begun."""
        if self.log_file is None or not self.log_file.exists():
            return ""
        with self.log_file.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_offset, end - _LOG_TAIL_BYTES))
            lines = log.read().decode("utf-8", "replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "")


def _message(line: str) -> str:
    """The text of a line; for a JSON log record, its message and the last line of its exception."""
    try:
        record = json.loads(line)
        message = str(record["message"])
    except (ValueError, TypeError, KeyError):
        return line.strip()
    exception = str(record.get("exception", "")).strip()
    return f"{message}: {exception.splitlines()[-1]}" if exception else message


def _level(line: str) -> str:
    """Of a JSON log record; empty for another line."""
    try:
        return str(json.loads(line)["level"])
    except (ValueError, TypeError, KeyError):
        return ""
