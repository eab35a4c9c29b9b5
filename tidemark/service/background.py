"""Background tasks of a service: they run until it stops, and it stops if one of them fails.

An unexpected error would otherwise end one loop, a link or a timer, in silence: the process would
stay, report that it serves, and never do that work again. Stopped, it is started again.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from tidemark.errors import TidemarkError
from tidemark.rpc.server import RpcServer

_log = logging.getLogger(__name__)


class BackgroundTasks:
    """Those that one service starts and cancels together."""

    def __init__(self, server: RpcServer) -> None:
        self._server = server
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.append(task)
        task.add_done_callback(self._ended)

    async def cancel(self) -> None:
        """Return once all of them have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._stopping is not None:
            await self._stopping

    def raise_failure(self) -> None:
        """Raise the error of the first that failed, if one did: the process exits with it."""
        if self._failure is not None:
            raise self._failure

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None or self._failure is not None:
            return
        self._failure = error
        if isinstance(error, TidemarkError):
            _log.error("this service must not run on: %s", error)
        else:
            _log.critical("a background task has failed: the service stops", exc_info=error)
        self._stopping = asyncio.create_task(self._server.stop(0))
