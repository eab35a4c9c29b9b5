"""Ending a service by SIGTERM or SIGINT: the first drains it, the second ends it at once.

It only turns signals into a stop of the server; what a service closes afterwards is its own matter.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Final

from tidemark.rpc.server import RpcServer

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

_log = logging.getLogger(__name__)


async def run_until_stopped(server: RpcServer, grace_ms: int) -> None:
    """Return when the started server has stopped, by a signal or because somebody stopped it.

    The first signal gives calls in progress `grace_ms`, the second cancels them, and a third has
    its usual effect: it kills the process.
    """
    loop = asyncio.get_running_loop()
    stops: list[asyncio.Task[None]] = []

    def on_signal(received: signal.Signals) -> None:
        calls = server.calls_in_progress
        if not stops:
            _log.info("%s: stopping, %d calls in progress", received.name, calls)
            stops.append(loop.create_task(server.stop(grace_ms)))
        else:
            _log.warning("%s again: cancelling %d calls", received.name, calls)
            stops.append(loop.create_task(server.stop(0)))
            _restore(loop)

    for each in SIGNALS:
        loop.add_signal_handler(each, on_signal, each)
    try:
        await server.wait_stopped()
        for stop in stops:
            await stop
    finally:
        _restore(loop)


def _restore(loop: asyncio.AbstractEventLoop) -> None:
    for each in SIGNALS:
        loop.remove_signal_handler(each)
