"""Services as child processes: started, watched until they are healthy, stopped in order.

`tidemark up`, the tests and the benchmarks all run their clusters through this module. It starts a
service as `python -m <module>` and talks to it by signals and gRPC health alone; it never imports
one. Children die with the process that started them, however that ends.
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
"""How long a service may take to become healthy: far more than it needs, for busy machines."""

STOP_TIMEOUT_MS: Final = 12_000
"""How long a service may take to stop: its default grace for open calls, and a little more."""

_STDERR: Final = 2
_LOG_TAIL_BYTES: Final = 65_536
_REASON_CHARACTERS_MAX: Final = 500
_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


class ServiceFailed(Exception):
    """A service did not become healthy, or ended unasked. The text is one line, for operators."""

    def __init__(self, text: str, exit_code: int | None = None) -> None:
        super().__init__(text)
        self.exit_code = exit_code
        """None while the process still runs."""


class ServiceProcess:
    """One service in a process of its own. May be started again after it has ended.

    It gets a session of its own, so that Ctrl-C in a terminal reaches only its parent, which then
    stops its children in order.
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
        """`address` is where health is asked, `health_service` about what; "" is the whole server.

        `environment` goes on top of this process's own. Output is appended to `log_file`, or goes
        to this process's stderr.
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
        """The process id, also after the end."""
        return self._started().pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the process. It dies with the calling thread: call it from a lasting one."""
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
        """Return once it says that it serves; ServiceFailed if it ends or takes too long."""
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
        """The exit code, once it has ended; negative is the signal that killed it."""
        return await self._started().wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens if it has ended."""
        with suppress(ProcessLookupError):
            self._started().send_signal(number)

    async def kill(self) -> int:
        """End it at once, as a crash would. Returns when it is gone."""
        self.signal(signal.SIGKILL)
        return await self.wait()

    async def stop(self, timeout_ms: int = STOP_TIMEOUT_MS) -> int:
        """Ask it to end, kill it if it does not. The exit code tells which: 0 is a clean end."""
        self.signal(signal.SIGTERM)
        try:
            return await self._clock.wait_for(self.wait(), timeout_ms)
        except TimeoutError:
            return await self.kill()

    def failure(self) -> ServiceFailed:
        """Why it ended, after it has."""
        exit_code = self._started().returncode
        assert exit_code is not None, f"{self.name} is still running"
        if exit_code < 0:
            return ServiceFailed(
                f"{self.name} was killed by {signal.Signals(-exit_code).name}", exit_code
            )
        reason = self._last_words()
        text = f"{self.name} ended with exit code {exit_code}" + (f": {reason}" if reason else "")
        return ServiceFailed(text, exit_code)

    def _started(self) -> asyncio.subprocess.Process:
        assert self._process is not None, f"{self.name} was never started"
        return self._process

    def _open_log(self) -> IO[bytes] | None:
        if self.log_file is None:
            return None
        log = self.log_file.open("ab")
        self._log_offset = log.tell()
        return log

    def _last_words(self) -> str:
        """The last line of its log; nothing if that went to stderr, where it can be seen."""
        if self.log_file is None:
            return ""
        with self.log_file.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_offset, end - _LOG_TAIL_BYTES))
            lines = log.read().decode("utf-8", "replace").split("\n")
        words = next((line for line in reversed(lines) if line.strip()), "")
        return _message(words)[:_REASON_CHARACTERS_MAX]


def _message(line: str) -> str:
    """What a line says: of a log record in JSON its message and the last line of its exception."""
    try:
        record = json.loads(line)
        message = str(record["message"])
    except (ValueError, TypeError, KeyError):
        return line.strip()
    exception = str(record.get("exception", "")).strip()
    return f"{message}: {exception.splitlines()[-1]}" if exception else message
