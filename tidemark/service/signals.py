"""Ending a service by SIGTERM, SIGINT or SIGHUP: the first drains it, the second ends it at once.

It only turns signals into a stop of the server; what a service closes afterwards is its own matter.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Iterable
from typing import Final

from tidemark.rpc.server import RpcServer

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What asks a service to stop: an orchestrator, Ctrl-C, a terminal that is closed."""

_log = logging.getLogger(__name__)


async def run_until_stopped(server: RpcServer, grace_ms: int) -> None:
    """Return when the started server has stopped, by a signal or because somebody stopped it.

    The first signal gives calls in progress `grace_ms`, the second cancels them, and a third has
    its usual effect: it kills the process. Under `nohup`, SIGHUP stays ignored.
    """
    loop = asyncio.get_running_loop()
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    signals = [each for each in SIGNALS if each not in ignored]
    stops: list[asyncio.Task[None]] = []

    def on_signal(received: signal.Signals) -> None:
        calls = server.calls_in_progress
        if not stops:
            _log.info("%s: stopping, %d calls in progress", received.name, calls)
            stops.append(loop.create_task(server.stop(grace_ms)))
        else:
            _log.warning("%s again: cancelling %d calls", received.name, calls)
            stops.append(loop.create_task(server.stop(0)))
            _restore(loop, signals)

    for each in signals:
        loop.add_signal_handler(each, on_signal, each)
    try:
        await server.wait_stopped()
        for stop in stops:
            await stop
    finally:
        _restore(loop, signals)


def _restore(loop: asyncio.AbstractEventLoop, signals: Iterable[signal.Signals]) -> None:
    for each in signals:
        loop.remove_signal_handler(each)
