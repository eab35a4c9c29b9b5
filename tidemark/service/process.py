"""The main function of a service process: settings, telemetry, serve until a signal, stop.

Every `python -m x_svc` is one call of `main`. The `app.py` of a service constructs its parts; this
module decides how the process starts and ends, and its exit status.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Final, NoReturn, TypeVar

import uvloop

from tidemark import telemetry
from tidemark.clock import Clock, SystemClock
from tidemark.errors import TidemarkError
from tidemark.rpc.server import RpcServer
from tidemark.service.memory import (
    install_memory_trim,
    keep_name_caches_young,
    tune_garbage_collector,
)
from tidemark.service.signals import run_until_stopped
from tidemark.settings import ServiceSettings, load_or_exit

CANNOT_START: Final = 2
"""Exit status of a service that cannot run as configured: a restart does not help."""

S = TypeVar("S", bound=ServiceSettings)
App = Callable[[S, Clock], AbstractAsyncContextManager[RpcServer]]
"""Entering starts the service, leaving stops it."""


def main(service_name: str, settings_type: type[S], app: App[S]) -> None:
    """Run a service until SIGTERM, SIGINT or SIGHUP, then exit with 0."""
    settings = load_or_exit(settings_type)
    try:
        started = telemetry.setup(service_name, settings.telemetry)
    except OSError as error:
        _exit_with(f"metrics: {error}")
    try:
        uvloop.run(_serve(settings, app))
    except (TidemarkError, OSError) as error:
        _exit_with(error.detail if isinstance(error, TidemarkError) else error.args[-1])
    finally:
        started.shutdown()


async def _serve(settings: S, app: App[S]) -> None:
    install_memory_trim()
    clock = SystemClock()
    async with app(settings, clock) as server:
        tune_garbage_collector()
        ageing = asyncio.create_task(keep_name_caches_young(clock))
        await run_until_stopped(server, settings.shutdown_grace_ms)
        ageing.cancel()


def _exit_with(line: object) -> NoReturn:
    print(line, file=sys.stderr)
    raise SystemExit(CANNOT_START)
