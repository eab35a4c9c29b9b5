"""Stopping a service by SIGTERM, SIGINT or SIGHUP: the first drains, the second stops at once.

This module only stops the server; the service closes its own parts afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Iterable
from typing import Final

from tidemark.rpc.server import RpcServer

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Sent by an orchestrator, by Ctrl-C and by a terminal that closes."""

_log = logging.getLogger(__name__)


async def run_until_stopped(server: RpcServer, grace_ms: int) -> None:
    """Return once the started server has stopped, by a signal or by a call of `stop`.

    The first signal gives running calls `grace_ms`, the second cancels them, and a third kills the
    process. Under `nohup`, SIGHUP stays ignored.
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
