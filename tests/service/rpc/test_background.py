"""Background tasks: a service does not live on without one of its loops (S5)."""

import asyncio
import logging

import pytest

from tidemark.errors import FormatNotSupported
from tidemark.rpc.server import RpcServer
from tidemark.service.background import BackgroundTasks


class _Loop:
    """A task that does not end by itself."""

    def __init__(self) -> None:
        self.running = asyncio.Event()
        self.was_cancelled = False

    async def run(self) -> None:
        self.running.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.was_cancelled = True


async def _fail(error: Exception) -> None:
    raise error


async def _return() -> None:
    return


async def test_a_task_that_fails_stops_the_server_and_is_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """S5: a loop that ended in silence would leave a process that only looks as if it served."""
    server = RpcServer("127.0.0.1:0")
    await server.start()
    tasks, loop = BackgroundTasks(server), _Loop()
    tasks.start(loop.run())

    with caplog.at_level(logging.ERROR):
        tasks.start(_fail(ZeroDivisionError("in a loop")))
        tasks.start(_fail(KeyError("later")))
        await server.wait_stopped()
        await tasks.cancel()

    assert loop.was_cancelled
    with pytest.raises(ZeroDivisionError, match="in a loop"):
        tasks.raise_failure()
    [record] = caplog.records
    assert record.levelname == "CRITICAL"
    assert record.exc_info is not None


async def test_a_refusal_is_logged_as_a_line_and_raised_as_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """S5: the process prints the reason and exits with the status of a refused configuration."""
    server = RpcServer("127.0.0.1:0")
    await server.start()
    tasks = BackgroundTasks(server)

    with caplog.at_level(logging.ERROR):
        tasks.start(_fail(FormatNotSupported("stored in format 1")))
        await server.wait_stopped()
        await tasks.cancel()

    with pytest.raises(FormatNotSupported):
        tasks.raise_failure()
    [record] = caplog.records
    assert record.levelname == "ERROR"
    assert record.exc_info is None


async def test_tasks_that_end_or_are_cancelled_stop_nothing() -> None:
    server = RpcServer("127.0.0.1:0")
    await server.start()
    tasks, loop = BackgroundTasks(server), _Loop()
    tasks.start(_return())
    tasks.start(loop.run())
    await loop.running.wait()

    await tasks.cancel()

    assert loop.was_cancelled
    assert not server.stopping.is_set()
    tasks.raise_failure()
    await server.stop(0)
