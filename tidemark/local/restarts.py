"""Keeps the services of a local cluster running: a service that ends is restarted.

A pause precedes each restart and doubles every time. After several failures in a row the service is
given up, because another restart would only hide the cause. Port, data and log file stay the same.
"""

import asyncio
from collections.abc import Callable
from typing import Final, NoReturn

from tidemark.clock import Clock
from tidemark.local.cluster import LocalCluster, ServiceName
from tidemark.local.service_process import HEALTHY_TIMEOUT_MS, ServiceFailed

FAILURES_MAX: Final = 5
"""A service that fails this often in a row is not restarted."""

STABLE_AFTER_MS: Final = 60_000
"""A service that was healthy for this long has recovered: its failures are counted from 1 again."""

PAUSE_MS: Final = 500
"""The pause before the first restart; it doubles with every failure in a row."""


class GaveUp(Exception):
    """A service failed too often in a row. The text is part of a line, for operators."""


class RestartPolicy:
    """Counts the failures of one service."""

    def __init__(self) -> None:
        self._failures = 0

    def pause_ms(self, healthy_ms: int) -> int | None:
        """The pause after a failure; None to give up.

        `healthy_ms` is how long the service was healthy before it failed.
        """
        self._failures = 1 if healthy_ms >= STABLE_AFTER_MS else self._failures + 1
        if self._failures >= FAILURES_MAX:
            return None
        return PAUSE_MS << (self._failures - 1)


class ServiceKeeper:
    """Keeps one service running. Others can wait for it through `serving`."""

    def __init__(
        self,
        cluster: LocalCluster,
        name: ServiceName,
        clock: Clock,
        report: Callable[[str], None],
        *,
        after: "ServiceKeeper | None" = None,
        healthy_timeout_ms: int = HEALTHY_TIMEOUT_MS,
    ) -> None:
        """`report` gets one line per event. A restart waits until `after` is serving: without it
        the service could not become healthy, and that would count as its own failure.
        """
        self.serving = asyncio.Event()
        self._cluster = cluster
        self._name: ServiceName = name
        self._clock = clock
        self._report = report
        self._after = after
        self._healthy_timeout_ms = healthy_timeout_ms
        self._policy = RestartPolicy()

    async def start(self) -> None:
        """Start the service for the first time; raises GaveUp."""
        try:
            await self._start()
        except (ServiceFailed, OSError) as failure:
            await self._start_again(failure, healthy_ms=0)

    async def keep(self) -> NoReturn:
        """Restart the service, which must be healthy now, whenever it ends; raises GaveUp."""
        while True:
            self.serving.set()
            healthy_since_ms = self._clock.monotonic_ms()
            failure = await self._cluster.wait_failure(self._name)
            self.serving.clear()
            await self._start_again(failure, self._clock.monotonic_ms() - healthy_since_ms)

    async def _start_again(self, failure: Exception, healthy_ms: int) -> None:
        while True:
            pause_ms = self._policy.pause_ms(healthy_ms)
            if pause_ms is None:
                raise GaveUp(f"{failure}, failure {FAILURES_MAX} in a row")
            self._report(f"{failure}; restarting it {self._when(pause_ms)}{self._log()}")
            await self._clock.sleep_ms(pause_ms)
            begin_ms = self._clock.monotonic_ms()
            try:
                await self._start()
            except (ServiceFailed, OSError) as error:
                failure, healthy_ms = error, 0
            else:
                took_ms = self._clock.monotonic_ms() - begin_ms
                self._report(f"{self._name} is serving again ({took_ms / 1000:.1f} s)")
                return

    async def _start(self) -> None:
        if self._after is not None:
            await self._after.serving.wait()
        try:
            await self._cluster.restart(self._name, self._healthy_timeout_ms)
        except ServiceFailed:
            if self._cluster.running(self._name):  # but did not become healthy
                await self._cluster.terminate(self._name)
            raise

    def _when(self, pause_ms: int) -> str:
        if self._after is not None and not self._after.serving.is_set():
            return "once storage is serving"
        return f"in {pause_ms / 1000:g} s"

    def _log(self) -> str:
        log_file = self._cluster.log_file(self._name)
        return "" if log_file is None else f" (log: {log_file})"
