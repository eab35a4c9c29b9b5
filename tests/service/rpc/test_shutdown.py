"""Stopping: what is in progress completes, what never ends is cancelled, signals end a process."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from tests.support.echo_service import serving, unary_method
from tidemark import errors
from tidemark.rpc import open_channel

LONG_GRACE_MS = 1_000_000  # longer than any test may take: it must not be waited for


class Gate:
    """A handler that signals its start and answers when it is released."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.let_go = asyncio.Event()
        self.ended = asyncio.Event()

    async def unary(self, request: bytes, context: Any) -> bytes:
        self.started.set()
        try:
            await self.let_go.wait()
        finally:
            self.ended.set()
        return b"done"


async def test_a_call_in_progress_completes_and_new_calls_are_refused() -> None:
    """S5: stops gracefully, loses nothing."""
    gate = Gate()

    async with serving({"unary_unary": gate.unary}) as echo:
        call = asyncio.create_task(echo.unary())
        await gate.started.wait()
        stop = asyncio.create_task(echo.server.stop(LONG_GRACE_MS))
        await echo.server.stopping.wait()
        async with open_channel(echo.server.address) as latecomer:
            with pytest.raises(errors.Unavailable):
                await unary_method(latecomer)(b"")
        assert not stop.done()

        gate.let_go.set()

        assert await call == b"done"
        await stop


async def test_a_call_that_never_ends_is_cancelled_after_the_grace() -> None:
    gate = Gate()

    async with serving({"unary_unary": gate.unary}) as echo:
        call = asyncio.create_task(echo.unary())
        await gate.started.wait()

        await echo.server.stop(50)

        assert gate.ended.is_set()
        with pytest.raises(errors.Unavailable):
            await call


async def test_no_handler_runs_any_more_when_the_stop_returns() -> None:
    """S5: what a handler cleans up after its cancellation finds the service still open."""
    started, cleaning, cleaned = asyncio.Event(), asyncio.Event(), asyncio.Event()
    may_finish = asyncio.Event()

    async def answers(requests: Any, context: Any) -> AsyncIterator[bytes]:
        started.set()
        try:
            await asyncio.Event().wait()
            yield b"never"
        finally:
            cleaning.set()
            await may_finish.wait()
            cleaned.set()

    async with serving({"stream_stream": answers}) as echo:
        stream = echo.method("stream_stream")()
        await stream.write(b"open")
        await started.wait()
        stop = asyncio.create_task(echo.server.stop(0))
        await cleaning.wait()
        assert echo.server.calls_in_progress == 1
        assert not stop.done()

        may_finish.set()
        await stop

        assert cleaned.is_set()
        assert echo.server.calls_in_progress == 0


async def test_a_stream_that_watches_for_the_stop_ends_by_itself_within_the_grace() -> None:
    async def answers(requests: Any, context: Any) -> AsyncIterator[bytes]:
        yield b"open"
        await echo.server.stopping.wait()
        yield b"last words"

    async with serving({"stream_stream": answers}) as echo:
        stream = echo.method("stream_stream")()
        assert await stream.read() == b"open"

        stop = asyncio.create_task(echo.server.stop(LONG_GRACE_MS))

        assert await stream.read() == b"last words"
        assert await stream.read() is grpc.aio.EOF
        await stop


async def test_a_health_watcher_does_not_hold_up_the_stop() -> None:
    async with serving({}) as echo:
        stub: Any = HealthStub(echo.channel)
        watch = stub.Watch(HealthCheckRequest())
        assert (await watch.read()).status == HealthCheckResponse.SERVING

        await echo.server.stop(LONG_GRACE_MS)

        assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
        assert await watch.read() is grpc.aio.EOF


async def test_a_second_stop_cuts_the_grace_of_the_first_short() -> None:
    gate = Gate()

    async with serving({"unary_unary": gate.unary}) as echo:
        call = asyncio.create_task(echo.unary())
        await gate.started.wait()
        first = asyncio.create_task(echo.server.stop(LONG_GRACE_MS))
        await echo.server.stopping.wait()

        await echo.server.stop(0)

        await first
        with pytest.raises(errors.Unavailable):
            await call


async def test_cancelling_who_waits_for_the_stop_does_not_break_the_stop() -> None:
    async with serving({}) as echo:
        waiting = asyncio.create_task(echo.server.wait_stopped())
        other = asyncio.create_task(echo.server.wait_stopped())
        await asyncio.wait({waiting}, timeout=0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

        await echo.server.stop(0)

        await other


# --- signals to a real process ------------------------------------------------------------------

PROCESS = """
import asyncio, sys
import grpc
from tidemark.rpc import RpcServer
from tidemark.service.signals import run_until_stopped

async def hold(request, context):
    print("started", flush=True)
    if request == b"until the stop begins":
        await server.stopping.wait()
        return b"done"
    await asyncio.Event().wait()

async def main():
    global server
    server = RpcServer("127.0.0.1:0")
    server.add_service("test.Hold", {"Hold": grpc.unary_unary_rpc_method_handler(hold)})
    await server.start()
    stopping = asyncio.create_task(say_stopping())
    print(server.address, flush=True)
    await run_until_stopped(server, grace_ms=int(sys.argv[1]))
    print("closed", flush=True)

async def say_stopping():
    await server.stopping.wait()
    print("stopping", flush=True)

asyncio.run(main())
"""


class Process:
    """A service in a process of its own, and a channel to it."""

    def __init__(self, process: asyncio.subprocess.Process, channel: grpc.aio.Channel) -> None:
        self._process = process
        self._channel = channel

    async def hold(self, request: bytes) -> asyncio.Task[bytes]:
        """A call that has arrived in its handler."""

        async def call() -> bytes:
            answer: bytes = await unary_method(self._channel, "/test.Hold/Hold")(request)
            return answer

        task = asyncio.create_task(call())
        assert await self.line() == "started"
        return task

    async def line(self) -> str:
        return await next_line(self._process)

    def signal(self, which: signal.Signals) -> None:
        self._process.send_signal(which)

    async def exit_code(self) -> int:
        return await self._process.wait()


async def next_line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


@asynccontextmanager
async def running(*wrapper: str) -> AsyncIterator[Process]:
    child = await asyncio.create_subprocess_exec(
        *(*wrapper, sys.executable, "-c", PROCESS, str(LONG_GRACE_MS)),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with open_channel(await next_line(child)) as channel:
            yield Process(child, channel)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


@pytest.fixture
async def process(usual_hangups: None) -> AsyncIterator[Process]:
    async with running() as process:
        yield process


@pytest.fixture
async def nohup() -> AsyncIterator[Process]:
    async with running("nohup") as process:
        yield process


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_lets_calls_finish_and_ends_the_process_with_code_zero(
    process: Process, which: signal.Signals
) -> None:
    """S5: stops gracefully on SIGTERM, and when its terminal is closed."""
    call = await process.hold(b"until the stop begins")

    process.signal(which)

    assert await call == b"done"
    assert await process.line() == "stopping"
    assert await process.line() == "closed"
    assert await process.exit_code() == 0


async def test_a_second_signal_ends_the_process_at_once_and_in_order(process: Process) -> None:
    call = await process.hold(b"for ever")
    process.signal(signal.SIGTERM)
    assert await process.line() == "stopping"

    process.signal(signal.SIGTERM)

    assert await process.line() == "closed"
    assert await process.exit_code() == 0
    with pytest.raises(errors.Unavailable):
        await call


async def test_a_process_that_was_started_to_outlive_its_terminal_does(nohup: Process) -> None:
    """S5: `nohup` ignores SIGHUP for the process, and the process leaves it at that."""
    nohup.signal(signal.SIGHUP)

    call = await nohup.hold(b"until the stop begins")

    nohup.signal(signal.SIGTERM)
    assert await call == b"done"
    assert await nohup.exit_code() == 0
